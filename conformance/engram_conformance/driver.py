"""Drives a memory as an engine would, and says what the oracle expects of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.data import Model, random_hidden
from engram_conformance.oracle.numbers import I64, U16, Mask
from engram_conformance.subject import Subject
from engram_core.hashing import TokenBatch
from engram_core.hot import HotRows, hashing_fingerprint
from engram_core.memory import EngramMemory


@dataclass(frozen=True)
class Work:
    """One forward pass: ``tokens`` of one sequence from position 0, and hidden states of each layer, as bits."""

    model: Model
    tokens: I64
    hidden: dict[int, U16]
    dead: Mask | None = None
    mask: Mask | None = None

    @classmethod
    def make(cls, model: Model, seed: int, tokens: int, dead: Iterable[int] = (), closed: Iterable[int] = ()) -> Work:
        """Random; ``dead`` and ``closed`` are positions."""
        rng = np.random.default_rng([seed, tokens])
        shape, place = model.geometry, np.arange(tokens)
        ids = rng.integers(0, shape.vocab, tokens)
        hidden = {layer: random_hidden(rng, tokens, shape.copies, shape.hidden) for layer in shape.layers}
        dead, closed = list(dead), list(closed)
        return cls(
            model,
            ids,
            hidden,
            np.isin(place, dead) if dead else None,
            ~np.isin(place, closed) if closed else None,
        )

    @property
    def open(self) -> Mask:
        """Which gates are open."""
        if self.mask is not None:
            return self.mask
        return np.ones(len(self.tokens), dtype=bool) if self.dead is None else ~self.dead

    def batch(self, device: torch.device) -> TokenBatch:
        """On ``device``, with its copy on the host."""
        dead = None if self.dead is None else torch.tensor(self.dead)
        return TokenBatch.single(torch.tensor(self.tokens), dead).to(device)

    def states(self, subject: Subject, layer_id: int, window: slice = slice(None)) -> torch.Tensor:
        """Hidden states of a layer on the device."""
        return subject.bf16(self.hidden[layer_id][window])

    def ids(self) -> I64:
        """The oracle's hash ids ``[T, L, C]``."""
        return self.model.hash_sequence(self.tokens, self.dead)

    def run(
        self,
        subject: Subject,
        memory: EngramMemory,
        order: Sequence[int] | None = None,
        window: slice = slice(None),
        slot_tokens: int | None = None,
        deferred: bool = False,
    ) -> dict[int, torch.Tensor]:
        """A whole step; the result of each layer in ``order`` (default: the model's).

        ``deferred``: a chain is started in front of each of them, and none with the step.
        """
        mask = None if self.mask is None else subject.to(self.mask)
        results, batch = {}, self.batch(subject.device)
        with memory.step(batch, token_mask=mask, slot_tokens=slot_tokens, defer_chains=deferred) as step:
            for layer_id in memory.layers if order is None else order:
                step.start_chain()
                results[layer_id] = step.inject(layer_id, self.states(subject, layer_id, window))
        return results

    def judge(
        self, subject: Subject, results: dict[int, torch.Tensor], window: slice = slice(None), who: str = ""
    ) -> None:
        """Every result against the oracle's layer."""
        ids = self.ids()[window]
        for layer_id, got in results.items():
            hidden = self.hidden[layer_id][window]
            bounds = self.model.expect(layer_id, hidden, ids)
            check = oracle.check_gate(
                bridge.bits(got), hidden, bounds, token_mask=self.open[window], name=f"layer {layer_id}{who}"
            )
            subject.judge(check)


def hot_rows(memory: EngramMemory, seed: int) -> HotRows:
    """Half of the rows of every layer, in a random order."""
    rng = np.random.default_rng(seed)
    ids, counts = {}, {}
    for layer_id, layer in memory.layers.items():
        rows = layer.table.spec.rows
        ids[layer_id] = torch.from_numpy(rng.permutation(rows)[: rows // 2])
        counts[layer_id] = torch.arange(rows // 2, 0, -1)
    return HotRows(ids, counts, 1000, hashing_fingerprint(memory.layout, memory.token_map))


def plain(subject: Subject, memory: EngramMemory, work: Work) -> dict[int, torch.Tensor]:
    """Every layer by itself, nothing ahead: what a step must give bit for bit."""
    ids = bridge.tensor(work.ids(), "cpu", torch.int32)
    mask: Any = None if work.mask is None and work.dead is None else subject.to(work.open)
    results = {}
    for layer_id, layer in memory.layers.items():
        own = ids[:, work.model.geometry.layers.index(layer_id)].to(layer.table.ids_device)
        results[layer_id] = layer(work.states(subject, layer_id), own, mask)
    return results


def same(subject: Subject, got: dict[int, torch.Tensor], want: dict[int, torch.Tensor], who: str = "") -> None:
    """Two steps, bit for bit, for the layers of ``got``."""
    for layer_id, result in got.items():
        subject.same(result, want[layer_id], f"layer {layer_id}{who}")
