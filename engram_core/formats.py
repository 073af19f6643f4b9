"""Number formats, in pure torch: the definition that every kernel is held to, bit for bit.

A table row is *packed*: ``head_dim`` e4m3fn codes, then one e8m0 scale byte for every 32 of them. Codes are e4m3**fn**
on every vendor; scale byte 0 is 2**-127 and 255 is NaN (OCP MX), where some engines read 0 and infinity.
"""

from __future__ import annotations

import torch

from engram_core.errors import InvalidArgumentError

BLOCK = 32
"""Values that share one scale."""

FP8 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
FP8_MAX = 448.0


def packed_width(head_dim: int) -> int:
    """Bytes of a packed row: ``head_dim`` codes and ``head_dim / 32`` scales."""
    return head_dim + head_dim // BLOCK


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 scales as the uint8 bytes they are (a view: copying *values* into uint8 would convert them)."""
    if scale.dtype == torch.uint8:
        return scale
    if scale.dtype == E8M0:
        return scale.view(torch.uint8)
    raise InvalidArgumentError("scale", str(scale.dtype), "float8_e8m0fnu or uint8 (its bytes)")


def code_bytes(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fn codes as uint8 bytes (a view)."""
    if codes.dtype == torch.uint8:
        return codes
    if codes.dtype == FP8:
        return codes.view(torch.uint8)
    raise InvalidArgumentError("codes", str(codes.dtype), "float8_e4m3fn or uint8 (its bytes)")


def decode_e4m3fn(codes: torch.Tensor) -> torch.Tensor:
    """e4m3fn codes (or their bytes) to float32, exact; 0x7f and 0xff are NaN, 0x80 is -0.0."""
    return code_bytes(codes).view(FP8).to(torch.float32)


def decode_e8m0(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 scales (or their bytes) to float32: 2**(byte - 127), exact and subnormal at byte 0; 255 is NaN."""
    byte = scale_bytes(scale).to(torch.int32)
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == 255, 0x7FC00000, bits).view(torch.float32)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., K]`` times scales ``[..., K/32]`` in float32 (one product, subnormals kept, overflow to inf)."""
    return (_blocks(decode_e4m3fn(codes)) * decode_e8m0(scale).unsqueeze(-1)).flatten(-2)


def unpack_rows(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed rows ``[..., D + D/32]`` uint8 as views: codes ``[..., D]`` e4m3fn and scales ``[..., D/32]`` uint8."""
    width = packed.shape[-1]
    dim = width * BLOCK // (BLOCK + 1)
    if packed.dtype != torch.uint8 or packed_width(dim) != width or dim % BLOCK:
        raise InvalidArgumentError(
            "packed", f"{list(packed.shape)} {packed.dtype}", "[..., D + D/32] uint8, D a multiple of 32"
        )
    return packed[..., :dim].view(FP8), packed[..., dim:]


def pack_rows(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes ``[..., D]`` and scales ``[..., D/32]`` to packed rows ``[..., D + D/32]`` uint8; bytes are copied."""
    return torch.cat([code_bytes(values), scale_bytes(scales)], dim=-1)


def rows_to_bf16(packed: torch.Tensor) -> torch.Tensor:
    """Packed rows to bf16 ``[..., D]``: fp32 product, one rounding (docs/contract.md, "Rows")."""
    return dequantize(*unpack_rows(packed)).to(torch.bfloat16)


def dequantize_weight(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weight ``[N, K]`` e4m3fn with scales ``[N/32, K/32]`` (32x32 blocks) or ``[N, K/32]`` to float32 ``[N, K]``."""
    if scale.shape[0] != weight.shape[0]:
        scale = scale_bytes(scale).repeat_interleave(BLOCK, dim=0)
    return dequantize(weight, scale)


def _blocks(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // BLOCK, BLOCK)


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., K]`` (bf16, fp16 or fp32, finite) to codes ``[..., K]`` e4m3fn and scale bytes ``[..., K/32]`` uint8.

    Scale byte ``max(0, E(amax) - 8 + (mantissa(amax) > 0x600000))``, rounded up so that no value exceeds 448. The codes
    are ``x * 2**(127 - byte)`` clamped to +-448; a zero block stays zero; no finite input gives NaN.
    """
    blocks = _blocks(x.to(torch.float32))
    amax = _bits(blocks.abs().amax(-1))
    byte = (((amax >> 23) & 0xFF) - 8 + ((amax & 0x7FFFFF) > 0x600000).to(torch.int32)).clamp(0, 254)
    # 2**(127 - byte): byte 254 needs 2**-127, which only the subnormal bit pattern holds.
    inverse = torch.where(byte == 254, 0x00400000, (254 - byte) << 23).view(torch.float32)
    scaled = (blocks * inverse.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return scaled.to(FP8).flatten(-2), byte.to(torch.uint8)


def swizzle_128x4(scale: torch.Tensor) -> torch.Tensor:
    """Scales ``[R, C]`` to the flat 128x4 layout of block-scaled matrix instructions, padded with 0.

    Element (r, c) goes to ``(c%4) + (c//4)*512 + (r%32)*16 + ((r%128)//32)*4 + (r//128)*128*ceil4(C)``.
    """
    rows, cols = scale.shape
    tiles, quads = -(-rows // 128), -(-cols // 4)
    padded = scale.new_zeros(tiles * 128, quads * 4)
    padded[:rows, :cols] = scale
    return padded.view(tiles, 4, 32, quads, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def unswizzle_128x4(flat: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of :func:`swizzle_128x4`, ``[rows, cols]``."""
    tiles, quads = -(-rows // 128), -(-cols // 4)
    whole = flat.view(tiles, quads, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(tiles * 128, quads * 4)
    return whole[:rows, :cols]
