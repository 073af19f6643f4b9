"""Number formats: all codes under all scales, against plain Python arithmetic on the bits."""

from __future__ import annotations

import math
import struct

import pytest
import torch

from engram_core import formats
from engram_core.errors import InvalidArgumentError


def _code(byte: int) -> float:
    """An e4m3fn code by its definition."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def _float32(x: float) -> float:
    """One float32 rounding, overflow to infinity."""
    try:
        rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)
    return rounded


def _bf16_bits(x: float) -> int:
    """A float32 value rounded to nearest even in bf16."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def test_all_codes_under_all_scales() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    packed = torch.cat([codes.expand(256, 256), torch.arange(256).to(torch.uint8)[:, None].expand(256, 8)], dim=1)
    found = formats.rows_to_bf16(packed)
    assert found.shape == (256, 256)
    bits = found.view(torch.int16).to(torch.int32) & 0xFFFF
    wrong, inexact = [], {}
    for scale in range(256):
        for byte in range(256):
            if scale == 255 or math.isnan(_code(byte)):
                if not math.isnan(float(found[scale, byte])):
                    wrong.append((scale, byte))
                continue
            exact = _code(byte) * 2.0 ** (scale - 127)
            expected = _bf16_bits(_float32(exact))
            if int(bits[scale, byte]) != expected:
                wrong.append((scale, byte))
            if math.isfinite(float(found[scale, byte])) and float(found[scale, byte]) != exact:
                inexact[scale] = inexact.get(scale, 0) + 1
    assert not wrong
    assert inexact == {0: 48, 1: 32, 2: 16}  # the counts that the contract states


def test_one_under_the_named_scales() -> None:
    scales = torch.tensor([0, 1, 126, 127, 128, 130, 254, 255], dtype=torch.uint8)
    row = torch.cat([torch.full((256,), 0x38, dtype=torch.uint8), scales])
    found = formats.rows_to_bf16(row)[::32]
    assert found[:-1].tolist() == [2.0**-127, 2.0**-126, 0.5, 1, 2, 8, 2.0**127]
    assert int(found.view(torch.int16)[0]) == 0x0040
    assert math.isnan(float(found[-1]))


def test_the_product_overflows_as_float32() -> None:
    found = formats.rows_to_bf16(torch.cat([torch.full((32,), 0x7E), torch.tensor([247])]).to(torch.uint8))
    assert bool(found.isinf().all())


def test_scale_bytes_are_copied_never_converted() -> None:
    raw = torch.tensor([120, 125, 127, 130, 140], dtype=torch.uint8)
    assert torch.equal(formats.scale_bytes(raw.view(torch.float8_e8m0fnu)), raw)
    with pytest.raises(InvalidArgumentError, match="^scale: got torch.float32"):
        formats.scale_bytes(raw.float())


def test_quantise_round_trip() -> None:
    """Requantising a dequantised row gives the same values where the block's amax exceeds 1.75 * 2**-119."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (4096, 64), dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x38
    scale = torch.randint(20, 240, (4096, 2), dtype=torch.uint8, generator=generator)
    values = formats.dequantize(codes, scale)
    assert torch.equal(formats.dequantize(*formats.quantize_mxfp8(values)), values)


def test_quantise_rule() -> None:
    for amax, byte in ((448.0, 127), (448.0 * 1.0001, 128), (256.0, 127), (1.75, 119), (1.7500001, 120), (0.0, 0)):
        block = torch.zeros(32)
        block[5] = -amax
        codes, scale = formats.quantize_mxfp8(block)
        assert scale.tolist() == [byte]
        assert not bool(codes.float().isnan().any())
    tiny, scale = formats.quantize_mxfp8(torch.full((32,), 1e-45))
    assert scale.tolist() == [0]
    assert not bool(tiny.float().isnan().any())


def test_quantise_never_gives_nan_for_finite_input() -> None:
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31, (2000, 64), generator=generator).to(torch.int32)
    values = bits.view(torch.float32)
    values = torch.where(values.isfinite(), values, 0)
    codes, scale = formats.quantize_mxfp8(values)
    assert not bool(codes.float().isnan().any())
    assert int(scale.max()) <= 254


def test_swizzle() -> None:
    offsets = {(0, 0): 0, (1, 0): 16, (31, 0): 496, (32, 0): 4, (127, 0): 508, (128, 0): 24576}
    offsets |= {(0, 1): 1, (0, 4): 512, (0, 191): 24067, (129, 5): 25105}
    scale = torch.zeros(130, 192, dtype=torch.uint8)
    for i, (r, c) in enumerate(offsets, start=1):
        scale[r, c] = i
    flat = formats.swizzle_128x4(scale)
    assert flat.numel() == 256 * 192
    assert [int(flat[at]) for at in offsets.values()] == list(range(1, len(offsets) + 1))
    assert int((flat != 0).sum()) == len(offsets)
    assert torch.equal(formats.unswizzle_128x4(flat, 130, 192), scale)


def test_weight_scales_in_blocks_or_rows() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 64, generator=generator).to(formats.FP8)
    blocks = torch.tensor([[126, 127], [128, 129]], dtype=torch.uint8)
    found = formats.dequantize_weight(weight, blocks)
    assert torch.equal(found[40, 40], weight.float()[40, 40] * 4)
    assert torch.equal(found, formats.dequantize_weight(weight, blocks.repeat_interleave(32, 0)))
