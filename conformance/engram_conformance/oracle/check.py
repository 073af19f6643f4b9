"""What a comparison found: the worst error as a multiple of what is allowed, where, and a sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_conformance.oracle.numbers import F64, U16, bf16_to_f64


@dataclass(frozen=True)
class Check:
    """``worst``: largest error over its tolerance (at most 1 passes; infinite where none was allowed).

    ``where``: index of that element. ``message``: what was seen there and what is needed. ``equal``: share of elements
    that are bit for bit the rounded reference, where that was counted.
    """

    worst: float
    where: tuple[int, ...] = ()
    message: str = ""
    equal: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every element is within its tolerance."""
        return self.worst <= 1.0

    def __bool__(self) -> bool:
        return self.passed

    @staticmethod
    def worst_of(*checks: Check) -> Check:
        """The one that is furthest out."""
        return max(checks, key=lambda check: check.worst)


def _shapes_differ(name: str, got: NDArray[Any], want: NDArray[Any]) -> Check | None:
    if got.shape == want.shape:
        return None
    return Check(math.inf, (), f"{name}: shape {list(got.shape)}, needs {list(want.shape)}")


def ratios(error: F64, allowed: F64) -> F64:
    """``error / allowed``, elementwise; 0 where there is no error, infinite where none is allowed or it is NaN."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where(error == 0, 0.0, error / allowed)
    return np.where(np.isnan(ratio) | ((error != 0) & (allowed <= 0)), np.inf, ratio)


def worst_element(name: str, ratio: F64, got: NDArray[Any], want: NDArray[Any], need: str) -> Check:
    """A :class:`Check` for the largest of ``ratio``."""
    if ratio.size == 0:
        return Check(0.0, (), f"{name}: no elements")
    where = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    worst, wrong = float(ratio[where]), int(np.count_nonzero(ratio > 1))
    saw = f"{name}{list(where)} is {_show(got[where])}, reference {_show(want[where])}"
    if worst <= 1:
        return Check(worst, where, f"{name}: within tolerance (worst {worst:.3g} at {list(where)})")
    tally = f"{wrong} of {ratio.size} elements are out, worst {worst:.3g} x tolerance"
    return Check(worst, where, f"{saw}; {need} ({tally})")


def _show(value: Any) -> str:
    return str(int(value)) if np.issubdtype(type(value), np.integer) else f"{float(value):.9g}"


def check_ids(got: NDArray[Any], want: NDArray[Any], name: str = "hash_ids") -> Check:
    """Integers, all equal."""
    got, want = np.asarray(got), np.asarray(want)
    if (bad := _shapes_differ(name, got, want)) is not None:
        return bad
    ratio = np.where(got.astype(np.int64) == want.astype(np.int64), 0.0, np.inf)
    return worst_element(name, ratio, got, want, "equal integers are needed")


def check_bits(got: U16, want: U16, name: str = "rows") -> Check:
    """bf16 bits, all equal; any NaN equals any NaN, and -0.0 is not +0.0."""
    if (bad := _shapes_differ(name, got, want)) is not None:
        return bad
    x, y = bf16_to_f64(got), bf16_to_f64(want)
    same = (got == want) | (np.isnan(x) & np.isnan(y))
    result = worst_element(name, np.where(same, 0.0, np.inf), x, y, "equal bits are needed")
    if result.passed:
        return result
    bits = f" [bits 0x{int(got[result.where]):04x}, needs 0x{int(want[result.where]):04x}]"
    return Check(result.worst, result.where, result.message + bits)
