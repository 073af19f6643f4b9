"""The gate against float64 intervals."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases import Case
from engram_conformance.data import random_gate, random_hidden
from engram_conformance.oracle.numbers import F64, U16, Mask
from engram_conformance.subject import Subject
from engram_core.errors import EngramError

_NAN, _INF, _NEGATIVE_ZERO = 0x7FC0, 0x7F80, 0x8000


@dataclass(frozen=True)
class Operands:
    """Bits of one call."""

    h: U16  # [T, H, dim]
    kv: U16  # [T, (H+1) * dim]
    q: Any  # [H, dim] bits, or float32
    k: Any
    eps: float = 1e-20

    @classmethod
    def random(cls, rng: np.random.Generator, tokens: int, copies: int, dim: int) -> Operands:
        kv = random_hidden(rng, tokens, copies + 1, dim).reshape(tokens, (copies + 1) * dim)
        return cls(random_hidden(rng, tokens, copies, dim), kv, *random_gate(rng, copies, dim))

    @property
    def split(self) -> int:
        """Where the value begins in kv."""
        return int(self.h.shape[1] * self.h.shape[2])

    def scaled(self, h: float = 1, key: float = 1, v: float = 1, q: float = 1, eps: float = 1e-20) -> Operands:
        kv = oracle.bf16_to_f64(self.kv)
        kv = np.concatenate([kv[:, : self.split] * key, kv[:, self.split :] * v], axis=1)
        wide = (oracle.bf16_to_f64(self.q) * q).astype(np.float32)
        k = oracle.bf16_to_f64(self.k).astype(np.float32)
        return Operands(oracle.to_bf16(oracle.bf16_to_f64(self.h) * h), oracle.to_bf16(kv), wide, k, eps)

    def expect(self) -> oracle.GateBounds:
        def read(x: Any) -> F64:
            return oracle.bf16_to_f64(x) if x.dtype == np.uint16 else x.astype(np.float64)

        return oracle.gate(read(self.h), read(self.kv), read(self.q), read(self.k), self.eps)


def run(subject: Subject, x: Operands, mask: Mask | None = None, **options: Any) -> torch.Tensor:
    return subject.backend.post_wkv(
        options.pop("hidden", None) if "hidden" in options else subject.bf16(x.h),
        options.pop("kv", None) if "kv" in options else subject.bf16(x.kv),
        options.pop("gate", None) or subject.gate_weights(x.q, x.k, x.eps),
        token_mask=None if mask is None else subject.to(mask),
        **options,
    )


def judge(subject: Subject, out: torch.Tensor, x: Operands, **options: Any) -> None:
    subject.judge(oracle.check_gate(bridge.bits(out), x.h, x.expect(), **options))


def operands(subject: Subject, tokens: int = 9, copies: int = 4, dim: int = 128) -> Operands:
    return Operands.random(subject.rng(), tokens, copies, dim)


def test_probe(case: Case, subject: Subject) -> None:
    p = case.params
    h, key, v, q = (oracle.to_bf16(np.full(4, float(p[name]))) for name in ("h", "key", "v", "q"))
    ones = oracle.to_bf16(np.ones((1, 4)))
    x = Operands(h.reshape(1, 1, 4), np.concatenate([key, v])[None], q[None], ones, p["eps"])
    subject.judge(oracle.check_bits(bridge.bits(run(subject, x)), np.full((1, 1, 4), p["bits"], dtype=np.uint16)))


def test_closed_probe(case: Case, subject: Subject) -> None:
    h = oracle.to_bf16(np.array([-0.0, 1, 2, 3])).reshape(1, 1, 4)
    kv = oracle.to_bf16(np.array([[1, 1, 1, 1, 1, np.nan, np.inf, -1]]))
    ones = oracle.to_bf16(np.ones((1, 4)))
    x = Operands(h, kv, ones, ones)
    subject.judge(oracle.check_bits(bridge.bits(run(subject, x, np.array([False]))), h))


def test_random(case: Case, subject: Subject) -> None:
    p = case.params
    x = operands(subject, p["tokens"], p["copies"], p["dim"])
    if p.get("weights") == "float32":
        x = x.scaled()
    judge(subject, run(subject, x), x)
    mask = subject.rng().random(p["tokens"]) < 0.6
    real = max(p["tokens"] - 2, 0)
    judge(subject, run(subject, x, mask, num_kv_tokens=real), x, token_mask=mask, num_kv_tokens=real)


def test_share(case: Case, subject: Subject) -> None:
    copies, dim = case.params["copies"], case.params["dim"]
    x = operands(subject, -(-110_000 // (copies * dim)), copies, dim)
    judge(subject, run(subject, x), x, random=True)
    assert subject.record.equal is not None, "fewer than 1e5 elements were counted"


def test_scaled(case: Case, subject: Subject) -> None:
    x = operands(subject, 33).scaled(**case.params)
    judge(subject, run(subject, x), x)


def test_cancel(case: Case, subject: Subject) -> None:
    x = operands(subject, 33)
    # The same hidden states in every copy's place, so that one value cancels them all.
    h = np.repeat(x.h[:, :1], 4, axis=1)
    base = replace(x, h=h)
    gates = base.expect().gates.mean(axis=1, keepdims=True)
    value = oracle.to_bf16(-oracle.bf16_to_f64(h[:, 0]) / gates)
    base = replace(base, kv=np.concatenate([x.kv[:, : x.split], value], axis=1))
    judge(subject, run(subject, base), base)


def test_ties(case: Case, subject: Subject) -> None:
    """h is 1 and gate * value just above half a unit of it: a sum rounded to bf16 by way of fewer bits falls down."""
    x = operands(subject, 64, 1, 96)
    x = replace(x, h=np.full_like(x.h, 0x3F80))
    gates = x.expect().gates
    aim = 2.0**-8 * (1 + np.linspace(-(2.0**-7), 2.0**-7, 96))
    value = oracle.to_bf16(aim / gates)
    x = replace(x, kv=np.concatenate([x.kv[:, : x.split], value], axis=1))
    judge(subject, run(subject, x), x)


def test_negative_zero(case: Case, subject: Subject) -> None:
    x = operands(subject)
    x = replace(x, h=np.where(np.arange(128) % 2, x.h, _NEGATIVE_ZERO).astype(np.uint16))
    mask = np.arange(9) % 2 == 0
    out = bridge.bits(run(subject, x, mask, num_kv_tokens=6))
    subject.judge(oracle.check_bits(out[~mask], x.h[~mask]))
    subject.judge(oracle.check_bits(out[6:], x.h[6:]))


def test_mask(case: Case, subject: Subject) -> None:
    x, place = operands(subject), np.arange(9)
    masks = {
        "all-open": place >= 0,
        "all-closed": place < 0,
        "first": place == 0,
        "last": place == 8,
        "alternating": place % 2 == 1,
    }
    mask = masks[case.params["kind"]]
    for poison in (None, _NAN, _INF):
        kv = x.kv.copy()
        if poison is not None:
            kv[~mask] = poison
        given = replace(x, kv=kv)
        judge(subject, run(subject, given, mask), given, token_mask=mask)


def test_num_kv(case: Case, subject: Subject) -> None:
    x, count = operands(subject), case.params["count"]
    real = 9 if count is None else count % 9 if count < 0 else count
    mask = np.arange(9) % 3 != 1 if case.params.get("mask") else None
    kv = x.kv.copy()
    kv[real:] = np.resize([_NAN, _INF, 0xFF80], kv[real:].shape)
    x = replace(x, kv=kv)
    judge(subject, run(subject, x, mask, num_kv_tokens=real), x, token_mask=mask, num_kv_tokens=real)


def test_spread(case: Case, subject: Subject) -> None:
    base, where = operands(subject), case.params["where"]
    bad = {"nan": _NAN, "inf": _INF}[case.params["poison"]]
    for token, copy, place in ((0, 0, 0), (3, 2, 127), (8, 3, 64)):
        h, kv = base.h.copy(), base.kv.copy()
        if where == "hidden":
            h[token, copy, place] = bad
        else:
            kv[token, base.split + place if where == "value" else copy * 128 + place] = bad
        x = replace(base, h=h, kv=kv)
        out = run(subject, x)
        judge(subject, out, x)
        got = oracle.bf16_to_f64(bridge.bits(out))
        reached = got[token, :, place] if where == "value" else got[token, copy]
        assert not np.isfinite(reached).any(), f"{case.params['poison']} in {where} did not reach the output"


def test_overflow(case: Case, subject: Subject) -> None:
    x = operands(subject)
    h, kv = x.h.copy(), x.kv.copy()
    h[4] = oracle.to_bf16(np.full((4, 128), 2.0**100))
    kv[6, : x.split] = 0x7F7F
    x = replace(x, h=h, kv=kv)
    keep = ~np.isin(np.arange(9), (4, 6))
    out = run(subject, x)[torch.from_numpy(keep).to(subject.device)]
    rest = replace(x, h=x.h[keep], kv=x.kv[keep])
    judge(subject, out, rest)


def _holder(subject: Subject, bits: U16, *grow: int) -> torch.Tensor:
    """The bits as a slice of poisoned memory, each dimension grown by so much on both sides."""
    whole = subject.poisoned(*(n + 2 * g for n, g in zip(bits.shape, grow, strict=True)))
    view = whole[tuple(slice(g, g + n) for n, g in zip(bits.shape, grow, strict=True))]
    view.copy_(subject.bf16(bits))
    return view


def test_strides(case: Case, subject: Subject) -> None:
    x, kind = operands(subject), case.params["kind"]
    given: dict[str, Any] = {}
    if kind == "hidden-slice":
        given["hidden"] = _holder(subject, x.h, 2, 1, 16)
    elif kind == "hidden-transposed":
        given["hidden"] = subject.bf16(x.h).transpose(0, 1).contiguous().transpose(0, 1)
    elif kind == "kv-slice":
        given["kv"] = _holder(subject, x.kv, 1, 8)
    elif kind == "out-slice":
        given["out"] = _holder(subject, np.zeros_like(x.h), 1, 1, 32)
    elif kind == "hidden-expanded":
        x = replace(x, h=np.repeat(x.h[:, :1], 4, axis=1))
        given["hidden"] = subject.bf16(x.h[:, :1]).expand(-1, 4, -1)
    else:
        q, k = _holder(subject, x.q, 1, 8), _holder(subject, x.k, 0, 24)
        given["gate"] = replace(subject.gate_weights(x.q, x.k), q_weight=q, k_weight=k)
    judge(subject, run(subject, x, **given), x)


def test_not_dense(case: Case, subject: Subject) -> None:
    x = operands(subject)
    spread = subject.poisoned(9, 4, 256)[..., ::2]
    spread.copy_(subject.bf16(x.h))
    spread_kv = subject.poisoned(9, 2 * x.kv.shape[1])[:, ::2]
    spread_kv.copy_(subject.bf16(x.kv))
    mask = np.arange(9) % 2 == 0
    changed: list[dict[str, Any]] = [
        {"hidden": spread},
        {"kv": spread_kv},
        {"out": subject.poisoned(9, 4, 256)[..., ::2]},
    ]
    for given in changed:
        try:
            out = run(subject, x, mask, **given)
        except EngramError:
            subject.record.add(0.0, None)
        else:
            judge(subject, out, x, token_mask=mask)


def test_out(case: Case, subject: Subject) -> None:
    x = operands(subject)
    mask = np.arange(9) % 2 == 0
    out = subject.poisoned(9, 4, 128)
    returned = run(subject, x, mask, num_kv_tokens=7, out=out)
    assert returned.data_ptr() == out.data_ptr(), "`out` was given, and something else came back"
    judge(subject, out, x, token_mask=mask, num_kv_tokens=7)


def test_unchanged(case: Case, subject: Subject) -> None:
    x = operands(subject)
    hidden, kv, gate = subject.bf16(x.h), subject.bf16(x.kv), subject.gate_weights(x.q, x.k)
    mask = subject.to(np.arange(9) % 2 == 0)
    subject.backend.post_wkv(hidden, kv, gate, token_mask=mask, num_kv_tokens=7)
    for name, got, want in (
        ("hidden", hidden, x.h),
        ("kv", kv, x.kv),
        ("q", gate.q_weight, x.q),
        ("k", gate.k_weight, x.k),
    ):
        subject.judge(oracle.check_bits(bridge.bits(got), want, name))
    assert mask.cpu().tolist() == [t % 2 == 0 for t in range(9)], "the mask was written"


def test_repeat(case: Case, subject: Subject) -> None:
    x, others = operands(subject), [Operands.random(np.random.default_rng(0), n, 4, 128) for n in (17, 9)]
    first = run(subject, x)
    kept = first.clone()
    for other in others:  # the last one of the first one's shape
        run(subject, other)
        subject.same(first, kept, "the first call's result, after another")
    subject.same(run(subject, x), kept, "a second call")
    subject.same(first, kept, "the first call's result, after others")
