"""Projections against float64 products."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases import Case
from engram_conformance.cases.geometry import geometry
from engram_conformance.cases.model import Size
from engram_conformance.data import random_rows, random_weight
from engram_conformance.oracle.numbers import F64, I64, U8, U16
from engram_conformance.subject import Subject
from engram_conformance.verdicts import RefusedAsDeclared
from engram_core.backend import Wkv

_MOST_TOKENS = 256
_WHOLE_TOKENS = 33
_CHEAP = 1 << 24  # weights of fewer elements are multiplied whole
_SAMPLE = 2560  # outputs


class Numbers:
    """Rows, a weight and the oracle's products of one geometry: kept, since the published ones take seconds."""

    def __init__(self, name: str, scale_rows: str, kind: str, center: int) -> None:
        shape = geometry(name)
        rng = np.random.default_rng([11, center])
        self.packed = random_rows(rng, _MOST_TOKENS * shape.columns, shape.head_dim, center)
        self.packed = self.packed.reshape(_MOST_TOKENS, shape.columns, -1)
        self.rows: U16 = oracle.decode_rows(self.packed)
        codes, scales = random_weight(rng, shape.n, shape.k, shape.n if scale_rows == "n" else None)
        self.codes: Any = codes
        self.scales: U8 | None = scales
        if kind == "bf16":
            bits = oracle.to_bf16(rng.standard_normal(min(shape.n * shape.k, 1_000_003)) / np.sqrt(shape.k))
            self.codes, self.scales = np.resize(bits, (shape.n, shape.k)), None
        self.weight = oracle.Weight(self.codes, self.scales)
        self._plain = (scale_rows, kind, center) == ("n/32", "fp8", 127)
        blocks = np.arange(shape.n).reshape(-1, 16)
        some = rng.permutation(len(blocks))[: max(_SAMPLE // 16, 1)]
        self._some = np.sort(blocks[np.union1d(some, [0, len(blocks) - 1])].ravel())
        self._known: dict[bool, tuple[F64, F64]] = {}

    def products(self, tokens: int) -> tuple[F64, F64, I64 | slice]:
        """``ref`` and ``S`` of the first ``tokens``, and of which outputs; one product serves all.

        Of the published weight all outputs are computed for up to 33 tokens; beyond, and of its variants, a sample.
        """
        shape = self.weight.shape
        whole = shape[0] * shape[1] < _CHEAP or (self._plain and tokens <= _WHOLE_TOKENS)
        if whole not in self._known:
            most = _MOST_TOKENS if shape[0] * shape[1] < _CHEAP or not whole else _WHOLE_TOKENS
            weight = self.weight if whole else self.weight.select(self._some)
            self._known[whole] = oracle.wkv(oracle.bf16_to_f64(self.rows[:most]), weight)
        ref, size = self._known[whole]
        return ref[:tokens], size[:tokens], slice(None) if whole else self._some


@lru_cache(maxsize=24)
def numbers(name: str, scale_rows: str = "n/32", kind: str = "fp8", center: int = 127) -> Numbers:
    return Numbers(name, scale_rows, kind, center)


def _load(wkv: Wkv, data: Numbers, device: torch.device, scale_dtype: str = "e8m0") -> None:
    if data.scales is None:
        wkv.load(bridge.bf16(data.codes, device))
        return
    scales = bridge.tensor(data.scales, device) if scale_dtype == "uint8" else bridge.e8m0(data.scales, device)
    wkv.load(bridge.fp8(data.codes, device), scales)


# The last projection of the published shape: loading it takes seconds, and its cases differ in the number of tokens.
_published: dict[Any, Wkv] = {}


class Rig:
    def __init__(self, case: Case, subject: Subject, **key: Any) -> None:
        p = case.params
        key = {name: p[name] for name in ("scale_rows", "center") if name in p} | {"kind": p.get("weight", "fp8")} | key
        self.subject, self.shape = subject, subject.geometry
        self.data = numbers(case.geometry, **key)
        slot = (subject.backend, case.geometry, *key.items()) if case.size is Size.REAL else None
        held = _published.get(slot)
        self.wkv = subject.wkv(self.shape) if held is None else held
        if held is None:
            assert self.wkv.kv_layout == "full", "a single rank's kv is the whole projection"
            assert self.wkv.kv_features == self.shape.n, f"kv_features is {self.wkv.kv_features}, not {self.shape.n}"
            _load(self.wkv, self.data, subject.device, p.get("scale_dtype", "e8m0"))
            _published.clear()
            if slot is not None:
                _published[slot] = self.wkv

    def rows(self, tokens: int) -> torch.Tensor:
        return self.subject.bf16(self.data.rows[:tokens])

    def judge(self, kv: torch.Tensor, tokens: int, random: bool = True) -> None:
        ref, size, outputs = self.data.products(tokens)
        got = bridge.bits(kv)
        assert got.shape == (tokens, self.shape.n), f"kv is {list(got.shape)}, not [{tokens}, {self.shape.n}]"
        self.subject.judge(oracle.check_wkv(got[:, outputs], ref, size, self.shape.k, random=random))


def test_tokens(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), case.params["tokens"]
    rows = rig.rows(tokens)
    before = rows.clone()
    rig.judge(rig.wkv(rows), tokens)
    assert torch.equal(rows.view(torch.int16), before.view(torch.int16)), "the rows were written"


def test_packed(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    if not rig.wkv.accepts_packed:  # a trait of this very device and shape, which is a declaration too
        with subject.raises("rows"):
            rig.wkv(subject.to(rig.data.packed[:2]))
        raise RefusedAsDeclared("Wkv.accepts_packed is False for this device and shape")
    for tokens in case.params["tokens"]:
        rig.judge(rig.wkv(subject.to(rig.data.packed[:tokens])), tokens)


def test_zeros(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    rows = rig.data.rows[:33].copy()
    rows[::2] = 0
    got = bridge.bits(rig.wkv(subject.bf16(rows)))
    ref, size, _ = rig.data.products(33)
    ref, size = ref.copy(), size.copy()
    ref[::2], size[::2] = 0, 0
    subject.judge(oracle.check_wkv(got, ref, size, rig.shape.k))
    assert not (got[::2] & 0x7FFF).any(), "zero rows gave something else than zeros"


def test_scaled(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    for tokens in (1, 40):
        rig.judge(rig.wkv(rig.rows(tokens)), tokens, random=False)


def test_leak(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), 40
    ref, size, _ = rig.data.products(tokens)
    for bad in (0, 15, 16, 39):
        rows = rig.data.rows[:tokens].copy()
        rows[bad] = {"nan": 0x7FC0, "inf": 0x7F80}[case.params["poison"]]
        got = bridge.bits(rig.wkv(subject.bf16(rows)))
        keep = np.arange(tokens) != bad
        subject.judge(oracle.check_wkv(got[keep], ref[keep], size[keep], rig.shape.k))
        if case.params["poison"] == "nan":
            assert np.isnan(oracle.bf16_to_f64(got[bad])).all(), "NaN rows gave numbers"


def test_independence(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), 33
    order = subject.rng().permutation(tokens)
    shuffled = rig.wkv(subject.bf16(rig.data.rows[order]))
    rig.judge(shuffled[torch.from_numpy(np.argsort(order)).to(subject.device)], tokens)
    alone = torch.cat([rig.wkv(rig.rows(tokens)[t : t + 1]) for t in range(tokens)])
    rig.judge(alone, tokens)


def test_strided(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), 19
    holder = subject.poisoned(2 * tokens, rig.shape.columns + 2, rig.shape.head_dim)
    rows = holder[::2, : rig.shape.columns]
    rows.copy_(rig.rows(tokens))
    assert not rows.is_contiguous()
    rig.judge(rig.wkv(rows), tokens)


def test_out(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    for tokens in (0, 1, 18, 130):
        holder = subject.poisoned(2 * tokens + 2, rig.shape.n + 64)
        before = holder.clone()
        here = (slice(1, 2 * tokens + 1, 2), slice(32, 32 + rig.shape.n))
        out = holder[here] if case.params.get("strided") else subject.poisoned(tokens, rig.shape.n)
        got = rig.wkv(rig.rows(tokens), out=out)
        assert tokens == 0 or got.data_ptr() == out.data_ptr(), "`out` was given, and something else came back"
        rig.judge(out, tokens)
        if case.params.get("strided"):
            holder[here] = before[here]
            assert torch.equal(holder.view(torch.int16), before.view(torch.int16)), "memory around `out` was written"


def test_reload(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), 17
    rig.judge(rig.wkv(rig.rows(tokens)), tokens)
    other = numbers(case.geometry, center=128)
    assert other.scales is not None
    codes, scales = bridge.fp8(other.codes, subject.device), bridge.e8m0(other.scales, subject.device)
    rig.wkv.load(codes, scales)
    codes.view(torch.uint8).fill_(0x38)  # the caller's memory is the caller's
    scales.view(torch.uint8).fill_(127)
    ref, size = oracle.wkv(oracle.bf16_to_f64(rig.data.rows[:tokens]), other.weight)
    got = bridge.bits(rig.wkv(rig.rows(tokens)))
    subject.judge(oracle.check_wkv(got, ref, size, rig.shape.k, random=True))


def test_reload_kinds(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), 17
    rig.judge(rig.wkv(rig.rows(tokens)), tokens)
    for scale_rows, kind in case.params["kinds"]:
        other = numbers(case.geometry, scale_rows, kind)
        _load(rig.wkv, other, subject.device)
        ref, size = oracle.wkv(oracle.bf16_to_f64(rig.data.rows[:tokens]), other.weight)
        got = bridge.bits(rig.wkv(rig.rows(tokens)))
        subject.judge(
            oracle.check_wkv(got, ref, size, rig.shape.k, random=True, name=f"kv of {kind}, scales {scale_rows}")
        )


def test_repeat(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    first = rig.wkv(rig.rows(20)).clone()
    for tokens in (1, 64, 0, 20):
        rig.judge(rig.wkv(rig.rows(tokens)), tokens)
    subject.same(rig.wkv(rig.rows(20)), first, "kv")
