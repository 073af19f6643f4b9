"""The WKV projection in float64 and its tolerance (CONTRACT 5), a strip of outputs at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_conformance.oracle.check import Check, ratios, worst_element
from engram_conformance.oracle.numbers import (
    BF16_OVERFLOW,
    F64,
    U8,
    U16,
    bf16_to_f64,
    bf16_ulp,
    decode_e4m3fn,
    decode_e8m0,
    to_bf16,
)

_STRIP = 512  # outputs; of 6144 float64 values each 25 MB, and as much again for their magnitudes
_FEWEST_FOR_SHARE = 1000  # below this many elements a share of equal ones says nothing


class Weight:
    """A weight ``[N, K]`` as a checkpoint holds it, decoded a strip at a time: 25600 x 6144 float64 is 1.2 GB."""

    def __init__(self, stored: NDArray[Any], scales: U8 | None = None) -> None:
        """fp8 codes (uint8) with scale bytes ``[N/32, K/32]`` or ``[N, K/32]``; or bf16 bits (uint16); or float64."""
        self._stored = stored
        self._scales = scales
        self._shared = (
            1 if scales is None else int(stored.shape[0]) // int(scales.shape[0])
        )  # outputs to a scale: 32 or 1
        self.shape: tuple[int, int] = (int(stored.shape[0]), int(stored.shape[1]))

    def strip(self, begin: int, end: int) -> F64:
        """Rows ``[begin, end)`` as float64 ``[end - begin, K]``."""
        part = self._stored[begin:end]
        if self._scales is None:
            return bf16_to_f64(part) if part.dtype == np.uint16 else part.astype(np.float64)
        scales = decode_e8m0(self._scales[np.arange(begin, end) // self._shared])
        return decode_e4m3fn(part) * np.repeat(scales, 32, axis=1)

    def select(self, outputs: NDArray[Any]) -> Weight:
        """The weight of some outputs only."""
        scales = None if self._scales is None else self._scales[outputs // self._shared]
        return Weight(self._stored[outputs], scales)


def wkv(rows: F64, weight: Weight | NDArray[Any]) -> tuple[F64, F64]:
    """``rows`` ``[T, K]`` (or ``[T, C, D]``) times the weight: ``(ref, S)``, both ``[T, N]``, S = sum of ``|a*w|``."""
    weight = weight if isinstance(weight, Weight) else Weight(weight)
    inputs = np.asarray(rows, dtype=np.float64).reshape(rows.shape[0], int(np.prod(rows.shape[1:])))
    n, k = weight.shape
    if inputs.shape[1] != k:
        raise ValueError(f"rows hold {inputs.shape[1]} values a token; the weight needs {k}")
    ref, size = np.empty((inputs.shape[0], n)), np.empty((inputs.shape[0], n))
    if not inputs.shape[0]:
        return ref, size
    magnitudes = np.abs(inputs)
    with np.errstate(invalid="ignore", over="ignore"):
        for begin in range(0, n, _STRIP):
            strip = weight.strip(begin, min(begin + _STRIP, n))
            ref[:, begin : begin + _STRIP] = inputs @ strip.T
            size[:, begin : begin + _STRIP] = magnitudes @ np.abs(strip, out=strip).T
    return ref, size


def drift(size: F64, in_features: int) -> F64:
    """What the order of accumulation in float32 may change, before the rounding to bf16."""
    return 2.0**-16 * size + in_features * 2.0**-126


def check_wkv(out_bits: U16, ref: F64, size: F64, in_features: int, *, random: bool = False, name: str = "kv") -> Check:
    """Every ``|out - ref| <= ulp(ref)/2 + 2**-16 * S + K * 2**-126``.

    ``random``: the data are random, so that at least 99 % of the elements must be bf16(ref) bit for bit (counted from
    1000 elements on).
    """
    if out_bits.shape != ref.shape:
        return Check(np.inf, (), f"{name}: shape {list(out_bits.shape)}, needs {list(ref.shape)}")
    out, slack = bf16_to_f64(out_bits), drift(size, in_features)
    with np.errstate(invalid="ignore"):
        error = np.abs(out - ref)
        # An infinite result stands for everything from the overflow threshold on.
        beyond = np.isinf(out) & np.isfinite(ref)
        error = np.where(beyond, np.maximum(0.0, BF16_OVERFLOW - np.sign(out) * ref), error)
        allowed = np.where(beyond, slack, bf16_ulp(np.where(np.isfinite(ref), ref, 0.0)) / 2 + slack)
    same = (np.isnan(out) & np.isnan(ref)) | (out == ref)
    ratio = np.where(same, 0.0, np.where(np.isfinite(ref), ratios(error, allowed), np.inf))
    found = worst_element(name, ratio, out, ref, "|out - ref| <= ulp/2 + 2**-16 * sum|a*w| + K * 2**-126 is needed")
    if not random or ref.size < _FEWEST_FOR_SHARE:
        return found
    equal = float(np.mean(out_bits == to_bf16(ref)))
    share = (1 - equal) / 0.01
    if found.passed and share > 1:
        return Check(share, (), f"{name}: {equal:.3%} of elements are bf16(ref); 99 % are needed", equal)
    return Check(max(found.worst, share), found.where, found.message, equal)
