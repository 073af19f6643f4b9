"""WKV of many tokens from e4m3 weights, decoded in the main loop: no second copy, no workspace.

Operations: 2 * M * N * K, 322 GFLOP at M=1024 for 25600 x 6144, 400 us at 805 TFLOP/s. Outputs are the tall side of the
product: a program decodes BN x BK codes into the registers that the tensor core reads its left operand from, while the
products of the step before still run, and each decoded weight serves BM tokens from shared memory. The weights are in
unit order (``weights.py``), so decoding needs no shared memory of its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_nvidia.decode import scaled, shifted_codes
from engram_nvidia.weights import PackedWeight


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
    PADDED_K: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    LAYOUT: tl.constexpr,
    BY_ROW: tl.constexpr,
    FAST: tl.constexpr,
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
    if LAYOUT == 0:
        unit = line * (PADDED_K // 32) + block
        STEP: tl.constexpr = KB
    elif LAYOUT == 1:
        unit = (block // 4) * (N // 16 * 4) + line * 4 + block % 4
        STEP: tl.constexpr = (KB // 4) * (N // 16 * 4)
    else:
        unit = (line // LAYOUT) * (PADDED_K // 32 * LAYOUT) + block * LAYOUT + line % LAYOUT
        STEP: tl.constexpr = KB * LAYOUT
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
    for i in tl.range(0, PADDED_K // BK, num_stages=STAGES):
        word = tl.load(word_at + i * (STEP * 128))
        scale = tl.load(scale_at + i * KB)
        if K == PADDED_K:
            row = tl.load(row_at + i * BK, mask=inside, other=0.0)
        else:
            row = tl.load(row_at + i * BK, mask=inside & (k + i * BK < K)[None, :], other=0.0)
        code = tl.reshape(shifted_codes(word), [KB, NB, 8, 4, 4, 2, 2])
        if BY_ROW:
            weight = scaled(code, scale, FAST)
        else:
            weight = scaled(code, scale[:, :, None, None, None, None, None], FAST)
        # [KB, NB, g, t, p, e, r] to outputs (NB, r, g) by inputs (KB, t, p, e).
        weight = tl.reshape(tl.permute(weight, [1, 6, 2, 0, 3, 4, 5]), [BN, BK])
        acc = tl.dot(weight, tl.trans(row), acc)
    n = tile_n * BN + tl.arange(0, BN)
    to = out + m[:, None].to(tl.int64) * out_stride + n[None, :]
    tl.store(to, tl.trans(acc.to(tl.bfloat16)), mask=inside & (n < N)[None, :])


def wkv_many(rows: torch.Tensor, weight: PackedWeight, out: torch.Tensor, fast: bool) -> torch.Tensor:
    """``out`` ``[T, N]`` bf16 from ``rows`` ``[T, K]`` bf16, both dense in the last dimension; any T.

    ``fast``: decode through inline PTX (needs ``weight.fast`` and a GPU). Operands are checked by the caller.
    """
    tokens = int(rows.shape[0])
    bn, bm, bk, warps, stages, group = _shape(tokens, weight.n)
    _many_kernel[(triton.cdiv(weight.n, bn) * triton.cdiv(tokens, bm),)](
        rows,
        weight.words,
        weight.scales,
        out,
        tokens,
        rows.stride(0),
        out.stride(0),
        N=weight.n,
        K=weight.k,
        PADDED_K=weight.padded_k,
        BN=bn,
        BM=bm,
        BK=bk,
        GROUP=group,
        STAGES=stages,
        LAYOUT=0,
        BY_ROW=weight.by_row,
        FAST=fast and weight.fast,
        num_warps=warps,
    )
    return out


def _shape(tokens: int, n: int) -> tuple[int, int, int, int, int, int]:
    """Outputs and tokens a program, inputs a step, warps, stages, tiles a group."""
    if tokens <= 64:
        return 64, max(16, triton.next_power_of_2(tokens)), 128, 4, 4, 8
    return 128, 128 if tokens <= 128 else 256, 64, 8, 3, 8
