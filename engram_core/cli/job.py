"""The main job: a text through every Engram layer, as an engine would run it, with a clock on every stage.

A chunked prefill: steps of some hundred tokens, each with the lookback of the one before, then a last step small
enough for its WKV to run ahead of the layer (as decoding does). ``EngramStep.inject`` is taken apart here into look-up,
WKV and gate, because the clock and the judge need what lies between. The last step is also run whole, by ``inject``,
and must give the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from engram_core.hashing import TokenBatch

if TYPE_CHECKING:
    from engram_core.cli.judge import Judge
    from engram_core.layer import Engram
    from engram_core.memory import EngramMemory
    from engram_core.step import EngramStep
    from engram_core.synthetic import Synthetic

AHEAD_TOKENS: Final = 16
"""Tokens of the last step, whose WKV runs ahead."""


@dataclass
class Seconds:
    """Where the time went. ``hash`` is of all layers: one pass computes them all."""

    hash: float = 0.0
    lookup: dict[int, float] = field(default_factory=dict)
    wkv: dict[int, float] = field(default_factory=dict)
    gate: dict[int, float] = field(default_factory=dict)


class Clock:
    """Wall time of device work: it starts when the device is idle, and ends when it is idle again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def __call__(self, into: dict[int, float], key: int) -> Iterator[None]:
        self._settle()
        begin = time.perf_counter()
        yield
        self._settle()
        into[key] = into.get(key, 0.0) + time.perf_counter() - begin

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def spans(tokens: int, step_tokens: int) -> list[tuple[int, int]]:
    """Steps ``[start, stop)``: whole chunks, the rest, and the last ``AHEAD_TOKENS`` tokens."""
    last = max(0, tokens - min(AHEAD_TOKENS, step_tokens))
    return [(start, min(start + step_tokens, last)) for start in range(0, last, step_tokens)] + [(last, tokens)]


def batch_of(ids: Sequence[int], start: int, stop: int, lookback: int) -> TokenBatch:
    """Tokens ``[start, stop)`` of one sequence, with the ``lookback`` tokens before them, newest first."""
    before = [ids[start - 1 - s] if start - 1 - s >= 0 else -1 for s in range(lookback)]
    return TokenBatch(
        input_ids=torch.tensor(ids[start:stop], dtype=torch.int32),
        positions=torch.arange(start, stop, dtype=torch.int32),
        query_start=torch.tensor([0, stop - start], dtype=torch.int32),
        lookback=torch.tensor([before], dtype=torch.int32),
    )


@torch.inference_mode()
def run_steps(
    memory: EngramMemory, synthetic: Synthetic, ids: Sequence[int], steps: Sequence[tuple[int, int]], judge: Judge
) -> Seconds:
    """Run every step, give the judge what each layer made, and return the times."""
    device = memory.backend.device
    clock, seconds = Clock(device), Seconds()
    hashing: dict[int, float] = {}
    for start, stop in steps:
        batch = batch_of(ids, start, stop, memory.layout.max_ngram_size - 1).to(device)
        with clock(hashing, 0):
            memory.hasher(batch)
        hidden = synthetic.hidden_states(start, stop - start).to(device)
        with memory.step(batch) as step:
            for layer_id, layer in memory.layers.items():
                hidden = _layer(step, layer, layer_id, hidden, start, (start, stop) == steps[-1], clock, seconds, judge)
    seconds.hash = hashing[0]
    return seconds


def _layer(
    step: EngramStep,
    layer: Engram,
    layer_id: int,
    hidden: torch.Tensor,
    start: int,
    last: bool,
    clock: Clock,
    seconds: Seconds,
    judge: Judge,
) -> torch.Tensor:
    ids = step.hash_ids[layer_id]
    tokens = int(ids.shape[0])
    whole = step.inject(layer_id, hidden) if last else None
    with clock(seconds.lookup, layer_id):
        layer.prepare(ids)
        rows = layer.take_rows()
    with clock(seconds.wkv, layer_id):
        kv = layer.project(rows)
    with clock(seconds.gate, layer_id):
        out = layer.inject(hidden, kv, tokens, step.token_mask)
    judge.see_rows(layer_id, start, ids, layer.table.lookup(ids), rows)
    judge.see_layer(layer_id, start, hidden, kv, out)
    if whole is not None:
        judge.see_whole(layer_id, whole, out)
    return out
