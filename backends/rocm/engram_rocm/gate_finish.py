"""Second half of the gate over slices of dim: from the gathered rows to the residual streams, one launch.

Bytes a token at H=4, dim 5120, P=4: 40,960 hidden in, 10,368 gathered rows in, 40,960 out; 378 MB at T=4096, a floor of
71 us at MI300X's 5.3 TB/s. A program takes one token and copy and holds the whole residual row in registers, so hidden
is read once for its sum of squares and for the result; the value is shared by the H programs of a token through L2.

Every rank adds the partial sums in rank order and has the same hidden states, so all ranks end with the same bits.
Rows that the mask or ``num_kv_tokens`` closes are selected from the input's own bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_core.backend import GateWeights
from engram_core.checks import check_disjoint, check_tensor
from engram_core.errors import InvalidArgumentError
from engram_core.kernels.gate import _fold, _halves, _sigmoid_of_root
from engram_rocm.gate_pack import row_width
from engram_rocm.split import Split


@triton.jit(do_not_specialize=["num_kv_tokens", "eps", "clamp"])
def _finish_kernel(
    hidden,
    gathered,
    token_mask,
    out,
    num_kv_tokens,
    eps,
    clamp,
    rank_stride,
    hidden_stride_t,
    hidden_stride_h,
    mask_stride,
    out_stride_t,
    out_stride_h,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    RANKS: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    WIDTH: tl.constexpr = DIM // RANKS
    copy = tl.program_id(0) % COPIES
    token = (tl.program_id(0) // COPIES).to(tl.int64)
    live = token < num_kv_tokens
    if HAS_MASK:
        live = live & (tl.load(token_mask + token * mask_stride) != 0)
    rank_step = rank_stride.to(tl.int64)
    row = gathered + token * (WIDTH + 4 * COPIES)
    source = hidden + token * hidden_stride_t + copy * hidden_stride_h
    # [0, HEAD) is whole; [HEAD, DIM) is padded to TAIL.
    a = tl.arange(0, HEAD)
    raw_a = tl.load(source + a)
    value_a = tl.load(row + (a // WIDTH) * rank_step + a % WIDTH, mask=live, other=0.0)
    h_a = raw_a.to(tl.float32)
    hh = h_a * h_a
    if TAIL > 0:
        b = HEAD + tl.arange(0, TAIL)
        real = b < DIM
        raw_b = tl.load(source + b, mask=real, other=0.0)
        value_b = tl.load(row + (b // WIDTH) * rank_step + b % WIDTH, mask=live & real, other=0.0)
        h_b = raw_b.to(tl.float32)
        hh = _fold(hh, h_b * h_b, HEAD, TAIL)
    kk = 0.0
    hk = 0.0
    for rank in tl.static_range(RANKS):
        pair = (row + rank * rank_step + WIDTH + 4 * copy).to(tl.pointer_type(tl.float32))
        kk += tl.load(pair)
        hk += tl.load(pair + 1)
    rh = tl.rsqrt(tl.sum(hh, 0) * (1.0 / DIM) + eps)
    dot = hk * rh * tl.rsqrt(kk * (1.0 / DIM) + eps) * (DIM**-0.5)
    gate = _sigmoid_of_root(dot, clamp)
    target = out + token * out_stride_t + copy * out_stride_h
    mixed_a = (h_a + gate * value_a.to(tl.float32)).to(tl.bfloat16)
    tl.store(target + a, tl.where(live, mixed_a, raw_a))
    if TAIL > 0:
        mixed_b = (h_b + gate * value_b.to(tl.float32)).to(tl.bfloat16)
        tl.store(target + b, tl.where(live, mixed_b, raw_b), mask=real)


def finish_gate(
    hidden: torch.Tensor,
    gathered: torch.Tensor,
    weights: GateWeights,
    split: Split,
    token_mask: torch.Tensor | None,
    num_kv_tokens: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Fill ``out`` ``[T, H, dim]`` from ``hidden`` and all ranks' rows ``gathered`` ``[P * T, w + 4 * H]``, rank major.

    Raises :class:`InvalidArgumentError` before anything is launched.
    """
    copies, dim, device = weights.hc_mult, weights.dim, hidden.device
    check_tensor("hidden_states", hidden, ("T", copies, dim), (torch.bfloat16,), None, True)
    tokens = int(hidden.shape[0])
    check_tensor("gathered", gathered, (split.ranks * tokens, row_width(split)), (torch.bfloat16,), device, True)
    check_tensor("out", out, (tokens, copies, dim), (torch.bfloat16,), device, True)
    check_disjoint("out", out, hidden_states=hidden, gathered=gathered, token_mask=token_mask)
    if token_mask is not None:
        check_tensor("token_mask", token_mask, (tokens,), (torch.bool,), device)
    if not gathered.is_contiguous():
        raise InvalidArgumentError("gathered", f"strides {gathered.stride()}", "a contiguous tensor")
    if tokens == 0:
        return out
    warps = 4
    head, tail = _halves(dim, warps)
    _finish_kernel[(tokens * copies,)](
        hidden,
        gathered,
        token_mask if token_mask is not None else hidden,
        out,
        num_kv_tokens,
        weights.eps,
        weights.clamp,
        tokens * gathered.shape[1],
        hidden.stride(0),
        hidden.stride(1),
        token_mask.stride(0) if token_mask is not None else 0,
        out.stride(0),
        out.stride(1),
        DIM=dim,
        COPIES=copies,
        RANKS=split.ranks,
        HEAD=head,
        TAIL=tail,
        HAS_MASK=token_mask is not None,
        num_warps=warps,
    )
    return out
