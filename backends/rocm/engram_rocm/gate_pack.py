"""First half of the gate over slices of dim: what a rank sends, one launch.

A row is ``[value slice | a pair of float32 for each copy: sum key^2, sum hidden*q*k*key over the slice]`` in
``w + 4 * H`` bf16 elements, so that one all-gather moves both: at P=4, H=4, dim 5120 it is 2,592 bytes a token, where
the slices of keys and value would be 12,800. Bytes in, a token: ``2 * (H * w)`` of hidden and ``2 * (H + 1) * w`` of
kv (23 KB there); 94 MB at T=4096, a floor of 18 us at MI300X's 5.3 TB/s.

A program takes one token and walks the slice with all copies side by side; every lane sums its own elements over the
whole walk, and one reduction a sum is left. What is summed of a closed row is never looked at, so no mask is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_core.backend import GateWeights
from engram_core.checks import check_tensor
from engram_core.errors import InvalidArgumentError
from engram_rocm.split import Split


@triton.jit
def _pack_kernel(
    hidden,
    kv,
    q_weight,
    k_weight,
    packed,
    hidden_stride_t,
    hidden_stride_h,
    kv_stride_t,
    q_stride_h,
    k_stride_h,
    WIDTH: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = packed + token * (WIDTH + 4 * COPIES)
    hidden += token * hidden_stride_t
    kv += token * kv_stride_t

    v = tl.arange(0, VALUE_BLOCK)
    value = tl.load(kv + COPIES * WIDTH + v, mask=v < WIDTH, other=0.0)
    tl.store(row + v, value, mask=v < WIDTH)

    copy = tl.arange(0, COPIES)[:, None]
    squares = tl.zeros([COPIES, BLOCK], tl.float32)
    products = tl.zeros([COPIES, BLOCK], tl.float32)
    for base in tl.static_range(0, WIDTH, BLOCK):
        d = base + tl.arange(0, BLOCK)[None, :]
        real = d < WIDTH
        h = tl.load(hidden + copy * hidden_stride_h + d, mask=real, other=0.0).to(tl.float32)
        key = tl.load(kv + copy * WIDTH + d, mask=real, other=0.0).to(tl.float32)
        weight = tl.load(q_weight + copy * q_stride_h + d, mask=real, other=0.0).to(tl.float32)
        weight *= tl.load(k_weight + copy * k_stride_h + d, mask=real, other=0.0).to(tl.float32)
        squares += key * key
        products += h * weight * key
    pair = (row + WIDTH).to(tl.pointer_type(tl.float32)) + 2 * tl.arange(0, COPIES)
    tl.store(pair, tl.sum(squares, 1))
    tl.store(pair + 1, tl.sum(products, 1))


def row_width(split: Split) -> int:
    """bf16 elements that a rank sends for a token."""
    return split.width + 4 * (split.outputs - 1)


def pack_slice(hidden: torch.Tensor, kv: torch.Tensor, weights: GateWeights, split: Split) -> torch.Tensor:
    """This rank's rows ``[T, w + 4 * H]`` bf16 of whole ``hidden`` ``[T, H, dim]`` and its ``kv`` ``[T, (H + 1) * w]``.

    bf16, last dimension dense. Raises :class:`InvalidArgumentError` before anything is launched.
    """
    copies, dim, device = weights.hc_mult, weights.dim, hidden.device
    if (copies + 1, dim) != (split.outputs, split.width * split.ranks):
        need = f"[{split.outputs - 1}, {split.width * split.ranks}], as the projection"
        raise InvalidArgumentError("gate", f"weights [{copies}, {dim}]", need)
    check_tensor("hidden_states", hidden, ("T", copies, dim), (torch.bfloat16,), None, True)
    tokens = int(hidden.shape[0])
    check_tensor("kv", kv, (tokens, split.features), (torch.bfloat16,), device, True)
    for name, weight in (("q_weight", weights.q_weight), ("k_weight", weights.k_weight)):
        check_tensor(name, weight, (copies, dim), (torch.bfloat16, torch.float32), device, True)
    packed = torch.empty(tokens, row_width(split), dtype=torch.bfloat16, device=device)
    if tokens == 0:
        return packed
    span = triton.next_power_of_2(split.width)
    _pack_kernel[(tokens,)](
        hidden[..., split.place],
        kv,
        weights.q_weight[:, split.place],
        weights.k_weight[:, split.place],
        packed,
        hidden.stride(0),
        hidden.stride(1),
        kv.stride(0),
        weights.q_weight.stride(0),
        weights.k_weight.stride(0),
        WIDTH=split.width,
        COPIES=copies,
        BLOCK=min(span, 2048 // copies),  # 8 elements a lane of 4 waves: loads of 16 bytes
        VALUE_BLOCK=span,
        num_warps=4,
    )
    return packed
