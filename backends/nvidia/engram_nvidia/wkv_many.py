"""WKV of many tokens from e4m3 weights, decoded in the main loop: no second copy, no workspace.

Operations: 2 * M * N * K, 322 GFLOP at M=1024 for 25600 x 6144, 400 us at 805 TFLOP/s. Outputs are the tall side of the
product: a program decodes BN x BK codes into the registers that the tensor core reads its left operand from, while the
products of the step before still run, and each decoded weight serves BM tokens from shared memory. The weights are in
unit order (``weights.py``), so decoding needs no shared memory of its own. Where tiles are few (a tensor-parallel
shard) programs share K and a second kernel adds their float32 parts, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engram_nvidia.arch import Chip
from engram_nvidia.decode import scaled, shifted_codes
from engram_nvidia.weights import PackedWeight

# Two programs for each of an H200's 132 multiprocessors. A constant, and not the device's own number: how K is cut, and
# with it the last bit of a result, is the same everywhere.
_PROGRAMS = 264


@triton.jit(do_not_specialize=["num_tokens"])
def _many_kernel(
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
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    BY_ROW: tl.constexpr,
    FAST: tl.constexpr,
    SETTLE: tl.constexpr,
):
    NB: tl.constexpr = BN // 16
    KB: tl.constexpr = BK // 32
    # GROUP tiles of outputs run through all tokens before the next ones: their weights stay in L2.
    tiles_n: tl.constexpr = (N + BN - 1) // BN
    tiles_m = tl.cdiv(num_tokens, BM)
    each = GROUP * tiles_m
    first = tl.program_id(0) // each * GROUP
    size = tl.minimum(tiles_n - first, GROUP)
    tile_n = first + tl.program_id(0) % each % size
    tile_m = tl.program_id(0) % each // size

    nb = tl.arange(0, NB)
    kb = tl.arange(0, KB)
    # Words [KB, NB, 128].
    line = (tile_n * NB + nb)[None, :]
    block = kb[:, None]
    # Units lie [K/128][N/16][4]; a step of fewer than four walks within a group of four first.
    GROUPS: tl.constexpr = PADDED_N // 4
    TURNS: tl.constexpr = 4 // KB if KB < 4 else 1
    unit = (block // 4) * GROUPS + line * 4 + block % 4
    word_at = words + unit[:, :, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, None, :]
    if BY_ROW:
        # [KB, NB, g, t, p, e, r]: one scale for each output.
        g = tl.arange(0, 8)[None, None, :, None, None, None, None]
        r = tl.arange(0, 2)[None, None, None, None, None, None, :]
        output = line[:, :, None, None, None, None, None] * 16 + 8 * r + g
        scale_at = scales + output * (PADDED_K // 32) + block[:, :, None, None, None, None, None]
    else:
        scale_at = scales + (line // 2) * (PADDED_K // 32) + block
    m = tile_m * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    row_at = rows + m[:, None].to(tl.int64) * rows_stride + k[None, :]
    inside = (m < num_tokens)[:, None]

    acc = tl.zeros([BN, BM], tl.float32)
    begin = tl.program_id(1) * (PADDED_K // BK // SPLIT)
    for i in tl.range(begin, begin + PADDED_K // BK // SPLIT, num_stages=STAGES):
        along = (i // TURNS) * ((KB + 3) // 4) * GROUPS + (i % TURNS) * KB
        word = tl.load(word_at + along * 128)
        scale = tl.load(scale_at + i * KB)
        if K == PADDED_K:
            row = tl.load(row_at + i * BK, mask=inside, other=0.0)
        else:
            row = tl.load(row_at + i * BK, mask=inside & (k + i * BK < K)[None, :], other=0.0)
        code = tl.reshape(shifted_codes(word), [KB, NB, 8, 4, 4, 2, 2])
        if BY_ROW:
            weight = scaled(code, scale, FAST, SETTLE)
        else:
            weight = scaled(code, scale[:, :, None, None, None, None, None], FAST, SETTLE)
        # [KB, NB, g, t, p, e, r] to outputs (NB, r, g) by inputs (KB, t, p, e).
        weight = tl.reshape(tl.permute(weight, [1, 6, 2, 0, 3, 4, 5]), [BN, BK])
        acc = tl.dot(weight, tl.trans(row), acc)
    n = tile_n * BN + tl.arange(0, BN)
    at = m[:, None].to(tl.int64) * out_stride + n[None, :]
    if SPLIT > 1:
        # float32 parts [SPLIT, T, N]; the sum runs in their order, so the result does not depend on who is first.
        at += tl.program_id(1) * num_tokens.to(tl.int64) * out_stride
    tl.store(out + at, tl.trans(acc.to(out.dtype.element_ty)), mask=inside & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _sum_kernel(
    parts,
    out,
    num_tokens,
    out_stride,
    N: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SPLIT):
        total += tl.load(parts + (part * num_tokens + token) * N + n, mask=n < N, other=0.0)
    tl.store(out + token * out_stride + n, total.to(tl.bfloat16), mask=n < N)


def wkv_many(rows: torch.Tensor, weight: PackedWeight, out: torch.Tensor, chip: Chip) -> torch.Tensor:
    """``out`` ``[T, N]`` bf16 from ``rows`` ``[T, K]`` bf16, both dense in the last dimension; any T.

    Operands are checked by the caller.
    """
    tokens = int(rows.shape[0])
    tile = _tile(tokens, weight.n, chip)
    split = _split(tokens, weight, tile)
    parts = out if split == 1 else torch.empty(split, tokens, weight.n, dtype=torch.float32, device=out.device)
    _many_kernel[(triton.cdiv(weight.n, tile.bn) * triton.cdiv(tokens, tile.bm), split)](
        rows,
        weight.words,
        weight.scales,
        parts,
        tokens,
        rows.stride(0),
        out.stride(0) if split == 1 else weight.n,
        N=weight.n,
        K=weight.k,
        PADDED_N=weight.padded_n,
        PADDED_K=weight.padded_k,
        BN=tile.bn,
        BM=tile.bm,
        BK=tile.bk,
        GROUP=8,
        SPLIT=split,
        STAGES=tile.stages,
        BY_ROW=weight.by_row,
        FAST=chip.fast and weight.fast,
        SETTLE=chip.settle,
        num_warps=tile.warps,
    )
    if split > 1:
        _sum_kernel[(tokens, triton.cdiv(weight.n, 1024))](
            parts, out, tokens, out.stride(0), N=weight.n, SPLIT=split, BLOCK=1024, num_warps=4
        )
    return out


@dataclass(frozen=True, slots=True)
class _Tile:
    """Outputs and tokens a program, inputs a step, warps, stages."""

    bn: int
    bm: int
    bk: int
    warps: int
    stages: int


def _tile(tokens: int, n: int, chip: Chip) -> _Tile:
    """The fastest of those measured on an H200 (benchmarks/RESULTS.md); elsewhere one that fits, not tuned."""
    if not chip.settle:
        return _Tile(64, min(128, max(16, triton.next_power_of_2(tokens))), 64, 4, 3)
    if tokens <= 64:
        bm = max(16, triton.next_power_of_2(tokens))
        return _Tile(128, bm, 128, 8, 3) if n > 6400 and tokens > 32 else _Tile(64, bm, 128, 4, 3)
    if tokens <= 128:
        return _Tile(128, 128, 64, 8, 4) if n > 12800 else _Tile(64, 128, 128, 4, 3)
    return _Tile(64, 256, 64, 4, 3)


def _split(tokens: int, weight: PackedWeight, tile: _Tile) -> int:
    """Programs that share K: as many as fill the card twice where tiles are few."""
    tiles = triton.cdiv(weight.n, tile.bn) * triton.cdiv(tokens, tile.bm)
    split = 1
    while tiles * split * 2 <= _PROGRAMS and split < 8 and weight.padded_k // tile.bk % (split * 2) == 0:
        split *= 2
    return split
