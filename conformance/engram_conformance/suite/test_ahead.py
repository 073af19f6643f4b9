"""WKV chains started ahead: bit for bit what each layer gives alone, in every order."""

from __future__ import annotations

import torch

from engram_conformance import bridge
from engram_conformance.cases import Case
from engram_conformance.data import model
from engram_conformance.driver import Work, plain, same
from engram_conformance.subject import Subject
from engram_core.backend import Prefetch
from engram_core.memory import EngramMemory

_LIMIT = 16


class Rig:
    """A memory whose chains run ahead, a batch, and what its layers give alone."""

    def __init__(self, case: Case, subject: Subject, seed: int = 0) -> None:
        self.subject = subject
        self.memory: EngramMemory = subject.memory(model(case.geometry), prefetch_rows=_LIMIT)
        assert self.memory.prefetch is not None, "prefetch is declared, and no layer runs ahead"
        self.ahead: Prefetch = self.memory.prefetch
        self.layers = tuple(self.memory.layers.values())
        self.work = self.make(case, seed)
        self.want = plain(subject, self.memory, self.work)

    @staticmethod
    def make(case: Case, seed: int) -> Work:
        return Work.make(model(case.geometry), case.seed + seed, case.params.get("tokens", 9))

    def ids(self, index: int, work: Work | None = None) -> torch.Tensor:
        """Ids of the ``index``-th layer, where its table wants them."""
        return bridge.tensor((work or self.work).ids()[:, index], self.layers[index].table.ids_device, torch.int32)

    def prepare(self, work: Work | None = None) -> None:
        for index, layer in enumerate(self.layers):
            layer.prepare(self.ids(index, work))

    def check(self, ahead: Prefetch) -> None:
        """`forward` of every layer, bit for bit."""
        for index, layer in enumerate(self.layers):
            got = ahead.forward(layer, self.work.states(self.subject, layer.layer_id), self.ids(index))
            self.subject.same(got, self.want[layer.layer_id], f"layer {layer.layer_id}")
        ahead.join()


def test_order(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    for _ in range(2):
        same(subject, rig.work.run(subject, rig.memory, case.params["order"]), rig.want)
    # With nothing left over from a step whose layers were skipped:
    same(subject, plain(subject, rig.memory, rig.work), rig.want)
    rig.work.judge(subject, rig.want)


def test_twice(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    for work in (rig.make(case, 1), rig.work):
        rig.prepare(work)
        rig.ahead.start(9)
    rig.check(rig.ahead)


def test_join(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    rig.prepare()
    rig.ahead.start(9)
    rig.ahead.join()
    for layer in rig.layers:
        assert not rig.ahead.started(layer), "a chain is still started after join"
    rig.check(rig.ahead)


def test_not_started(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    ahead = subject.backend.prefetch(rig.layers[:2], _LIMIT)
    for staged in (0, 1):  # the other of the two is not staged, and the third is none of its layers
        rig.layers[staged].prepare(rig.ids(staged))
        ahead.start(9)
        for index, layer in enumerate(rig.layers):
            assert ahead.started(layer) == (index == staged), f"layer {staged} alone was staged; {index} is judged"
        rig.check(ahead)


def test_refused_argument(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    with rig.memory.step(rig.work.batch(subject.device)) as step:
        for layer_id in rig.memory.layers:
            with subject.raises("hidden_states"):
                step.inject(layer_id, rig.work.states(subject, layer_id).float())
            got = step.inject(layer_id, rig.work.states(subject, layer_id))
            subject.same(got, rig.want[layer_id], f"layer {layer_id}")


def test_limit(case: Case, subject: Subject) -> None:
    rig, tokens = Rig(case, subject), case.params["tokens"]
    rig.prepare()
    rig.ahead.start(tokens)
    for layer in rig.layers:
        started = rig.ahead.started(layer)
        assert started == (tokens <= _LIMIT), f"{tokens} tokens, a limit of {_LIMIT}: started is {started}"
    rig.check(rig.ahead)


def test_deferred(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    for starts in ((), (0,), (2, 0), (1, 1, 2, 0)):
        rig.prepare(rig.make(case, 1))
        rig.ahead.start(9)  # chains that no layer takes
        rig.prepare()
        rig.ahead.defer(9)
        for index in starts:
            rig.ahead.start_layer(rig.layers[index])
            assert rig.ahead.started(rig.layers[index])
        rig.check(rig.ahead)


def test_not_deferred(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    for begin in (rig.ahead.start, rig.ahead.defer):
        rig.prepare(rig.make(case, 1))
        begin(9)
        if begin == rig.ahead.defer:
            rig.ahead.join()
        else:
            for index, layer in enumerate(rig.layers):
                rig.ahead.forward(layer, rig.work.states(subject, layer.layer_id), rig.ids(index))
        rig.prepare()
        for layer in rig.layers:
            rig.ahead.start_layer(layer)
            assert not rig.ahead.started(layer), "a chain was started that was not deferred"
        rig.check(rig.ahead)


def test_deferred_once(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    rig.prepare()
    rig.ahead.defer(9)
    for index, layer in enumerate(rig.layers):
        if index:  # the first is reached without a chain
            rig.ahead.start_layer(layer)
        got = rig.ahead.forward(layer, rig.work.states(subject, layer.layer_id), rig.ids(index))
        subject.same(got, rig.want[layer.layer_id], f"layer {layer.layer_id}")
    rig.prepare()
    for layer in rig.layers:
        rig.ahead.start_layer(layer)
        assert not rig.ahead.started(layer), "a chain was started whose layer had been reached"
    rig.check(rig.ahead)
    rig.prepare()
    rig.ahead.defer(9)
    for work in (rig.make(case, 1), rig.make(case, 2)):  # rows of later batches, which are not the chains'
        for layer in rig.layers:
            rig.ahead.start_layer(layer)
        rig.prepare(work)
    rig.check(rig.ahead)


def test_deferred_limit(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    rig.prepare()
    rig.ahead.defer(case.params["tokens"])
    for layer in rig.layers:
        rig.ahead.start_layer(layer)
        assert not rig.ahead.started(layer), "a chain was started beyond the limit"
    rig.check(rig.ahead)


def test_deferred_step(case: Case, subject: Subject) -> None:
    rig, got = Rig(case, subject), {}
    for _ in range(2):
        with rig.memory.step(rig.work.batch(subject.device), defer_chains=True) as step:
            for index, layer_id in enumerate(rig.memory.layers):
                for named in case.params["starts"].get(index, ()):
                    step.start_chain(named)
                got[layer_id] = step.inject(layer_id, rig.work.states(subject, layer_id))
        same(subject, got, rig.want)


def test_restarted(case: Case, subject: Subject) -> None:
    rig = Rig(case, subject)
    rig.prepare(rig.make(case, 1))
    rig.ahead.start(9)
    rig.layers[0].prepare(rig.ids(0))  # of the second batch this layer alone
    rig.ahead.start(9)
    rig.check(rig.ahead)
    rig.prepare(rig.make(case, 1))
    rig.ahead.start(9)
    rig.prepare()
    rig.ahead.start(_LIMIT + 1)  # beyond the limit: nothing is started, and the first start's chains are not for this
    for layer in rig.layers:
        assert not rig.ahead.started(layer), "a chain of the first start survived the second"
    rig.check(rig.ahead)
