"""WKV weights in the order in which the matrix instruction takes them.

A kernel that reads e4m3 weights at few tokens is bound by what it does to a code as much as by the bytes. So the codes
are put once, at load, where the tensor core wants them: a unit of 16 outputs x 32 inputs is 512 bytes, lane by lane,
and a warp's one 16-byte load a lane is its operand of two ``m16n8k16`` products without a shuffle or a trip through
shared memory. Of lane ``4 g + t``, word ``p`` holds outputs ``g`` and ``8 + g`` at inputs ``8 t + 2 p`` and the next
one: a lane's inputs are 8 in a row, so that it loads the tokens' values in one piece too (the order of inputs within a
product is free as long as both sides agree).

Units lie ``[K/128][N/16][4]``: programs side by side walk along K together, and the memory sees one stream (40.1 us,
against 41.2 with whole rows of units: one token, 25600 x 6144, H200). The scale bytes stay as the checkpoint has them.
N and K are padded with zero codes to what the kernels' tiles need. This is the only copy that is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engram_core.formats import BLOCK, code_bytes, scale_bytes

UNIT_N: Final = 16
UNIT_K: Final = 32
UNITS_K: Final = 4
# What every tile of the kernels divides.
ALIGN_N: Final = 128
ALIGN_K: Final = 512
# 2**(byte - 127 + 120) is a bf16 up to this byte; the factor 2**120 undoes the shift of the codes' exponents.
_FAST_LIMIT: Final = 134


@dataclass(frozen=True)
class PackedWeight:
    """``words`` int32 ``[K'/128, N'/16, 4, 128]``: spread words in unit order (N', K' padded); ``scales`` uint8
    ``[N'/32, K'/32]`` or, ``by_row``, ``[N', K'/32]``; ``n``, ``k``: the real sizes; ``fast``: no NaN code and no scale
    byte above 134, so that a code's bits shifted into bf16 times one bf16 factor is its exact value.
    """

    words: torch.Tensor
    scales: torch.Tensor
    n: int
    k: int
    by_row: bool
    fast: bool

    @property
    def padded_n(self) -> int:
        """N'."""
        return int(self.words.shape[1]) * UNIT_N

    @property
    def padded_k(self) -> int:
        """K'."""
        return int(self.words.shape[0]) * UNITS_K * UNIT_K


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
    rows = codes.shape[0] if by_row else codes.shape[0] // BLOCK
    padded = scales.new_full((rows, codes.shape[1] // BLOCK), 127)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return PackedWeight(spread(reorder(codes)), padded, n, k, by_row, fast)


def unpack_weight(packed: PackedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """The checkpoint's form again: codes ``[N, K]`` uint8, scales ``[N/32, K/32]`` or ``[N, K/32]`` uint8."""
    codes = restore(gather(packed.words))[: packed.n, : packed.k]
    rows = packed.n if packed.by_row else -(-packed.n // BLOCK)
    return codes, packed.scales[:rows, : packed.k // BLOCK]


def reorder(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``[N, K]`` uint8 (multiples of 16 and 128) from rows to units ``[K/128, N/16, 4, 512]``."""
    n, k = codes.shape
    # [N/16, r, g, K/128, u, t, p, e]
    units = codes.view(n // UNIT_N, 2, 8, k // (UNITS_K * UNIT_K), UNITS_K, 4, 4, 2)
    return units.permute(3, 0, 4, 2, 5, 6, 1, 7).reshape(k // (UNITS_K * UNIT_K), n // UNIT_N, UNITS_K, -1)


def restore(units: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`reorder`."""
    wide, tall = units.shape[:2]
    rows = units.view(wide, tall, UNITS_K, 8, 4, 4, 2, 2).permute(1, 6, 3, 0, 2, 4, 5, 7)
    return rows.reshape(tall * UNIT_N, wide * UNITS_K * UNIT_K)


def spread(codes: torch.Tensor) -> torch.Tensor:
    """Four bytes ``c0 c1 c2 c3`` to a word, ``[.., 4 n]`` uint8 to ``[.., n]`` int32: in its lower half the sign of c0
    at bit 15 and the rest at 10..4, of c2 the sign at 11 and the rest at 14..12 and 3..0; c1, c3 so in the upper half.
    """
    c = codes.view(*codes.shape[:-1], -1, 4).to(torch.int32)

    def half(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        whole = ((a & 0x80) << 8) | ((a & 0x7F) << 4)
        return whole | ((b & 0x80) << 4) | ((b & 0x70) << 8) | (b & 0x0F)

    return half(c[..., 0], c[..., 2]) | (half(c[..., 1], c[..., 3]) << 16)


def gather(words: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`spread`."""

    def both(half: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = ((half >> 8) & 0x80) | ((half >> 4) & 0x7F)
        return a, ((half >> 4) & 0x80) | ((half >> 8) & 0x70) | (half & 0x0F)

    (c0, c2), (c1, c3) = both(words & 0xFFFF), both((words >> 16) & 0xFFFF)
    return torch.stack((c0, c1, c2, c3), dim=-1).to(torch.uint8).flatten(-2)
