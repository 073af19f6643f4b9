"""Hash ids against Python integers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases import Case
from engram_conformance.data import random_map
from engram_conformance.subject import Subject
from engram_core.hashing import NgramHasher, TokenBatch
from engram_core.layout import HashLayout
from engram_core.tokens import TokenMap


class Rig:
    """A fresh hasher, and the oracle's answer for the same batch."""

    def __init__(self, subject: Subject, identity: bool = False) -> None:
        shape = subject.geometry
        self.subject, self.shape, self.numbers = subject, shape, shape.numbers
        rng = np.random.default_rng(3)
        self.map_ids = np.arange(shape.compressed) if identity else random_map(rng, shape.vocab, shape.compressed)
        self.hasher = NgramHasher(shape.config(), TokenMap(self.map_ids, shape.pad), subject.backend)

    def ask(self, batch: TokenBatch) -> np.ndarray[Any, Any]:
        return bridge.array(self.hasher(batch.to(self.subject.device)))

    def check(
        self,
        ids: Sequence[int],
        positions: Sequence[int] | None = None,
        starts: Sequence[int] | None = None,
        lookback: Sequence[Sequence[int]] | None = None,
        dead: Sequence[bool] | None = None,
        dtypes: Sequence[torch.dtype] = (torch.int64,) * 4,
    ) -> None:
        ids = [int(i) for i in ids]
        positions = list(range(len(ids))) if positions is None else positions
        starts = [0, len(ids)] if starts is None else starts
        want = oracle.hash_ids(self.numbers, self.map_ids, self.shape.pad, ids, positions, starts, lookback, dead)
        requests = len(starts) - 1
        before = np.zeros((requests, 0)) if not lookback else np.array(lookback)
        batch = TokenBatch(
            torch.tensor(ids, dtype=dtypes[0]),
            torch.tensor(positions, dtype=dtypes[1]),
            torch.tensor(starts, dtype=dtypes[2]),
            torch.from_numpy(before).to(dtypes[3]),
            None if dead is None else torch.tensor(dead, dtype=torch.bool),
        )
        self.subject.judge(oracle.check_ids(self.ask(batch), want))

    def random_ids(self, count: int, seed: int = 0) -> list[int]:
        rng = np.random.default_rng([self.subject.case.seed, seed])
        return [int(i) for i in rng.integers(0, len(self.map_ids), count)]


def _golden(name: str) -> dict[str, Any]:
    text = files("engram_conformance").joinpath("golden", f"{name}.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def test_layout(case: Case, subject: Subject) -> None:
    shape = subject.geometry
    have, want = HashLayout.from_config(shape.config()), shape.numbers
    for name in ("primes", "offsets", "multipliers", "rows"):
        got = np.array(getattr(have, name), dtype=np.int64)
        subject.judge(oracle.check_ids(got, np.array(getattr(want, name), dtype=np.int64), name))
    golden: dict[str, Any] = {"tiny": _golden("hash_tiny"), "v41": _golden("hash_deepseek_v41")["meta"]}.get(
        case.geometry, {}
    )
    for name in ("primes", "multipliers") if golden else ():
        subject.judge(oracle.check_ids(np.array(getattr(have, name)), np.array(golden[name]), f"golden {name}"))


def test_golden(case: Case, subject: Subject) -> None:
    rig = Rig(subject, identity=True)
    for entry in _golden(case.params["file"])["cases"]:
        if entry.get("name") != case.params.get("entry"):
            continue
        tokens = torch.tensor(entry.get("compressed", entry.get("tokens")))
        dead = torch.zeros(len(tokens), dtype=torch.bool)
        dead[entry["dead"]] = True
        got = rig.ask(TokenBatch.single(tokens, dead))
        want = np.stack([entry["hash_ids"][str(layer)] for layer in rig.shape.layers], axis=1)
        subject.judge(oracle.check_ids(got, want, "golden hash_ids"))


def test_probe(case: Case, subject: Subject) -> None:
    p = case.params
    batch = TokenBatch(
        torch.tensor([p["token"]]), torch.tensor([p["position"]]), torch.tensor([0, 1]), torch.tensor([p["lookback"]])
    )
    got = Rig(subject, identity=True).ask(batch)
    subject.judge(oracle.check_ids(got, np.array([p["ids"]]), "hash_ids"))


def test_sequence(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    tokens = rig.random_ids(case.params["tokens"])
    rig.check(tokens)
    got = rig.ask(TokenBatch.single(torch.tensor(tokens, dtype=torch.int64)))
    subject.judge(oracle.check_ids(got, oracle.hash_sequence(rig.numbers, rig.map_ids, rig.shape.pad, tokens)))


def test_chunks(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    tokens, width = rig.random_ids(case.params["tokens"]), rig.shape.ngram - 1
    want = oracle.hash_sequence(rig.numbers, rig.map_ids, rig.shape.pad, tokens)
    for size in case.params["sizes"]:
        parts = []
        for begin in range(0, len(tokens), size):
            chunk = tokens[begin : begin + size]
            before = [tokens[begin - 1 - i] if begin - 1 - i >= 0 else -1 for i in range(width)]
            parts.append(
                rig.ask(
                    TokenBatch(
                        torch.tensor(chunk),
                        torch.arange(begin, begin + len(chunk)),
                        torch.tensor([0, len(chunk)]),
                        torch.tensor([before]),
                    )
                )
            )
        subject.judge(oracle.check_ids(np.concatenate(parts), want, f"hash_ids in chunks of {size}"))


def test_packed(case: Case, subject: Subject) -> None:
    p, rig = case.params, Rig(subject)
    lengths, padding, width = p["lengths"], p.get("padding", 0), rig.shape.ngram - 1
    before = p.get("before", (0,) * len(lengths))
    history = [rig.random_ids(width, seed=r + 1) for r in range(len(lengths))]
    tokens = rig.random_ids(sum(lengths) + padding)
    positions = [b + j for length, b in zip(lengths, before, strict=True) for j in range(length)]
    starts = np.cumsum([0, *lengths]).tolist()
    rig.check(tokens, positions + list(range(padding)), starts, history)


def test_lookback(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    width, kind = rig.shape.ngram - 1, case.params["kind"]
    tokens = rig.random_ids(5)
    for seed in range(width):
        known = rig.random_ids(width, seed=seed + 1)
        first = 50
        if kind == "unknown":
            known[seed] = -1
        elif kind == "outside":
            known[seed] = (len(rig.map_ids), -7, 2**31 - 1)[seed]
        elif kind == "before-start":
            first = seed  # entries from `seed` on lie before position 0 and hold ids all the same
        positions = list(range(first, first + 5))
        rig.check(tokens, positions, None, None if kind == "none" else [known])


def test_dead(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    tokens = rig.random_ids(case.params["tokens"])
    for position in range(len(tokens)):
        rig.check(tokens, dead=[p == position for p in range(len(tokens))])


def test_dead_current(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    tokens = rig.random_ids(case.params["tokens"])
    pad = oracle.hash_sequence(rig.numbers, rig.map_ids, rig.shape.pad, [rig.shape.pad], [True])[0]
    for position in range(len(tokens)):
        dead = torch.tensor([p == position for p in range(len(tokens))])
        got = rig.ask(TokenBatch.single(torch.tensor(tokens), dead))
        subject.judge(oracle.check_ids(got[position], pad, f"all-pad hash at {position}"))


def test_dead_all(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    tokens = rig.random_ids(case.params["tokens"])
    rig.check(tokens, dead=[True] * len(tokens))


def test_dead_packed(case: Case, subject: Subject) -> None:
    rig, lengths = Rig(subject), case.params["lengths"]
    tokens = rig.random_ids(sum(lengths))
    dead = [i in case.params["dead"] for i in range(len(tokens))]
    history = [rig.random_ids(rig.shape.ngram - 1, seed=r + 1) for r in range(len(lengths))]
    positions = [9 + j for length in lengths for j in range(length)]
    rig.check(tokens, positions, np.cumsum([0, *lengths]).tolist(), history, dead)


def test_outside(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    size = len(rig.map_ids)
    outside = [-1, -2, size, size + 1, 2**31 - 1, -(2**31), 2**31, 2**40, -(2**40), 2**63 - 1, -(2**63)]
    tokens = [t for bad in outside for t in (*rig.random_ids(4, seed=bad % 97), bad)] + rig.random_ids(4)
    rig.check(tokens)
    narrow = [t for t in tokens if -(2**31) <= t < 2**31]
    rig.check(narrow, dtypes=(torch.int32,) * 4)


def test_dtypes(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    dtypes = [getattr(torch, name) for name in case.params["dtypes"]]
    history = [rig.random_ids(rig.shape.ngram - 1, seed=r + 1) for r in range(3)]
    rig.check(rig.random_ids(9), [4, 5, 0, 1, 2, 7, 8, 9, 10], [0, 2, 5, 9], history, dtypes=dtypes)


def test_strided(case: Case, subject: Subject) -> None:
    rig, width = Rig(subject), subject.geometry.ngram - 1
    tokens, history = rig.random_ids(7), [rig.random_ids(width, seed=r + 1) for r in range(2)]
    positions, starts, dead = [3, 4, 5, 1, 2, 3, 4], [0, 3, 7], [False, True, False, False, False, True, False]
    want = oracle.hash_ids(rig.numbers, rig.map_ids, rig.shape.pad, tokens, positions, starts, history, dead)

    def spread(numbers: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        dense = torch.tensor(numbers, dtype=dtype, device=subject.device)
        holder = torch.full((dense.shape[0] * 3, *dense.shape[1:]), 1, dtype=dtype, device=subject.device)
        holder[::3] = dense
        return holder[::3]

    back = torch.tensor(history, device=subject.device).T.contiguous().T
    batch = TokenBatch(spread(tokens), spread(positions), spread(starts), back, spread(dead, torch.bool))
    assert not batch.input_ids.is_contiguous()
    assert not batch.lookback.is_contiguous()
    subject.judge(oracle.check_ids(bridge.array(rig.hasher(batch)), want))


def test_output(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    tokens = torch.tensor(rig.random_ids(6))
    got = rig.hasher(TokenBatch.single(tokens).to(subject.device))
    assert got.dtype == getattr(torch, case.params["dtype"]), f"hash ids are {got.dtype}"
    assert got.shape == (6, len(rig.shape.layers), rig.shape.columns)
    assert got.device == subject.device
    want = oracle.hash_sequence(rig.numbers, rig.map_ids, rig.shape.pad, tokens.tolist())
    subject.judge(oracle.check_ids(bridge.array(got), want))


def test_fresh(case: Case, subject: Subject) -> None:
    rig = Rig(subject)
    for seed, count in enumerate(case.params["counts"]):
        rig.check(rig.random_ids(count, seed=seed))
