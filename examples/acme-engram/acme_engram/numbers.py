"""Number formats as NumPy sees them: it has neither bf16 nor fp8, so both are handled as the bits that they are.

bf16 is the upper half of a float32: widening is a shift, and narrowing a rounding of the bit pattern.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Words: TypeAlias = NDArray[np.uint16]
Floats: TypeAlias = NDArray[np.float32]

BLOCK: Final = 32
_NAN: Final = 0x7FC0


def words(tensor: torch.Tensor) -> Words:
    """A bf16 tensor's bits, of any strides: a view, so that writing to it writes to the tensor."""
    return tensor.detach().view(torch.int16).numpy().view(np.uint16)


def octets(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor of one-byte elements (uint8, e4m3fn, e8m0): a view."""
    found: Bytes = tensor.detach().view(torch.uint8).numpy()
    return found


def widen(bf16: Words) -> Floats:
    """bf16 to float32, exact, contiguous."""
    bits = bf16.astype(np.uint32, order="C")
    bits <<= 16
    return bits.view(np.float32)


def narrow(values: Floats, out: Words) -> None:
    """float32 to bf16, rounded once, to nearest and ties to even; any NaN becomes the quiet one."""
    bits = values.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    out[...] = rounded
    nan = np.isnan(values)
    if nan.any():  # the carry would have turned some of them into infinities or zeros
        out[nan] = _NAN


def _code_values() -> Floats:
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    significand = np.where(exponent > 0, mantissa + 8, mantissa).astype(np.float32)
    magnitude = np.ldexp(significand, np.maximum(exponent, 1) - 10)
    magnitude[(code & 0x7F) == 0x7F] = np.nan  # e4m3fn has no infinity
    return np.where(code < 128, magnitude, -magnitude)


def _scale_values() -> Floats:
    byte = np.arange(256)
    return np.where(byte < 255, np.ldexp(np.float32(1), np.minimum(byte, 254) - 127), np.float32(np.nan))


def _rows_by_pair() -> Words:
    with np.errstate(all="ignore"):  # products overflow to infinity, as the contract says
        products = SCALES[:, None] * CODES
        found = np.empty(products.shape, np.uint16)
        narrow(products, found)
    return found.reshape(-1)


CODES: Final = _code_values()
"""float32 of every e4m3fn code."""
SCALES: Final = _scale_values()
"""float32 of every e8m0 byte."""
ROWS: Final = _rows_by_pair()
"""bf16 bits of every pair of scale and code, at ``scale << 8 | code``: 128 KB, which a core's own cache holds."""


def decode(packed: Bytes, out: Words) -> None:
    """Packed rows ``[..., D + D/32]`` to bf16 bits ``[..., D]``: each value is one look-up, with no arithmetic."""
    dim = out.shape[-1]
    blocks = (*out.shape[:-1], dim // BLOCK, BLOCK)
    pair = np.empty((*blocks, 2), np.uint8)  # little-endian: the code is the low byte
    pair[..., 0] = packed[..., :dim].reshape(blocks)
    pair[..., 1] = packed[..., dim:, None]
    out[...] = ROWS.take(pair.view(np.uint16)[..., 0], mode="clip").reshape(out.shape)
