"""Streams and graphs, through torch's own names for them; on a CPU there is nothing to run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engram_conformance.cases import Case
from engram_conformance.data import model
from engram_conformance.delays import needs_streams, new_stream, sleep
from engram_conformance.driver import Work, hot_rows
from engram_conformance.subject import Subject
from engram_core.memory import EngramMemory


class Rig:
    """A memory with static buffers, as an engine that captures graphs has them."""

    def __init__(self, case: Case, subject: Subject, tokens: int, memory: EngramMemory | None = None) -> None:
        needs_streams(subject)
        self.case, self.subject, self.tokens = case, subject, tokens
        self.memory = memory or subject.memory(model(case.geometry))
        self.work = self.make(0)
        self.batch = self.work.batch(subject.device)
        self.hidden = {i: self.work.states(subject, i) for i in self.memory.layers}
        self.batch.input_ids.fill_(1)

    def make(self, seed: int) -> Work:
        return Work.make(model(self.case.geometry), self.case.seed + seed, self.tokens)

    def fill(self, work: Work) -> None:
        """Write a batch into the buffers, from the device: enqueued behind what the stream still has to do."""
        self.batch.input_ids.copy_(self.subject.to(work.tokens), non_blocking=True)
        for layer_id, buffer in self.hidden.items():
            buffer.copy_(work.states(self.subject, layer_id), non_blocking=True)

    def step(self, order: Sequence[int] | None = None) -> dict[int, torch.Tensor]:
        results, deferred = {}, self.case.params.get("deferred", ())
        with self.memory.step(self.batch, defer_chains=bool(deferred)) as step:
            for layer_id in self.memory.layers if order is None else order:
                if layer_id in deferred:
                    step.start_chain()
                results[layer_id] = step.inject(layer_id, self.hidden[layer_id])
        return results

    def capture(self, order: Sequence[int] | None = None) -> tuple[Any, dict[int, torch.Tensor]]:
        return captured(lambda: self.step(order))

    def late(self, work: Work) -> None:
        """Fill the buffers once a delay has run; until then they hold other ids."""
        given = {i: work.states(self.subject, i) for i in self.hidden}
        ids = self.subject.to(work.tokens)
        self.batch.input_ids.fill_(1)
        torch.cuda.synchronize()
        sleep()
        self.batch.input_ids.copy_(ids)
        for layer_id, buffer in self.hidden.items():
            buffer.copy_(given[layer_id])


def captured(work: Callable[[], dict[int, torch.Tensor]]) -> tuple[Any, dict[int, torch.Tensor]]:
    """``work`` in a graph, and the tensors in which a replay leaves its results."""
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            results = work()
    finally:
        torch.cuda.set_stream(before)  # a capture that fails as it ends leaves its own stream the current one
    return graph, results


def test_late_inputs(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    rig.step()
    for seed in range(1, 4):
        work = rig.make(seed)
        rig.late(work)
        work.judge(subject, rig.step())


def test_late_lookup(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    stream = subject.backend.lookup_stream()
    if stream is None:
        subject.not_run("this backend looks rows up in line")
    for seed in range(3):
        work = rig.make(seed)
        rig.fill(work)
        with torch.cuda.stream(stream):  # type: ignore[arg-type]
            sleep()
        work.judge(subject, rig.step())


def test_own_stream(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    stream = new_stream()
    for seed in range(3):
        work = rig.make(seed)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            rig.late(work)
            results = rig.step()
        torch.cuda.current_stream().wait_stream(stream)
        work.judge(subject, results)


def test_changing_streams(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    streams = [new_stream() for _ in range(3)]
    kept = []
    for seed in range(6):
        work, stream = rig.make(seed), streams[seed % 3]
        stream.wait_stream(streams[(seed - 1) % 3])
        with torch.cuda.stream(stream):
            sleep()
            rig.fill(work)
            kept.append((work, rig.step()))
    torch.cuda.synchronize()
    for work, results in kept:
        work.judge(subject, results)


def test_back_to_back(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    works = [rig.make(seed) for seed in range(6)]
    given = [(subject.to(w.tokens), {i: w.states(subject, i) for i in rig.hidden}) for w in works]
    torch.cuda.synchronize()
    sleep()
    kept = []
    for ids, hidden in given:
        rig.batch.input_ids.copy_(ids)
        for layer_id, buffer in rig.hidden.items():
            buffer.copy_(hidden[layer_id])
        kept.append(rig.step())
    torch.cuda.synchronize()
    for work, results in zip(works, kept, strict=True):
        work.judge(subject, results)


def test_no_host_sync(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    if any(layer.table.ids_device != subject.device for layer in rig.memory.layers.values()):
        subject.not_run(f"placement {subject.placement!r} gathers on the CPU here")
    rig.step()
    rig.fill(rig.work)
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # that it is a prototype, an error under -W error
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        results = rig.step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    rig.work.judge(subject, results)


def test_replay(case: Case, subject: Subject) -> None:
    order = case.params.get("order")
    rig = Rig(case, subject, case.params["tokens"])
    rig.memory.warmup([rig.tokens])
    if case.params.get("eager_first"):
        rig.step()
    graph, results = rig.capture(order)
    for seed in range(1, 5):
        work = rig.make(seed)
        if seed == 3:
            rig.late(work)
        else:
            rig.fill(work)
        for out in results.values():
            out.fill_(torch.nan)
        graph.replay()
        work.judge(subject, results)
        if not results:
            torch.cuda.synchronize()
            subject.record.add(0.0, None)


def test_overtaken(case: Case, subject: Subject) -> None:
    first, second = case.params["tokens"]
    rig = Rig(case, subject, second)
    ahead = Rig(case, subject, first, rig.memory)
    rig.memory.warmup([first, second])

    def work() -> dict[int, torch.Tensor]:
        rig.memory.step(ahead.batch).start()
        return rig.step()

    graph, results = captured(work)
    for seed in range(1, 4):
        given = rig.make(seed)
        rig.late(given)
        graph.replay()
        given.judge(subject, results)


def test_two_graphs(case: Case, subject: Subject) -> None:
    memory = subject.memory(model(case.geometry))
    memory.warmup(list(case.params["tokens"]))
    rigs = [Rig(case, subject, tokens, memory) for tokens in case.params["tokens"]]
    graphs = [rig.capture() for rig in rigs]
    for seed in range(4):
        for rig, (graph, results) in zip(rigs, graphs, strict=True):
            work = rig.make(seed)
            rig.fill(work)
            graph.replay()
            work.judge(subject, results)
        eager = Rig(case, subject, 7, memory)
        work = eager.make(seed + 10)
        eager.fill(work)
        work.judge(subject, eager.step())


def test_hot_rows(case: Case, subject: Subject) -> None:
    needs_streams(subject)
    memory = subject.memory(model(case.geometry), placement="host", cache_bytes=1 << 16)
    rig = Rig(case, subject, case.params["tokens"], memory)
    memory.warmup([rig.tokens])
    memory.cache_rows(hot_rows(memory, 0))
    graph, results = rig.capture()
    for seed in range(1, 4):
        memory.cache_rows(hot_rows(memory, seed))
        for layer in memory.layers.values():
            layer.table.cache_hits()
        work = rig.make(seed)
        rig.fill(work)
        graph.replay()
        work.judge(subject, results)
        hits = [layer.table.cache_hits() for layer in memory.layers.values()]
        assert all(0 < served < asked for served, asked in hits), f"hits of the cache: {hits}"
    _replay_reloaded(rig, graph, results)


def test_reloaded(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject, case.params["tokens"])
    rig.memory.warmup([rig.tokens])
    _replay_reloaded(rig, *rig.capture())


def _replay_reloaded(rig: Rig, graph: Any, results: dict[int, torch.Tensor]) -> None:
    case, subject = rig.case, rig.subject
    fresh = model(case.geometry, seed=2)
    for data in (model(case.geometry), fresh):
        for layer_id, layer in rig.memory.layers.items():
            packed, dim = data.layers[layer_id].packed, data.geometry.head_dim
            layer.table.load(subject.to(packed[:, :dim]), subject.to(packed[:, dim:]))
        old = model(case.geometry)
        layers = {i: type(x)(data.layers[i].packed, x.codes, x.scales, x.q, x.k) for i, x in old.layers.items()}
        work = rig.make(5)
        rig.fill(work)
        graph.replay()
        expected = Work(type(old)(old.geometry, layers, old.map_ids), work.tokens, work.hidden)
        expected.judge(subject, results)
