"""The oracle against what CONTRACT states in numbers, and against torch where torch is known to be right."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import engram_conformance
import numpy as np
import pytest
import torch
from engram_conformance import oracle
from engram_conformance.oracle.numbers import round_bf16
from hypothesis import given, settings
from hypothesis import strategies as st

FOLDER = Path(engram_conformance.__file__).parent / "oracle"


def test_imports_only_numpy_and_the_standard_library() -> None:
    imported = set()
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                inside = (node.module or "").startswith("engram_conformance.oracle")
                imported.add("oracle" if inside else (node.module or "").split(".")[0])
    allowed = {"__future__", "numpy", "oracle", "math", "typing", "collections", "dataclasses"}
    assert imported <= allowed, f"the oracle must stay apart from the core: it imports {imported - allowed}"


def test_bf16_rounds_once_to_nearest_even() -> None:
    one = 1.0
    assert oracle.to_bf16(np.array([one + 2**-8])).item() == 0x3F80  # a tie, to even
    assert oracle.to_bf16(np.array([one + 3 * 2**-8])).item() == 0x3F82
    # By way of float32 this would become a tie and fall down:
    assert oracle.to_bf16(np.array([one + 2**-8 + 2**-40])).item() == 0x3F81
    assert oracle.to_bf16(np.array([-0.0])).item() == 0x8000
    assert oracle.to_bf16(np.array([2.0**-134])).item() == 0  # half the least subnormal, to even
    assert oracle.to_bf16(np.array([1.5 * 2.0**-133])).item() == 2
    assert oracle.to_bf16(np.array([2.0**128 * (1 - 2.0**-9)])).item() == 0x7F80
    assert oracle.to_bf16(np.array([np.nextafter(2.0**128 * (1 - 2.0**-9), 0)])).item() == 0x7F7F


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=64))
@settings(deadline=None)
def test_bf16_agrees_with_torch_on_float32(numbers: list[float]) -> None:
    wide = np.array(numbers, dtype=np.float32)
    theirs = torch.from_numpy(wide).bfloat16().view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(oracle.to_bf16(wide.astype(np.float64)), theirs)


def test_every_bf16_survives() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    values = oracle.bf16_to_f64(bits)
    kept = ~np.isnan(values)
    assert np.array_equal(oracle.to_bf16(values)[kept], bits[kept])
    assert np.array_equal(round_bf16(values[kept]), values[kept])


def test_ulp() -> None:
    x = np.array([0.0, 1.0, -1.5, 2.0**-126, 2.0**-130, 3.0])
    assert oracle.bf16_ulp(x).tolist() == [2.0**-133, 2.0**-7, 2.0**-7, 2.0**-133, 2.0**-133, 2.0**-6]


def test_fp8_agrees_with_torch() -> None:
    codes = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    ours = oracle.decode_e4m3fn(codes)
    assert np.array_equal(ours, theirs, equal_nan=True)
    assert math.copysign(1, ours[0x80]) == -1
    assert oracle.decode_e8m0(np.array([0, 127, 254, 255], dtype=np.uint8)).tolist()[:3] == [2.0**-127, 1, 2.0**127]


def test_rows_of_the_contract() -> None:
    packed = np.array([0x38] * 256 + [0, 1, 126, 127, 128, 130, 254, 255], dtype=np.uint8)
    got = oracle.bf16_to_f64(oracle.decode_rows(packed)).reshape(8, 32)[:, 0]
    assert np.array_equal(got, [2.0**-127, 2.0**-126, 0.5, 1, 2, 8, 2.0**127, math.nan], equal_nan=True)
    large = np.array([0x7E] * 32 + [247], dtype=np.uint8)  # 448 * 2**120 overflows float32
    assert oracle.decode_rows(large)[0] == 0x7F80


def test_look_up_outside_the_table() -> None:
    packed = np.full((4, 33), 0x38, dtype=np.uint8)
    rows = oracle.lookup_rows(packed, np.array([-1, 0, 3, 4, 2**40]))
    assert (rows != 0).any(axis=1).tolist() == [False, True, True, False, False]
    assert not oracle.lookup_rows(packed, np.array([0, 3]), range(1, 3)).any()


def test_layout_of_the_published_model() -> None:
    numbers = oracle.layout(16_000_000, (1, 14), 4, 8, 99_092)
    assert numbers.rows == (384_006_168, 384_016_682)
    assert numbers.primes[0][0][0] == 16_000_057
    assert numbers.columns == 24
    assert sum(numbers.head_sizes(1)) == numbers.rows[1]


@pytest.mark.parametrize(
    ("size", "error", "passes"), [(100, 2.0**-17 * 100, True), (100, 2.0**-15 * 100, False), (0, 0, True)]
)
def test_wkv_tolerance(size: float, error: float, passes: bool) -> None:
    ref = np.array([[1.0]])
    out = oracle.to_bf16(ref + error)
    check = oracle.check_wkv(out, ref + 0.0, np.array([[size]]), 64)
    assert bool(check) is passes or abs(oracle.bf16_to_f64(out) - 1).item() <= 2.0**-8


def test_wkv_catches_one_wrong_element_and_says_where() -> None:
    rng = np.random.default_rng(0)
    rows, weight = rng.standard_normal((5, 64)), rng.standard_normal((96, 64))
    ref, size = oracle.wkv(rows, weight)
    out = oracle.to_bf16(ref)
    assert oracle.check_wkv(out, ref, size, 64, random=True).passed
    out[3, 7] ^= 0x10
    check = oracle.check_wkv(out, ref, size, 64)
    assert check.where == (3, 7)
    assert "1 of 480 elements" in check.message


def test_wkv_counts_equal_bits_on_random_data() -> None:
    rng = np.random.default_rng(0)
    ref, size = oracle.wkv(rng.standard_normal((20, 64)), rng.standard_normal((96, 64)))
    out = oracle.to_bf16(ref)
    nudged = np.where(rng.random(out.shape) < 0.03, oracle.to_bf16(oracle.bf16_to_f64(out) * (1 + 2.0**-8)), out)
    loose = oracle.check_wkv(nudged, ref, size + 1e6, 64)
    assert loose.passed
    assert not oracle.check_wkv(nudged, ref, size + 1e6, 64, random=True).passed


def test_wkv_infinity_and_nan() -> None:
    ref, size = np.array([[1e39, math.nan, 1.0]]), np.ones((1, 3))
    good = np.array([[0x7F80, 0x7FC0, 0x3F80]], dtype=np.uint16)
    assert oracle.check_wkv(good, ref, size, 32).passed
    assert not oracle.check_wkv(np.array([[0x7F7F, 0x7FC0, 0x3F80]], np.uint16), ref, size, 32).passed
    assert not oracle.check_wkv(np.array([[0x7F80, 0x3F80, 0x3F80]], np.uint16), ref, size, 32).passed
    assert not oracle.check_wkv(np.array([[0x7F80, 0x7FC0, 0x7FC0]], np.uint16), ref, size, 32).passed


def test_weight_strips_are_the_whole() -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 0x7E, (96, 64), dtype=np.uint8), rng.integers(120, 130, (3, 2), dtype=np.uint8)
    whole = oracle.Weight(codes, scales).strip(0, 96)
    by_row = oracle.Weight(codes, np.repeat(scales, 32, axis=0))
    assert np.array_equal(np.vstack([by_row.strip(0, 40), by_row.strip(40, 96)]), whole)
    some = np.array([0, 33, 95])
    assert np.array_equal(oracle.Weight(codes, scales).select(some).strip(0, 3), whole[some])


def _gate(h: float, key: float, v: float, q: float = 1, eps: float = 1e-20) -> oracle.GateBounds:
    ones = np.ones((1, 4))
    return oracle.gate(np.full((1, 1, 4), h), np.concatenate([ones * key, ones * v], axis=1), ones * q, ones, eps)


@pytest.mark.parametrize(
    ("bounds", "bits"),
    [
        (_gate(0.5, 1, -1, q=0), 0xB983),
        (_gate(2**-12, 1, 1), 0x3F4E),
        (_gate(2**-12, 1, 1, eps=1e-6), 0x3F2A),
        (_gate(0, 0, 1), 0x3F00),
        (_gate(1, 1, 1), 0x3FE7),
        (_gate(1, -1, 1), 0x3F99),
    ],
)
def test_gate_probes_of_the_contract(bounds: oracle.GateBounds, bits: int) -> None:
    assert (oracle.to_bf16(bounds.exact) == bits).all()
    assert (bounds.low <= oracle.bf16_to_f64(oracle.to_bf16(bounds.exact))).all()


def _random_gate(tokens: int = 8) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    read = oracle.bf16_to_f64
    h, kv = oracle.to_bf16(rng.standard_normal((tokens, 2, 64))), oracle.to_bf16(rng.standard_normal((tokens, 192)))
    return h, read(kv), rng.standard_normal((2, 64)), rng.standard_normal((2, 64))


def test_gate_closed_rows_and_open_rows() -> None:
    h, kv, q, k = _random_gate()
    bounds = oracle.gate(oracle.bf16_to_f64(h), kv, q, k, 1e-20)
    out = oracle.to_bf16(bounds.exact)
    mask = np.arange(8) % 2 == 0
    out[~mask], out[6:] = h[~mask], h[6:]
    assert oracle.check_gate(out, h, bounds, token_mask=mask, num_kv_tokens=6).passed
    assert not oracle.check_gate(out, h, bounds, token_mask=mask).passed
    assert not oracle.check_gate(out, h, bounds).passed
    out[1, 0, 0] ^= 0x8000
    assert "closed rows" in oracle.check_gate(out, h, bounds, token_mask=mask, num_kv_tokens=6).message


def test_gate_interval_is_narrow() -> None:
    """Two units away is outside everywhere: the interval holds orders of summation, not mistakes."""
    h, kv, q, k = _random_gate()
    bounds = oracle.gate(oracle.bf16_to_f64(h), kv, q, k, 1e-20)
    right = oracle.to_bf16(bounds.exact)
    for change in (2, -2):
        moved = (right.astype(np.int32) + change).astype(np.uint16)
        outside = [not oracle.check_gate(moved[t : t + 1], h[t : t + 1], _rows(bounds, t)).passed for t in range(8)]
        assert all(outside)


def _rows(bounds: oracle.GateBounds, t: int) -> oracle.GateBounds:
    return oracle.GateBounds(*(getattr(bounds, n)[t : t + 1] for n in ("exact", "low", "high", "dot", "gates")))


def test_layer_allows_what_the_wkv_allows_and_no_more() -> None:
    rng = np.random.default_rng(0)
    rows, weight = rng.standard_normal((3, 2, 32)), rng.standard_normal((3 * 64, 64)) / 8
    h, _, q, k = _random_gate(3)
    bounds = oracle.layer(oracle.bf16_to_f64(h), rows, weight, q, k, 1e-20)
    kv = round_bf16(oracle.wkv(rows, weight)[0])
    exact = oracle.to_bf16(oracle.gate(oracle.bf16_to_f64(h), kv, q, k, 1e-20).exact)
    assert oracle.check_gate(exact, h, bounds).passed
    swapped = kv.copy()
    swapped[:, 128:] = kv[:, :64]
    wrong = oracle.to_bf16(oracle.gate(oracle.bf16_to_f64(h), swapped, q, k, 1e-20).exact)
    assert not oracle.check_gate(wrong, h, bounds).passed


def test_shapes_that_differ_are_no_match() -> None:
    bits = np.zeros((2, 3), dtype=np.uint16)
    assert "shape [2, 3], needs [3, 2]" in oracle.check_bits(bits, bits.T).message
    assert not oracle.check_ids(bits, bits[:1]).passed


def test_bits_tell_zeros_apart_and_not_nans() -> None:
    assert not oracle.check_bits(np.array([0x8000], np.uint16), np.array([0], np.uint16)).passed
    assert oracle.check_bits(np.array([0xFFC1], np.uint16), np.array([0x7FC0], np.uint16)).passed
    assert (
        "bits 0x8000, needs 0x0000"
        in oracle.check_bits(np.array([0x8000], np.uint16), np.array([0], np.uint16)).message
    )
