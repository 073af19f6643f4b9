"""The gate into the residual streams (``post_wkv``), one launch.

Bytes a token at H=4, dim 5120, bf16: 40,960 hidden in, 51,200 kv in, 40,960 out; 545 MB at T=4096, a floor of 127 us at
4.3 TB/s. A program takes one residual copy and several tokens: the product of the two gate weights stays in registers
over its tokens, so only hidden, key and value are read for each, all at once before the first reduction. The value is
shared by H programs that run side by side and comes from L2 for all but the first. ``dim`` is cut into two powers of
two, so that 5120 = 4096 + 1024 wastes no lane.

Everything is float32 after the loads; the result is rounded once. Masked rows and rows past ``num_kv_tokens`` are
stored from the input's own bits, and their kv is never read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_core.checks import check_disjoint, check_tensor
from engram_core.errors import InvalidArgumentError
from engram_core.kernels import INTERPRETED
from engram_core.specs import GateWeights

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _sigmoid_of_root(dot, clamp):
    """``sigmoid(copysign(sqrt(max(|dot|, clamp)), dot))`` in float32; NaN stays NaN, -0.0 counts as negative."""
    size = tl.abs(dot)
    # Not tl.maximum: the hardware's drops NaN.
    root = tl.sqrt_rn(tl.where(size < clamp, clamp, size))
    # exp2 of a product rounded to float32 loses |x| ulps; the rounding error is put back to first order.
    power = root * _LOG2E
    rest = tl.fma(root, _LOG2E, -power)
    rest = tl.where(power < 200.0, rest, 0.0)
    small = tl.exp2(-power) * (1.0 - rest * 0.6931471805599453)
    negative = dot.to(tl.int32, bitcast=True) < 0
    return tl.where(negative, small, 1.0) / (1.0 + small)


@triton.jit
def _add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


@triton.jit
def _sums(x, y, z, FUSED: tl.constexpr):
    """The three sums; fused: one exchange between the warps instead of three (the interpreter sums one by one)."""
    if FUSED:
        x, y, z = tl.reduce((x, y, z), 0, _add3)
    else:
        x, y, z = tl.sum(x, 0), tl.sum(y, 0), tl.sum(z, 0)
    return x, y, z


@triton.jit
def _fold(head, tail, HEAD: tl.constexpr, TAIL: tl.constexpr):
    """Add the head's pieces to the tail, so that one reduction over TAIL lanes is left."""
    return tl.sum(tl.reshape(head, [HEAD // TAIL, TAIL]), 0) + tail


@triton.jit
def _weights(q_weight, k_weight, d, DIM: tl.constexpr):
    """The product of the two gate weights of one copy."""
    q = tl.load(q_weight + d, mask=d < DIM, other=0.0).to(tl.float32)
    return q * tl.load(k_weight + d, mask=d < DIM, other=0.0).to(tl.float32)


@triton.jit
def _token(
    t,
    copy,
    a,
    b,
    weight_a,
    weight_b,
    q_weight,
    k_weight,
    hidden,
    kv,
    token_mask,
    out,
    num_kv_tokens,
    eps,
    clamp,
    hidden_stride_t,
    hidden_stride_h,
    kv_stride_t,
    mask_stride,
    out_stride_t,
    out_stride_h,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    FUSED: tl.constexpr,
    ALONE: tl.constexpr,
):
    token = tl.cast(t, tl.int64)
    live = t < num_kv_tokens
    if HAS_MASK:
        live = live & (tl.load(token_mask + token * mask_stride, mask=live, other=0) != 0)
    source = hidden + token * hidden_stride_t + copy * hidden_stride_h
    key = kv + token * kv_stride_t + copy * DIM
    value = kv + token * kv_stride_t + COPIES * DIM
    raw_a = tl.load(source + a)
    key_a = tl.load(key + a, mask=live, other=0.0)
    if TAIL > 0:
        raw_b = tl.load(source + b, mask=b < DIM, other=0.0)
        key_b = tl.load(key + b, mask=live & (b < DIM), other=0.0)
    if ALONE:
        # After the loads that come from far: these are the same for all tokens and near.
        weight_a = _weights(q_weight, k_weight, a, DIM)
        weight_b = _weights(q_weight, k_weight, b, DIM)
    value_a = tl.load(value + a, mask=live, other=0.0)
    h_a = raw_a.to(tl.float32)
    k_a = key_a.to(tl.float32)
    hh, kk, hk = h_a * h_a, k_a * k_a, h_a * weight_a * k_a
    if TAIL > 0:
        value_b = tl.load(value + b, mask=live & (b < DIM), other=0.0)
        h_b = raw_b.to(tl.float32)
        k_b = key_b.to(tl.float32)
        hh = _fold(hh, h_b * h_b, HEAD, TAIL)
        kk = _fold(kk, k_b * k_b, HEAD, TAIL)
        hk = _fold(hk, h_b * weight_b * k_b, HEAD, TAIL)
    hh, kk, hk = _sums(hh, kk, hk, FUSED)
    dot = hk * tl.rsqrt(hh * (1.0 / DIM) + eps) * tl.rsqrt(kk * (1.0 / DIM) + eps) * (DIM**-0.5)
    gate = _sigmoid_of_root(dot, clamp)
    target = out + token * out_stride_t + copy * out_stride_h
    mixed_a = (h_a + gate * value_a.to(tl.float32)).to(tl.bfloat16)
    # Two stores of which one happens: a choice between values would convert them to bf16 one by one.
    tl.store(target + a, mixed_a, mask=live)
    tl.store(target + a, raw_a, mask=live == 0)
    if TAIL > 0:
        mixed_b = (h_b + gate * value_b.to(tl.float32)).to(tl.bfloat16)
        tl.store(target + b, mixed_b, mask=live & (b < DIM))
        tl.store(target + b, raw_b, mask=(live == 0) & (b < DIM))


@triton.jit(do_not_specialize=["num_tokens", "num_kv_tokens", "eps", "clamp"])
def _gate_kernel(
    hidden,
    kv,
    q_weight,
    k_weight,
    token_mask,
    out,
    num_tokens,
    num_kv_tokens,
    eps,
    clamp,
    hidden_stride_t,
    hidden_stride_h,
    kv_stride_t,
    q_stride_h,
    k_stride_h,
    mask_stride,
    out_stride_t,
    out_stride_h,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    FUSED: tl.constexpr,
    STAGES: tl.constexpr,
):
    copy = tl.program_id(0) % COPIES
    first = tl.program_id(0) // COPIES
    # [0, HEAD) is whole; [HEAD, DIM) is padded to TAIL.
    a = tl.arange(0, HEAD)
    b = HEAD + tl.arange(0, TAIL) if TAIL > 0 else a
    q_weight += copy * q_stride_h
    k_weight += copy * k_stride_h
    if STAGES > 0:
        weight_a = _weights(q_weight, k_weight, a, DIM)
        weight_b = _weights(q_weight, k_weight, b, DIM)
        for t in tl.range(first, num_tokens, tl.num_programs(0) // COPIES, num_stages=STAGES):
            _token(
                t, copy, a, b, weight_a, weight_b, q_weight, k_weight, hidden, kv, token_mask, out, num_kv_tokens,
                eps, clamp, hidden_stride_t, hidden_stride_h, kv_stride_t, mask_stride, out_stride_t, out_stride_h,
                DIM, COPIES, HEAD, TAIL, HAS_MASK, FUSED, False,
            )  # fmt: skip
    else:
        _token(
            first, copy, a, b, 0.0, 0.0, q_weight, k_weight, hidden, kv, token_mask, out, num_kv_tokens,
            eps, clamp, hidden_stride_t, hidden_stride_h, kv_stride_t, mask_stride, out_stride_t, out_stride_h,
            DIM, COPIES, HEAD, TAIL, HAS_MASK, FUSED, True,
        )  # fmt: skip


def gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weights: GateWeights,
    token_mask: torch.Tensor | None = None,
    num_kv_tokens: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``bf16(h + gate * value)`` ``[T, H, dim]`` (docs/contract.md, "Gate").

    ``hidden_states`` ``[T, H, dim]`` and ``kv`` ``[T, (H + 1) * dim]`` bf16, last dimension dense; ``token_mask``
    ``[T]`` bool; ``num_kv_tokens``: rows at or past it come out as they went in.
    Raises :class:`InvalidArgumentError` before anything is launched.
    """
    copies, dim = weights.hc_mult, weights.dim
    hidden = check_tensor("hidden_states", hidden_states, ("T", copies, dim), (torch.bfloat16,), None, True)
    tokens, device = int(hidden.shape[0]), hidden.device
    check_tensor("kv", kv, (tokens, (copies + 1) * dim), (torch.bfloat16,), device, True)
    check_tensor("q_weight", weights.q_weight, (copies, dim), (torch.bfloat16, torch.float32), device, True)
    check_tensor("k_weight", weights.k_weight, (copies, dim), (torch.bfloat16, torch.float32), device, True)
    if token_mask is not None:
        check_tensor("token_mask", token_mask, (tokens,), (torch.bool,), device)
    if num_kv_tokens is None:
        num_kv_tokens = tokens
    elif not 0 <= num_kv_tokens <= tokens:
        raise InvalidArgumentError("num_kv_tokens", str(num_kv_tokens), f"0 to {tokens}, the rows of kv")
    if out is None:
        out = torch.empty((tokens, copies, dim), dtype=torch.bfloat16, device=device)
    else:
        check_tensor("out", out, (tokens, copies, dim), (torch.bfloat16,), device, True)
        check_disjoint(
            "out",
            out,
            hidden_states=hidden,
            kv=kv,
            q_weight=weights.q_weight,
            k_weight=weights.k_weight,
            token_mask=token_mask,
        )
    if tokens == 0:
        return out
    programs, warps, stages = _shape(tokens, copies, device)
    head, tail = _halves(dim, warps)
    _gate_kernel[(programs * copies,)](
        hidden,
        kv,
        weights.q_weight,
        weights.k_weight,
        token_mask if token_mask is not None else hidden,
        out,
        tokens,
        num_kv_tokens,
        weights.eps,
        weights.clamp,
        hidden.stride(0),
        hidden.stride(1),
        kv.stride(0),
        weights.q_weight.stride(0),
        weights.k_weight.stride(0),
        token_mask.stride(0) if token_mask is not None else 0,
        out.stride(0),
        out.stride(1),
        DIM=dim,
        COPIES=copies,
        HEAD=head,
        TAIL=tail,
        HAS_MASK=token_mask is not None,
        FUSED=not INTERPRETED,
        STAGES=stages,
        num_warps=warps,
    )
    return out


def _halves(dim: int, warps: int) -> tuple[int, int]:
    """``dim`` as a power of two that fits and one that covers the rest (0: nothing is left).

    The second is at least one load of 16 bytes a lane, so that folding the first onto it stays within a lane.
    """
    head = 1 << (dim.bit_length() - 1)
    return head, 0 if head == dim else min(head, max(triton.next_power_of_2(dim - head), 256 * warps))


def _shape(tokens: int, copies: int, device: torch.device) -> tuple[int, int, int]:
    """Programs a copy, their warps, stages of the loop over tokens (0: one token each).

    With many tokens one program a multiprocessor walks through them and keeps three in flight: on an H200 128.6 us at
    T=4096, against 141 with one token each. Measured on NVIDIA alone; elsewhere there is no loop.
    """
    if tokens < 256 or device.type != "cuda" or torch.version.hip is not None:
        return tokens, 4, 0
    each = torch.cuda.get_device_properties(device).multi_processor_count // copies
    return max(1, min(tokens, each - each % 4 if each > 4 else each)), 4, 4
