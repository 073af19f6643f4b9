"""The gate in float64, and the interval in which every correct float32 order of it ends (CONTRACT 6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engram_conformance.oracle.check import Check, check_bits, ratios, worst_element
from engram_conformance.oracle.numbers import F64, U16, Mask, bf16_to_f64, round_bf16, to_bf16
from engram_conformance.oracle.wkv import Weight, drift, wkv

_FEWEST_FOR_SHARE = 100_000
_MODERATE_DOT = 100.0


@dataclass(frozen=True)
class GateBounds:
    """``exact`` ``h + gate * value``; results lie in ``[low, high]`` (bf16 values); all ``[T, H, dim]``.

    ``dot`` and ``gates`` are ``[T, H]``.
    """

    exact: F64
    low: F64
    high: F64
    dot: F64
    gates: F64


def _open(dot: F64, clamp: float) -> F64:
    root = np.sqrt(np.maximum(np.abs(dot), clamp))  # np.maximum keeps NaN
    with np.errstate(over="ignore"):
        opened: F64 = 1.0 / (1.0 + np.exp(-np.copysign(root, dot)))
    return opened


def _rsqrt_mean_square(x: F64, eps: float) -> F64:
    with np.errstate(divide="ignore", over="ignore"):
        scale: F64 = 1.0 / np.sqrt(np.mean(x * x, axis=-1) + eps)
    return scale


def gate(
    hidden: F64,
    kv: F64,
    q_weight: F64,
    k_weight: F64,
    eps: float,
    clamp: float = 1e-6,
    *,
    kv_range: tuple[F64, F64] | None = None,
) -> GateBounds:
    """The gate of ``hidden`` ``[T, H, dim]`` with ``kv`` ``[T, (H+1)*dim]``: keys of copy 0 .. H-1, then the value.

    ``kv_range``: where kv itself is known only to lie between two bounds, the interval is widened by what they allow.
    """
    tokens, copies, dim = hidden.shape
    kv_low, kv_high = (kv, kv) if kv_range is None else kv_range

    def keys(x: F64) -> F64:
        return x[:, : copies * dim].reshape(tokens, copies, dim)

    def values(x: F64) -> F64:
        return x[:, None, copies * dim :]

    with np.errstate(invalid="ignore", over="ignore"):
        key, value = keys(kv), values(kv)
        weights = q_weight * k_weight
        # How far a key may be from the one used here; none where kv is given as it is.
        away = np.maximum(np.abs(keys(kv_high) - key), np.abs(keys(kv_low) - key)) if kv_range else np.zeros_like(key)
        scale = _rsqrt_mean_square(hidden, eps) * dim**-0.5
        rk = _rsqrt_mean_square(key, eps)
        total = np.sum(hidden * weights * key, axis=-1)
        dot = total * scale * rk
        slack = scale * rk * (2.0**-20 * np.sum(np.abs(hidden * weights * key), axis=-1) + dim * 2.0**-120)
        if kv_range:
            spread = np.sum(np.abs(hidden * weights) * away, axis=-1)
            root, off = np.sqrt(np.mean(key * key, axis=-1)), np.sqrt(np.mean(away * away, axis=-1))
            slowest = 1.0 / np.sqrt((root + off) ** 2 + eps)
            fastest = 1.0 / np.sqrt(np.maximum(root - off, 0.0) ** 2 + eps)
            ends = np.stack([(total + sign * spread) * scale * r for sign in (-1, 1) for r in (slowest, fastest)])
            slack = slack * fastest / rk + np.maximum(ends.max(0) - dot, dot - ends.min(0))
        opened = _open(dot, clamp)
        g_low = (_open(dot - slack, clamp) * (1 - 2.0**-20))[..., None]
        g_high = (_open(dot + slack, clamp) * (1 + 2.0**-20))[..., None]
        exact = hidden + opened[..., None] * value
        ends = np.stack([hidden + g * v for g in (g_low, g_high) for v in (values(kv_low), values(kv_high))])
        widest = np.maximum(np.abs(values(kv_low)), np.abs(values(kv_high)))
        around = 2.0**-22 * (np.abs(hidden) + g_high * widest)
        low, high = round_bf16(ends.min(0) - around), round_bf16(ends.max(0) + around)
    settled = ~np.isfinite(exact)  # NaN and infinities leave no interval
    return GateBounds(exact, np.where(settled, exact, low), np.where(settled, exact, high), dot, opened)


def check_gate(
    out_bits: U16,
    hidden_bits: U16,
    bounds: GateBounds,
    *,
    token_mask: Mask | NDArray[Any] | None = None,
    num_kv_tokens: int | None = None,
    random: bool = False,
    name: str = "out",
) -> Check:
    """Open rows lie in the bounds; closed rows (mask False, or at or past ``num_kv_tokens``) are the hidden bits.

    ``random``: the data are random, so that at least 99.9 % of the elements must be bf16(exact) bit for bit (counted
    where ``|dot| < 100``, from 1e5 elements on).
    """
    if out_bits.shape != hidden_bits.shape:
        return Check(np.inf, (), f"{name}: shape {list(out_bits.shape)}, needs {list(hidden_bits.shape)}")
    live = np.ones(out_bits.shape[0], dtype=bool) if token_mask is None else np.array(token_mask, dtype=bool)
    if num_kv_tokens is not None:
        live[num_kv_tokens:] = False
    closed = check_bits(out_bits[~live], hidden_bits[~live], f"{name} (closed rows)")
    if not closed.passed:
        return closed
    out, exact = bf16_to_f64(out_bits[live]), bounds.exact[live]
    low, high = bounds.low[live], bounds.high[live]
    with np.errstate(invalid="ignore"):
        inside = (out >= low) & (out <= high) | (np.isnan(out) & np.isnan(exact))
        above = ratios(out - exact, high - exact)
        below = ratios(exact - out, exact - low)
        ratio = np.where(out >= exact, above, below)
    settled = ~np.isfinite(exact) | ~np.isfinite(out)
    ratio = np.where(inside, np.where(settled, 0.0, np.clip(ratio, 0.0, 1.0)), np.maximum(ratio, np.nextafter(1, 2)))
    found = worst_element(name, ratio, out, exact, "a value inside the interval of CONTRACT 6 is needed")
    counted = (np.abs(bounds.dot[live]) < _MODERATE_DOT)[..., None] & np.ones(out.shape, dtype=bool)
    if not random or int(counted.sum()) < _FEWEST_FOR_SHARE:
        return found
    equal = float(np.mean((out_bits[live] == to_bf16(exact))[counted]))
    share = (1 - equal) / 0.001
    if found.passed and share > 1:
        return Check(share, (), f"{name}: {equal:.3%} of elements are bf16(exact); 99.9 % are needed", equal)
    return Check(max(found.worst, share), found.where, found.message, equal)


def layer(
    hidden: F64, rows: F64, weight: Weight | NDArray[Any], q_weight: F64, k_weight: F64, eps: float
) -> GateBounds:
    """A whole layer from looked-up rows ``[T, C, D]``: kv is any bf16 that the WKV's order of accumulation allows."""
    ref, size = wkv(rows, weight)
    slack = drift(size, int(np.prod(rows.shape[1:])))
    around = (round_bf16(ref - slack), round_bf16(ref + slack))
    return gate(hidden, round_bf16(ref), q_weight, k_weight, eps, kv_range=around)
