"""e4m3 weights to a bf16 workspace ``[N, K]`` for cuBLAS, where tokens are many.

Bytes: N * K codes in, 2 * N * K out: 472 MB for 25600 x 6144, 110 us at 4.3 TB/s. A lane's words are 8 inputs in a row
of two outputs, so a store is 16 bytes of each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engram_nvidia.arch import Chip
from engram_nvidia.decode import scaled, shifted_codes
from engram_nvidia.weights import PackedWeight


@triton.jit
def _expand_kernel(
    words,
    scales,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    PADDED_N: tl.constexpr,
    PADDED_K: tl.constexpr,
    NB: tl.constexpr,
    KB: tl.constexpr,
    BY_ROW: tl.constexpr,
    FAST: tl.constexpr,
):
    line = tl.program_id(1) * NB + tl.arange(0, NB)[:, None]
    block = tl.program_id(0) * KB + tl.arange(0, KB)[None, :]
    # Units lie [K/128][N/16][4].
    unit = (block // 4) * (PADDED_N // 4) + line * 4 + block % 4
    word = tl.load(words + unit[:, :, None].to(tl.int64) * 128 + tl.arange(0, 128)[None, None, :])
    code = tl.reshape(shifted_codes(word), [NB, KB, 8, 4, 4, 2, 2])
    if BY_ROW:
        g = tl.arange(0, 8)[None, None, :, None, None, None, None]
        r = tl.arange(0, 2)[None, None, None, None, None, None, :]
        output = line[:, :, None, None, None, None, None] * 16 + 8 * r + g
        scale = tl.load(scales + output * (PADDED_K // 32) + block[:, :, None, None, None, None, None])
        weight = scaled(code, scale, FAST, False)
    else:
        scale = tl.load(scales + (line // 2) * (PADDED_K // 32) + block)
        weight = scaled(code, scale[:, :, None, None, None, None, None], FAST, False)
    # [NB, KB, g, t, p, e, r] to outputs (NB, r, g) by inputs (KB, t, p, e).
    weight = tl.reshape(tl.permute(weight, [0, 6, 2, 1, 3, 4, 5]), [NB * 16, KB * 32])
    n = tl.program_id(1) * (NB * 16) + tl.arange(0, NB * 16)
    k = tl.program_id(0) * (KB * 32) + tl.arange(0, KB * 32)
    at = out + n[:, None].to(tl.int64) * K + k[None, :]
    tl.store(at, weight, mask=(n < N)[:, None] & (k < K)[None, :])


def expand(weight: PackedWeight, out: torch.Tensor, chip: Chip) -> torch.Tensor:
    """Fill ``out`` ``[N, K]`` bf16, contiguous, with the weights: one float32 product and one rounding each.

    Operands are checked by the caller.
    """
    nb, kb, warps = 2, 4, 4  # what is padded is a multiple of these
    _expand_kernel[(triton.cdiv(weight.k, kb * 32), triton.cdiv(weight.n, nb * 16))](
        weight.words,
        weight.scales,
        out,
        N=weight.n,
        K=weight.k,
        PADDED_N=weight.padded_n,
        PADDED_K=weight.padded_k,
        NB=nb,
        KB=kb,
        BY_ROW=weight.by_row,
        FAST=chip.fast and weight.fast,
        num_warps=warps,
    )
    return out
