"""acme's thread: chains run beside the caller, in order, and nothing that happens meanwhile changes a result."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from acme_engram.prefetch import ThreadPrefetch
from models import weights

from engram_core import Engram, EngramMemory, TokenBatch

Hidden = Callable[[int], torch.Tensor]


@pytest.fixture
def ids(memory: EngramMemory) -> torch.Tensor:
    return memory.hasher(TokenBatch.single(torch.arange(9) * 7 % 60))


@pytest.fixture
def layers(memory: EngramMemory) -> list[Engram]:
    return list(memory.layers.values())


class Held:
    """Holds every projection until :meth:`release`, and notes in which order and thread they ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go, self.begun = threading.Event(), threading.Event()
        self.ran: list[tuple[int, str]] = []
        project = Engram.project

        def held(layer: Engram, *args: Any, **options: Any) -> torch.Tensor:
            self.ran.append((layer.layer_id, threading.current_thread().name))
            if threading.current_thread() is not threading.main_thread():
                self.begun.set()
                assert self.go.wait(30)
            return project(layer, *args, **options)

        monkeypatch.setattr(Engram, "project", held)


def prepare(layers: list[Engram], ids: torch.Tensor) -> None:
    for index, layer in enumerate(layers):
        layer.prepare(ids[:, index])


def test_chains_run_in_another_thread_in_the_order_of_the_layers(
    layers: list[Engram], ids: torch.Tensor, hidden: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = [layer(hidden(9), ids[:, i]) for i, layer in enumerate(layers)]
    held = Held(monkeypatch)
    prefetch = ThreadPrefetch(layers, 16)
    prepare(layers, ids)
    prefetch.start(9)  # returns while the first chain is held: it is not run here
    assert held.begun.wait(30)
    assert all(prefetch.started(layer) for layer in layers)
    assert [layer for layer, _ in held.ran] == [layers[0].layer_id]
    held.go.set()
    found = [prefetch.forward(layer, hidden(9), ids[:, i]) for i, layer in enumerate(layers)]
    assert [layer for layer, _ in held.ran] == [layer.layer_id for layer in layers]
    assert all(name.startswith("acme-ahead") for _, name in held.ran)
    for got, plain in zip(found, want, strict=True):
        assert torch.equal(got.view(torch.int16), plain.view(torch.int16))


def test_rows_looked_up_meanwhile_do_not_reach_a_chain_in_flight(
    layers: list[Engram], ids: torch.Tensor, hidden: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = layers[0](hidden(9), ids[:, 0])
    held = Held(monkeypatch)
    prefetch = ThreadPrefetch(layers, 16)
    prepare(layers, ids)
    prefetch.start(9)
    prepare(layers, ids.flip(0))
    held.go.set()
    got = prefetch.forward(layers[0], hidden(9), ids[:, 0])
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    prefetch.join()


def test_a_second_step_overtakes_a_chain_in_flight(
    layers: list[Engram], ids: torch.Tensor, hidden: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = ids.flip(0)
    want = layers[1](hidden(9), later[:, 1])
    held = Held(monkeypatch)
    prefetch = ThreadPrefetch(layers, 16)
    for each in (ids, later):
        prepare(layers, each)
        prefetch.start(9)
    held.go.set()
    got = prefetch.forward(layers[1], hidden(9), later[:, 1])
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    prefetch.join()


def test_weights_reloaded_meanwhile_count(
    memory: EngramMemory, layers: list[Engram], ids: torch.Tensor, hidden: Hidden, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    prefetch = ThreadPrefetch(layers, 16)
    prepare(layers, ids)
    prefetch.start(9)
    assert held.begun.wait(30)
    memory.load_weights((name, tensor) for name, tensor in weights(memory.config, seed=5).items() if "wkv" in name)
    assert not any(prefetch.started(layer) for layer in layers)
    held.go.set()
    for i, layer in enumerate(layers):
        got = prefetch.forward(layer, hidden(9), ids[:, i])
        assert torch.equal(got.view(torch.int16), layer(hidden(9), ids[:, i]).view(torch.int16))
    prefetch.join()


def test_a_failure_in_the_thread_is_raised_where_it_is_waited_for(
    layers: list[Engram], ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Engram, "project", fail)
    prefetch = ThreadPrefetch(layers, 16)
    for finish in (lambda: prefetch.wait(layers[1]), prefetch.join):
        prepare(layers, ids)
        prefetch.start(9)
        with pytest.raises(RuntimeError, match="out of memory"):
            finish()
    prefetch.join()  # nothing is left to tell


def _in_a_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` is fine in a forked child."""
    child = os.fork()
    if child == 0:
        try:
            fine = work()
        except BaseException:
            fine = False
        os._exit(0 if fine else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("asks", [True, False])
def test_a_forked_child_runs_its_own_thread(
    layers: list[Engram], ids: torch.Tensor, hidden: Hidden, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    want = layers[0](hidden(9), ids[:, 0])
    held = Held(monkeypatch)
    prefetch = ThreadPrefetch(layers, 16)
    prepare(layers, ids)
    prefetch.start(9)
    assert held.begun.wait(30)

    def child() -> bool:
        held.go.set()
        fine = not asks or not prefetch.started(layers[0])  # the parent's chain is not the child's
        prepare(layers, ids)
        prefetch.start(9)
        fine = fine and all(prefetch.started(layer) for layer in layers)
        got = prefetch.forward(layers[0], hidden(9), ids[:, 0])
        prefetch.join()
        return fine and torch.equal(got.view(torch.int16), want.view(torch.int16))

    fine = _in_a_child(child)
    held.go.set()
    prefetch.join()
    assert fine


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_chains_deferred_before_a_fork_are_started_after_it(
    layers: list[Engram], ids: torch.Tensor, hidden: Hidden
) -> None:
    want = [layer(hidden(9), ids[:, i]) for i, layer in enumerate(layers)]
    prefetch = ThreadPrefetch(layers, 16)
    prepare(layers, ids)
    prefetch.start(9)  # so that the parent's thread exists
    prefetch.join()
    prepare(layers, ids)
    prefetch.defer(9)

    def child() -> bool:
        for layer in layers:
            prefetch.start_layer(layer)
        fine = all(prefetch.started(layer) for layer in layers)
        got = [prefetch.forward(layer, hidden(9), ids[:, i]) for i, layer in enumerate(layers)]
        prefetch.join()
        same = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(got, want, strict=True)]
        return fine and all(same)

    assert _in_a_child(child)


def test_a_step_of_the_memory_takes_the_chains(memory: EngramMemory, hidden: Hidden) -> None:
    batch = TokenBatch.single(torch.arange(12))
    with memory.step(batch) as step:
        assert isinstance(memory.prefetch, ThreadPrefetch)
        assert all(memory.prefetch.started(layer) for layer in memory.layers.values())
        got = [step.inject(layer_id, hidden(12)) for layer_id in memory.layers]
    plain = [layer(hidden(12), step.hash_ids[layer_id], None) for layer_id, layer in memory.layers.items()]
    for a, b in zip(got, plain, strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
