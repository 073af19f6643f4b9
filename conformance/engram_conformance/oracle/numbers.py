"""Number formats, decoded by arithmetic on their fields: bf16, e4m3fn, e8m0, packed rows (CONTRACT 4)."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F64: TypeAlias = NDArray[np.float64]
U16: TypeAlias = NDArray[np.uint16]
U8: TypeAlias = NDArray[np.uint8]
I64: TypeAlias = NDArray[np.int64]
Mask: TypeAlias = NDArray[np.bool_]

# Values from here on round to infinity in bf16: the largest finite one plus half a unit in its last place.
BF16_OVERFLOW = 2.0**128 * (1 - 2.0**-9)
_LEAST_EXPONENT = -126  # of a normal bf16; below it the spacing stays 2**-133


def bf16_ulp(x: F64) -> F64:
    """The spacing of bf16 numbers at ``|x|`` (2**-133 at zero and in the subnormals)."""
    _, exponent = np.frexp(np.abs(x))
    floor_log2 = np.where(x == 0, _LEAST_EXPONENT, exponent - 1)
    spacing: F64 = np.ldexp(1.0, np.maximum(floor_log2, _LEAST_EXPONENT) - 7)
    return spacing


def round_bf16(x: F64) -> F64:
    """``x`` rounded once, to the nearest bf16 (ties to even), as float64."""
    x = np.asarray(x, dtype=np.float64)
    finite = np.isfinite(x)
    safe = np.where(finite, x, 0.0)
    spacing = bf16_ulp(safe)
    rounded = np.rint(safe / spacing) * spacing  # both steps are exact: powers of two
    rounded = np.where(np.abs(safe) >= BF16_OVERFLOW, np.copysign(np.inf, safe), rounded)
    return np.where(finite, rounded, x)


def to_bf16(x: F64) -> U16:
    """Bits of ``x`` rounded once to bf16; a cast through float32 would round twice. NaN becomes 0x7fc0."""
    rounded = round_bf16(x)
    bits = (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    bits[np.isnan(rounded)] = 0x7FC0
    return bits


def bf16_to_f64(bits: U16) -> F64:
    """The values of bf16 bits."""
    wide = np.asarray(bits, dtype=np.uint16).astype(np.uint32) << 16
    with np.errstate(invalid="ignore"):  # signalling NaNs are values like any other here
        return wide.view(np.float32).astype(np.float64)


def _e4m3fn(code: int) -> float:
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 0xF and mantissa == 0x7:
        return math.nan
    if exponent == 0:
        return sign * math.ldexp(mantissa / 8, -6)
    return sign * math.ldexp(1 + mantissa / 8, exponent - 7)


_CODES: F64 = np.array([_e4m3fn(code) for code in range(256)])
_SCALES: F64 = np.array([math.ldexp(1.0, byte - 127) if byte < 255 else math.nan for byte in range(256)])


def decode_e4m3fn(codes: U8) -> F64:
    """Values of fp8 codes: no infinities, 0x7f and 0xff are NaN, 0x80 is -0.0."""
    return _CODES[codes]


def decode_e8m0(scale: U8) -> F64:
    """Values of scale bytes: 2**(byte - 127); byte 0 is 2**-127 and byte 255 NaN."""
    return _SCALES[scale]


def decode_rows(packed: U8) -> U16:
    """Packed rows ``[.., D + D/32]`` (codes, then one scale byte for each 32) to bf16 bits ``[.., D]``.

    The product is a float32 one (it overflows to infinity), then rounded once to bf16.
    """
    packed = np.asarray(packed, dtype=np.uint8)
    dim = packed.shape[-1] * 32 // 33
    scales = np.repeat(decode_e8m0(packed[..., dim:]), 32, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        product = (decode_e4m3fn(packed[..., :dim]) * scales).astype(np.float32)
    return to_bf16(product.astype(np.float64))


def lookup_rows(packed: U8, ids: I64, owned: range | None = None) -> U16:
    """Rows of ``ids`` ``[..]`` as bf16 bits ``[.., D]``; an id outside the table, or outside ``owned``, gives +0.0.

    ``packed`` ``[rows, W]`` is the whole table; ``owned``: the rows of one shard of it.
    """
    ids = np.asarray(ids, dtype=np.int64)
    held = range(packed.shape[0]) if owned is None else owned
    inside = (ids >= held.start) & (ids < held.stop)
    rows = decode_rows(packed[np.where(inside, ids, 0)])
    rows[~inside] = 0
    return rows
