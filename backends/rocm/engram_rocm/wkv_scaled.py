"""WKV of packed rows from e4m3 weights by block-scaled matrix instructions (gfx950).

Bytes: N * K codes, 157 MB for 25600 x 6144, a floor of 20 us at MI350X's 8 TB/s; operations: 2 * M * N * K at the rate
of fp8. Rows go in as they lie in the table, 256 codes and 8 scales a column, so nothing is decoded or quantised: both
operands and both scales are what the checkpoint holds, and every product is exact in float32.

``tl.dot_scaled`` becomes ``v_mfma_scale_f32_16x16x128_f8f6f4`` there. On other targets it would be emulated.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from engram_core.checks import check_tensor
from engram_core.errors import InvalidArgumentError
from engram_core.formats import BLOCK, packed_width
from engram_rocm.arch import matrix_options
from engram_rocm.weights import CodedWeight


@triton.jit(do_not_specialize=["num_tokens"])
def _scaled_kernel(
    rows,
    codes,
    scales,
    out,
    num_tokens,
    stride_t,
    stride_c,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    DIM: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = (m < num_tokens)[:, None]
    wide = (n < N)[:, None]
    # Strides come in units of ALIGN: Triton itself looks for multiples of 16, and a row of 264 bytes is one of 8.
    token_at = rows + (m.to(tl.int64) * stride_t * ALIGN)[:, None]
    code_at = codes + n[:, None].to(tl.int64) * K
    scale_at = scales + (n // SCALE_ROWS)[:, None].to(tl.int64) * (K // 32)
    acc = tl.zeros([BM, BN], tl.float32)
    for first in tl.range(0, K, BK):
        # Input k lies in column k // DIM of a token; its scale follows that column's codes.
        k = first + tl.arange(0, BK)
        kb = first // 32 + tl.arange(0, BK // 32)
        column, block = k // DIM, kb // (DIM // 32)
        row_to = token_at + (column * stride_c * ALIGN + k % DIM)[None, :]
        row_scale_to = token_at + (block * stride_c * ALIGN + DIM + kb % (DIM // 32))[None, :]
        if K % BK == 0:
            row = tl.load(row_to, mask=inside, other=0)
            row_scale = tl.load(row_scale_to, mask=inside, other=127)
            code = tl.load(code_at + k[None, :], mask=wide, other=0)
            scale = tl.load(scale_at + kb[None, :], mask=wide, other=127)
        else:
            real, real_b = (k < K)[None, :], (kb < K // 32)[None, :]
            row = tl.load(row_to, mask=inside & real, other=0)
            row_scale = tl.load(row_scale_to, mask=inside & real_b, other=127)
            code = tl.load(code_at + k[None, :], mask=wide & real, other=0)
            scale = tl.load(scale_at + kb[None, :], mask=wide & real_b, other=127)
        acc = tl.dot_scaled(row, row_scale, "e4m3", tl.trans(code), scale, "e4m3", acc)
    to = out + m[:, None].to(tl.int64) * out_stride + n[None, :]
    tl.store(to, acc.to(tl.bfloat16), mask=inside & (n < N)[None, :])


def wkv_scaled(rows: torch.Tensor, weight: CodedWeight, out: torch.Tensor) -> torch.Tensor:
    """Fill ``out`` ``[T, N]`` bf16 with packed ``rows`` ``[T, C, W]`` uint8 times ``weight``; last dimensions dense.

    Raises :class:`InvalidArgumentError` before anything is launched.
    """
    n, k = (int(size) for size in weight.codes.shape)
    check_tensor("rows", rows, ("T", "C", "W"), (torch.uint8,), weight.codes.device, True)
    tokens, columns, width = (int(size) for size in rows.shape)
    dim = width * BLOCK // (BLOCK + 1)
    if packed_width(dim) != width or dim % BLOCK or columns * dim != k:
        raise InvalidArgumentError(
            "rows", f"{columns} rows of {width} bytes", f"rows of {k} codes in all and a scale for 32"
        )
    check_tensor("out", out, (tokens, n), (torch.bfloat16,), rows.device, True)
    if tokens == 0:
        return out
    align = math.gcd(16, rows.data_ptr(), rows.stride(0), rows.stride(1))
    bm, bn, bk, warps = _shape(tokens, n)
    _scaled_kernel[(triton.cdiv(n, bn), triton.cdiv(tokens, bm))](
        rows,
        weight.codes,
        weight.scales,
        out,
        tokens,
        rows.stride(0) // align,
        rows.stride(1) // align,
        out.stride(0),
        N=n,
        K=k,
        DIM=dim,
        BM=bm,
        BN=bn,
        BK=bk,
        SCALE_ROWS=weight.scale_rows,
        ALIGN=align,
        num_warps=warps,
        num_stages=2,
        **matrix_options(),
    )
    return out


def _shape(tokens: int, n: int) -> tuple[int, int, int, int]:
    """Tokens and outputs a program, inputs a step, warps."""
    if tokens <= 16:
        # A slice of few outputs has to be spread over some 256 compute units.
        return 16, 32 if n >= 8192 else 16, 256, 2
    if tokens <= 64:
        return 32 if tokens <= 32 else 64, 64, 256, 4
    return 128, 128, 128, 8
