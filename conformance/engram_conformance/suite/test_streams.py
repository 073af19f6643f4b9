"""Each wait of the chain by itself: what it waits for is late, and what would be read too early is another batch's."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from engram_conformance import bridge
from engram_conformance.cases import Case
from engram_conformance.data import Model, model
from engram_conformance.delays import Delay, Watch, new_stream, race
from engram_conformance.driver import Work, hot_rows, plain, same
from engram_conformance.subject import Subject
from engram_core.backend import Prefetch
from engram_core.layer import Engram

_JUDGED = 64
_MOST_TOKENS = 8192


class Rig:
    """A memory, whose streams are new ones, and three batches whose inputs lie ready, host ids among them.

    The third was run through all its buffers: what is read too early are that one's rows, and its projection.
    """

    def __init__(self, case: Case, subject: Subject, folder: Path) -> None:
        p, data = case.params, model(case.geometry)
        self.subject = subject
        watch = Watch(subject)
        options = {name: p[name] for name in ("placement", "cache_bytes") if name in p}
        if options.get("placement") == "file":
            options["table_path"] = str(folder / "{layer_id}.rows")
            for layer_id, layer in data.layers.items():
                file = folder / f"{layer_id}.rows"
                if not file.exists():  # an earlier round's memory still maps it
                    file.write_bytes(layer.packed.tobytes())
        by_host = p.get("host_ids", False)
        self.memory = subject.memory(data, max_tokens=_MOST_TOKENS if by_host else 64, **options)
        self.layers: tuple[Engram, ...] = tuple(self.memory.layers.values())
        self.lookups = subject.backend.lookup_stream()
        tokens = p["tokens"]
        if by_host:  # the table's own word from where on it takes them
            tokens = min(_MOST_TOKENS, max(tokens, *(layer.table.host_ids_from or 0 for layer in self.layers)))
        self.works = _works(case.geometry, case.seed, tokens)
        self.batches = [work.batch(subject.device) for work in self.works]
        self.hidden = [{i: work.states(subject, i) for i in self.memory.layers} for work in self.works]
        self.on_host = [bridge.tensor(work.ids(), "cpu", torch.int32) for work in self.works]
        self.on_device = [ids.to(subject.device) for ids in self.on_host]
        self.by_host = by_host
        self.deferred = p.get("deferred", False)
        self.step(2)
        subject.synchronize()
        self.own = watch.streams(but=[self.lookups])
        """Streams that the memory made, the look-ups' not among them."""

    @property
    def ahead(self) -> Prefetch:
        """What runs the chains."""
        assert self.memory.prefetch is not None, "prefetch is declared, and no layer runs ahead"
        return self.memory.prefetch

    def ids(self, n: int, layer: Engram) -> torch.Tensor:
        """Ids of a batch for a layer, where its table wants them."""
        there = layer.table.ids_device == self.subject.device
        return (self.on_device if there else self.on_host)[n][:, self._index(layer)]

    def prepare(self, n: int) -> None:
        for layer in self.layers:
            there = layer.table.ids_device == self.subject.device
            layer.prepare(self.ids(n, layer), None, self.on_host[n][:, self._index(layer)] if there else None)

    def plain(self, n: int) -> dict[int, torch.Tensor]:
        """Every layer, on the rows that were looked up."""
        return {layer.layer_id: layer.forward_staged(self.hidden[n][layer.layer_id]) for layer in self.layers}

    def apply(self, n: int) -> dict[int, torch.Tensor]:
        """Every layer, on the chain that was started."""
        return {
            layer.layer_id: self.ahead.apply(layer, self.hidden[n][layer.layer_id], self.ids(n, layer), None)
            for layer in self.layers
        }

    def step(self, n: int, wait: bool = True) -> dict[int, torch.Tensor]:
        results = {}
        host_ids = self.on_host[n] if self.by_host else None
        with self.memory.step(self.batches[n], host_ids=host_ids, defer_chains=self.deferred) as step:
            for _ in self.layers:
                step.start_chain()
            for layer_id in self.memory.layers:
                results[layer_id] = (step.inject if wait else step.apply)(layer_id, self.hidden[n][layer_id])
        return results

    def start(self, before: Callable[[], object] = lambda: None) -> None:
        """Start all chains; ``before``: enqueued before that, but after chains that wait were deferred."""
        tokens = len(self.batches[0])
        if self.deferred:
            self.ahead.defer(tokens)
        before()
        if not self.deferred:
            self.ahead.start(tokens)
        for layer in self.layers:
            self.ahead.start_layer(layer)

    def in_turn(self) -> Callable[[], None]:
        """Take the chains of the first batch, start the second's and take those; judges both, later."""
        first = self.apply(0)
        self.start()
        second = self.apply(1)
        self.ahead.join()
        return self.both(first, second)

    def judge(self, n: int, results: dict[int, torch.Tensor]) -> None:
        judge(self.subject, self.works[n], results, f" of batch {n}")

    def both(self, first: dict[int, torch.Tensor], second: dict[int, torch.Tensor]) -> Callable[[], None]:
        """Judges two batches, later."""

        def judged() -> None:
            self.judge(0, first)
            self.judge(1, second)

        return judged

    def _index(self, layer: Engram) -> int:
        return self.memory.layout.index(layer.layer_id)


@lru_cache(maxsize=8)
def _works(geometry: str, seed: int, tokens: int) -> list[Work]:
    return [Work.make(model(geometry), seed + n, tokens) for n in range(3)]


def judge(subject: Subject, work: Work, results: dict[int, torch.Tensor], who: str) -> None:
    """Against the oracle; of many tokens some from all over, since it takes its time."""
    some = slice(None, None, max(1, len(work.tokens) // _JUDGED))
    work.judge(subject, {layer_id: result[some] for layer_id, result in results.items()}, some, who)


def test_late_streams(case: Case, subject: Subject, tmp_path: Path) -> None:
    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        if not rig.own:
            subject.not_run("this memory made no stream of its own")
        delay(*rig.own)
        results = rig.step(0, case.params.get("wait", True))
        return lambda: rig.judge(0, results)

    race(subject, attempt)


def test_rows_in_use(case: Case, subject: Subject, tmp_path: Path) -> None:
    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        if case.params["first"] == "prepare":
            rig.prepare(0)
            delay()
        else:
            delay()
            rig.prepare(0)
        first = rig.plain(0)
        rig.prepare(1)
        return rig.both(first, rig.plain(1))

    race(subject, attempt)


def test_freed_ids(case: Case, subject: Subject, tmp_path: Path) -> None:
    tokens = case.params["tokens"]

    def home() -> torch.Tensor:
        # A multiple of 2 MiB, so that the allocator gives the very memory that was freed to the next of this size.
        return torch.empty(tokens, 1 << 18, dtype=torch.int64, device=subject.device)

    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        layer = rig.layers[0]
        if layer.table.ids_device != subject.device:
            subject.not_run(f"placement {subject.placement!r} takes its ids in CPU memory here")
        given, others = rig.ids(0, layer), rig.ids(1, layer)
        columns = given.shape[1]
        ids = home()
        ids[:, :columns].copy_(given)
        subject.synchronize()
        if rig.lookups is not None:
            delay(rig.lookups)
        layer.prepare(ids[:, :columns])
        del ids
        for reused in [home() for _ in range(4)]:
            reused[:, :columns].copy_(others)
        results = {layer.layer_id: layer.forward_staged(rig.hidden[0][layer.layer_id])}
        return lambda: rig.judge(0, results)

    race(subject, attempt)


def test_late_weights(case: Case, subject: Subject, tmp_path: Path) -> None:

    def weights(data: Model) -> list[torch.Tensor]:
        # Any will do: bf16 weights of the size of the model's.
        return [subject.to(layer.codes).to(torch.bfloat16).sub_(128).mul_(2**-12) for layer in data.layers.values()]

    old, new = weights(model(case.geometry)), weights(model(case.geometry, seed=2))

    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)

        def load(given: list[torch.Tensor]) -> None:
            for layer, weight in zip(rig.layers, given, strict=True):
                layer.wkv.load(weight)

        load(new)
        want = plain(subject, rig.memory, rig.works[0])
        load(old)
        rig.step(2)
        subject.synchronize()
        rig.prepare(0)
        rig.start(before=lambda: (delay(), load(new)))
        for layer in rig.layers:
            rig.ahead.wait(layer)
        results = rig.apply(0)
        rig.ahead.join()
        return lambda: same(subject, results, want)

    race(subject, attempt)


def test_late_gate(case: Case, subject: Subject, tmp_path: Path) -> None:
    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        rig.prepare(0)
        rig.start()
        for layer in rig.layers:
            rig.ahead.wait(layer)
        rig.prepare(1)
        delay()
        return rig.in_turn()

    race(subject, attempt)


def test_next_lookup(case: Case, subject: Subject, tmp_path: Path) -> None:
    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        rig.prepare(0)
        if rig.own:
            delay(*rig.own)
        rig.start()
        rig.prepare(1)
        return rig.in_turn()

    race(subject, attempt)


def test_reload(case: Case, subject: Subject, tmp_path: Path) -> None:
    before, after = model(case.geometry), model(case.geometry, seed=2)
    dim = before.geometry.head_dim

    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        packed = {i: torch.from_numpy(after.layers[i].packed) for i in rig.memory.layers}
        delay(*([] if rig.lookups is None else [rig.lookups]))
        first = rig.step(0)
        for layer in rig.layers:
            rows = packed[layer.layer_id]
            layer.table.load(rows[:, :dim], rows[:, dim:])
        second = rig.step(1)

        def judged() -> None:
            rig.judge(0, first)
            work = rig.works[1]
            layers = {i: type(x)(after.layers[i].packed, x.codes, x.scales, x.q, x.k) for i, x in before.layers.items()}
            reloaded = Work(Model(before.geometry, layers, before.map_ids), work.tokens, work.hidden)
            judge(subject, reloaded, second, " after the reload")

        return judged

    race(subject, attempt, rounds=1)  # the host may wait for the device: then no delay is long enough


def test_hits(case: Case, subject: Subject, tmp_path: Path) -> None:
    def attempt(delay: Delay) -> Callable[[], None]:
        rig = Rig(case, subject, tmp_path)
        rig.memory.cache_rows(hot_rows(rig.memory, 0))
        for layer in rig.layers:
            layer.table.cache_hits()
        stream = new_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            delay()
            results = rig.step(0)
        hits = [layer.table.cache_hits() for layer in rig.layers]

        def judged() -> None:
            rig.judge(0, results)
            asked = [case.params["tokens"] * layer.table.spec.columns for layer in rig.layers]
            assert [all_of_them for _, all_of_them in hits] == asked, f"hits of the cache: {hits}; asked for {asked}"

        return judged

    race(subject, attempt, rounds=1)  # the host waits for the device
