"""WKV of bf16 rows from e4m3 weights, decoded in the main loop: half the memory of bf16 weights.

Bytes: N * K codes, 157 MB for 25600 x 6144, a floor of 30 us at MI300X's 5.3 TB/s; operations: 2 * M * N * K, so that
from some 250 tokens on the matrix cores are the limit. The codes are read as they lie in the checkpoint, with one scale
byte for 32 x 32 of them (or 1 x 32), and become bf16 in registers: the code's bits as float32 times a power of two are
the weight's exact value, and its upper half is the bf16. No fp8 type is involved, so gfx942 reads e4m3fn as such.

Tiles were chosen by what the assembly shows (matrix instructions, no spills), not measured on a card.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_core.checks import check_tensor
from engram_core.kernels.lookup import decode_e4m3fn, decode_e8m0
from engram_rocm.arch import matrix_options
from engram_rocm.weights import CodedWeight


@triton.jit
def _weights(code, scale, FAST: tl.constexpr):
    """bf16 weights of code bytes and scale bytes of broadcastable shapes.

    FAST: for weights without NaN codes whose values are all normal bf16 numbers (``CodedWeight.fast``).
    """
    if FAST:
        b = code.to(tl.int32)
        bits = ((b & 0x80) << 24) | ((b & 0x7F) << 20)
        factor = ((scale.to(tl.int32) + 120) << 23).to(tl.float32, bitcast=True)
        exact = bits.to(tl.float32, bitcast=True) * factor
        weight = (exact.to(tl.int32, bitcast=True) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        weight = (decode_e4m3fn(code) * decode_e8m0(scale)).to(tl.bfloat16)
    return weight


@triton.jit(do_not_specialize=["num_tokens"])
def _w8a16_kernel(
    rows,
    codes,
    scales,
    out,
    num_tokens,
    rows_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    FAST: tl.constexpr,
):
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    kb = tl.arange(0, BK // 32)
    inside = (m < num_tokens)[:, None]
    wide = (n < N)[:, None]
    row_at = rows + m[:, None].to(tl.int64) * rows_stride + k[None, :]
    code_at = codes + n[:, None].to(tl.int64) * K + k[None, :]
    scale_at = scales + (n // SCALE_ROWS)[:, None].to(tl.int64) * (K // 32) + kb[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, K, BK):
        if K % BK == 0:
            row = tl.load(row_at + first, mask=inside, other=0.0)
            code = tl.load(code_at + first, mask=wide, other=0)
            scale = tl.load(scale_at + first // 32, mask=wide, other=127)
        else:
            row = tl.load(row_at + first, mask=inside & (k + first < K)[None, :], other=0.0)
            code = tl.load(code_at + first, mask=wide & (k + first < K)[None, :], other=0)
            scale = tl.load(scale_at + first // 32, mask=wide & (kb * 32 + first < K)[None, :], other=127)
        weight = _weights(tl.reshape(code, [BN, BK // 32, 32]), scale[:, :, None], FAST)
        acc = tl.dot(row, tl.trans(tl.reshape(weight, [BN, BK])), acc)
    to = out + m[:, None].to(tl.int64) * out_stride + n[None, :]
    tl.store(to, acc.to(tl.bfloat16), mask=inside & (n < N)[None, :])


def wkv_w8a16(rows: torch.Tensor, weight: CodedWeight, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` ``[T, N]`` bf16 with ``rows`` ``[T, K]`` bf16 times ``weight``; both dense in the last dimension.

    Raises :class:`~engram_core.errors.InvalidArgumentError` before anything is launched.
    """
    n, k = (int(size) for size in weight.codes.shape)
    check_tensor("rows", rows, ("T", k), (torch.bfloat16,), weight.codes.device, True)
    tokens = int(rows.shape[0])
    check_tensor("out", out, (tokens, n), (torch.bfloat16,), rows.device, True)
    if tokens == 0:
        return out
    bm, bn, bk, warps = _shape(tokens, n)
    _w8a16_kernel[(triton.cdiv(n, bn), triton.cdiv(tokens, bm))](
        rows,
        weight.codes,
        weight.scales,
        out,
        tokens,
        rows.stride(0),
        out.stride(0),
        N=n,
        K=k,
        BM=bm,
        BN=bn,
        BK=bk,
        SCALE_ROWS=weight.scale_rows,
        FAST=weight.fast,
        num_warps=warps,
        num_stages=2,
        **matrix_options(),
    )
    return out


def _shape(tokens: int, n: int) -> tuple[int, int, int, int]:
    """Tokens and outputs a program, inputs a step, warps."""
    if tokens <= 16:
        # A slice of few outputs has to be spread over some 300 compute units.
        return 16, 32 if n >= 8192 else 16, 256, 2
    if tokens <= 64:
        return 32 if tokens <= 32 else 64, 64, 128, 4
    return 128, 128, 64, 8
