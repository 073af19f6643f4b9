"""WKV of few tokens from e4m3 weights: every code is read once and the bytes are the limit.

Bytes: N * K codes, 157 MB for 25600 x 6144, 36.6 us at 4.3 TB/s. Tokens are the narrow side of the product (8 columns
of ``m16n8k16``), outputs the 16 rows, so that one token wastes no more than the smallest tile. The warps of a program
share its BN outputs and cut K between them: all of K stays in one program, the float32 partial sums are added in warp
order at the end, and the result does not depend on the grid. No split of K over programs is needed even at N = 3200.

The weights come in unit order (``weights.py``): a lane's 16 bytes are its own operand. The tokens are loaded straight
into the other operand's registers, 8 values a lane. Nothing is staged in shared memory: with many small programs in
flight the loads of some hide behind the products of others, which is faster here than asynchronous copies (39.6 us
against 42.3, one token, 25600 x 6144, H200).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_nvidia.arch import Chip
from engram_nvidia.decode import scaled, shifted_codes
from engram_nvidia.weights import PackedWeight


@triton.jit(do_not_specialize=["num_tokens"])
def _few_kernel(
    rows,
    words,
    scales,
    out,
    num_tokens,
    rows_stride,
    out_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_N: tl.constexpr,
    PADDED_K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    WARPS: tl.constexpr,
    BY_ROW: tl.constexpr,
    FAST: tl.constexpr,
):
    NB: tl.constexpr = BN // 16
    MB: tl.constexpr = BM // 8
    KB: tl.constexpr = BK // 32
    tile = tl.program_id(0)
    warp = tl.arange(0, WARPS)
    nb = tl.arange(0, NB)
    kb = tl.arange(0, KB)

    # Words [WARPS, NB, KB, 128]: the warps take turns along K.
    block = (warp * KB)[:, None, None] + kb[None, None, :]
    line = (tile * NB + nb)[None, :, None]
    # Units lie [K/128][N/16][4].
    unit = (block // 4) * (PADDED_N // 4) + line * 4 + block % 4
    STEP: tl.constexpr = WARPS * KB // 4 * (PADDED_N // 4) * 128
    word_at = words + unit[:, :, :, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, None, None, :]
    if BY_ROW:
        # [WARPS, NB, KB, g, t, p, e, r]: one scale for each output.
        g = tl.arange(0, 8)[None, None, None, :, None, None, None, None]
        r = tl.arange(0, 2)[None, None, None, None, None, None, None, :]
        output = line[:, :, :, None, None, None, None, None] * 16 + 8 * r + g
        scale_at = scales + output * (PADDED_K // 32) + block[:, :, :, None, None, None, None, None]
    else:
        scale_at = scales + (line // 2) * (PADDED_K // 32) + block

    # Tokens [g, WARPS, MB, KB, 32]: in this order of dimensions the lanes are laid as the product wants them.
    token = tl.arange(0, MB)[None, None, :, None, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    place = block[None, :, :, :, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    row_at = rows + token.to(tl.int64) * rows_stride + place
    inside = token < num_tokens

    acc = tl.zeros([WARPS, BN, BM], tl.float32)
    # One stage: loads are not staged in shared memory (see above).
    for i in tl.range(PADDED_K // (BK * WARPS), num_stages=1):
        word = tl.load(word_at + i * STEP, eviction_policy="evict_first")
        scale = tl.load(scale_at + i * (WARPS * KB))
        if K == PADDED_K:
            row = tl.load(row_at + i * (WARPS * BK), mask=inside, other=0.0)
        else:
            row = tl.load(row_at + i * (WARPS * BK), mask=inside & (place + i * (WARPS * BK) < K), other=0.0)
        # [WARPS, NB, KB, 128, e, r] to [WARPS, NB, KB, g, t, p, e, r]: a lane's inputs are 8 t + 2 p + e.
        code = tl.reshape(shifted_codes(word), [WARPS, NB, KB, 8, 4, 4, 2, 2])
        if BY_ROW:
            weight = scaled(code, scale, FAST, False)
        else:
            weight = scaled(code, scale[:, :, :, None, None, None, None, None], FAST, False)
        # Outputs (NB, r, g) by inputs (KB, t, p, e).
        weight = tl.reshape(tl.permute(weight, [0, 1, 7, 3, 2, 4, 5, 6]), [WARPS, BN, BK])
        row = tl.reshape(tl.permute(row, [1, 3, 4, 2, 0]), [WARPS, BK, BM])
        acc = tl.dot(weight, row, acc)
    total = tl.sum(acc, axis=0).to(tl.bfloat16)
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    to = m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(out + to, total, mask=(m < num_tokens)[None, :] & (n < N)[:, None])


def wkv_few(rows: torch.Tensor, weight: PackedWeight, out: torch.Tensor, chip: Chip) -> torch.Tensor:
    """``out`` ``[T, N]`` bf16 from ``rows`` ``[T, K]`` bf16, T at most 64, both dense in the last dimension.

    Operands are checked by the caller.
    """
    tokens = int(rows.shape[0])
    bm = max(8, triton.next_power_of_2(tokens))
    bn, bk, warps = _shape(bm, weight.n)
    _few_kernel[(triton.cdiv(weight.n, bn),)](
        rows,
        weight.words,
        weight.scales,
        out,
        tokens,
        rows.stride(0),
        out.stride(0),
        N=weight.n,
        K=weight.k,
        PADDED_N=weight.padded_n,
        PADDED_K=weight.padded_k,
        BN=bn,
        BM=bm,
        BK=bk,
        WARPS=warps,
        BY_ROW=weight.by_row,
        FAST=chip.fast and weight.fast,
        num_warps=warps,
    )
    return out


def _shape(bm: int, n: int) -> tuple[int, int, int]:
    """Outputs a program, inputs a step and warp, warps: the fastest measured on an H200 (benchmarks/RESULTS.md)."""
    if n > 12800:
        return {8: (16, 32, 4), 16: (16, 64, 2)}.get(bm, (32, 64, 4))
    if n > 6400:
        return (32, 64, 4) if bm >= 32 else (16, 64, 4)
    return (16, 64, 4) if bm >= 32 and n > 3200 else (16, 64, 8)
