"""WKV weights in the order in which the matrix instruction takes them.

A kernel that reads e4m3 weights at few tokens is bound by what it does to a code, not by the bytes. So the codes are put
once, at load, where the tensor core wants them: a unit of 16 outputs x 32 inputs is 512 bytes, lane by lane, 16 bytes
each, and a warp's one 16-byte load a lane is its operand of two ``m16n8k16`` products without a shuffle or a trip
through shared memory. Of lane ``4 g + t``, byte ``8 h + 4 r + e`` is output ``8 r + g``, input ``16 h + 4 t + e``.

Units lie output-major: ``[N/16][K/32][512]``. The scale bytes stay as the checkpoint has them. N and K are padded with
zero codes to what the kernels' tiles need; this is the only copy that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engram_core.formats import BLOCK, code_bytes, scale_bytes

UNIT_N: Final = 16
UNIT_K: Final = 32
# What every tile of the kernels divides.
ALIGN_N: Final = 128
ALIGN_K: Final = 512
# 2**(byte - 127 + 120) is a bf16 up to this byte; the factor 2**120 undoes the shift of the codes' exponents.
_FAST_LIMIT: Final = 134


@dataclass(frozen=True)
class PackedWeight:
    """``codes`` uint8 ``[N', K']`` in unit order (N', K' padded); ``scales`` uint8 ``[N'/32, K'/32]`` or, ``by_row``,
    ``[N', K'/32]``; ``n``, ``k``: the real sizes; ``fast``: no NaN code and no scale byte above 134, so that a code's
    bits shifted into bf16 times one bf16 factor is its exact value.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    by_row: bool
    fast: bool


def pack_weight(weight: torch.Tensor, scale: torch.Tensor, device: torch.device) -> PackedWeight:
    """Reorder ``weight`` ``[N, K]`` e4m3fn with scales ``[N/32, K/32]`` or ``[N, K/32]``; reads two flags back."""
    codes, scales = code_bytes(weight).to(device), scale_bytes(scale).to(device)
    n, k = (int(size) for size in codes.shape)
    by_row = scales.shape[0] == n and n != -(-n // BLOCK)
    if by_row and n % BLOCK == 0:
        blocks = scales.view(-1, BLOCK, scales.shape[1])
        if bool((blocks == blocks[:, :1]).all()):  # 32x32 blocks, written out row by row
            scales, by_row = blocks[:, 0].contiguous(), False
    fast = not bool(((codes & 0x7F) == 0x7F).any()) and int(scales.max()) <= _FAST_LIMIT
    tall, wide = -n % ALIGN_N, -k % ALIGN_K
    if tall or wide:
        codes = torch.nn.functional.pad(codes, (0, wide, 0, tall))
    rows = codes.shape[0] if by_row else -(-codes.shape[0] // BLOCK)
    padded = scales.new_full((rows, codes.shape[1] // BLOCK), 127)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return PackedWeight(reorder(codes), padded, n, k, by_row, fast)


def reorder(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[N, K]`` uint8 (multiples of 16 and 32) from rows to units, the same shape."""
    n, k = codes.shape
    units = codes.view(n // UNIT_N, 2, 8, k // UNIT_K, 2, 4, 4)  # [N/16, r, g, K/32, h, t, e]
    return units.permute(0, 3, 2, 5, 4, 1, 6).reshape(n, k)


def restore(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`reorder`."""
    n, k = codes.shape
    units = codes.view(n // UNIT_N, k // UNIT_K, 8, 4, 2, 2, 4)  # [N/16, K/32, g, t, h, r, e]
    return units.permute(0, 5, 2, 1, 4, 3, 6).reshape(n, k)
