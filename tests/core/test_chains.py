"""WKV chains that run ahead of their layers: which start, when, and that nothing depends on it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import filled

from engram_core import EngramMemory, TokenBatch
from engram_core.backend import Prefetch
from engram_core.errors import InvalidArgumentError, StepError
from engram_core.layer import Engram
from engram_core.prefetch import InlinePrefetch

Hidden = Callable[[int], torch.Tensor]


def batch(tokens: int, seed: int = 0) -> TokenBatch:
    generator = torch.Generator().manual_seed(seed)
    return TokenBatch.single(torch.randint(0, 64, (tokens,), generator=generator))


class AllAtOnce(Prefetch):
    """A backend's own, with the abstract methods alone."""

    def __init__(self, inner: Prefetch) -> None:
        self._inner = inner

    def start(self, num_tokens: int) -> None:
        self._inner.start(num_tokens)

    def started(self, layer: Engram) -> bool:
        return self._inner.started(layer)

    def wait(self, layer: Engram) -> None:
        self._inner.wait(layer)

    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        return self._inner.apply(layer, hidden_states, hash_ids, token_mask)

    def join(self) -> None:
        self._inner.join()


def test_prefetch_runs_plainly_what_was_not_started(memory: EngramMemory, hidden: Hidden) -> None:
    """start, forward and join in every order give what the layer gives alone."""
    prefetch = memory.backend.prefetch(list(memory.layers.values()), 8)
    first, second = memory.layers.values()
    for tokens in (0, 3, 8, 9):
        h, ids = hidden(tokens), memory.hasher(batch(tokens, seed=tokens)).unbind(1)
        expected = [layer(h, i) for layer, i in zip((first, second), ids, strict=True)]
        prefetch.start(tokens)  # nothing is staged
        assert not prefetch.started(first)
        first.prepare(ids[0])
        prefetch.start(tokens)
        assert prefetch.started(first) == (0 < tokens <= 8)
        assert not prefetch.started(second)
        assert torch.equal(prefetch.forward(second, h, ids[1]), expected[1])
        assert torch.equal(prefetch.forward(first, h, ids[0]), expected[0])
        assert torch.equal(prefetch.forward(first, h, ids[0]), expected[0])
        second.prepare(ids[1])
        prefetch.start(tokens)
        prefetch.join()
        assert torch.equal(prefetch.forward(second, h, ids[1]), expected[1])


def test_deferred_chains_start_where_the_engine_says(memory: EngramMemory, hidden: Hidden) -> None:
    given, h = batch(3), hidden(3)
    first, second = memory.layers.values()
    prefetch = memory.prefetch
    assert prefetch is not None
    with memory.step(given) as step:
        step.start_chain()  # all chains started with the step
        expected = [step.inject(layer.layer_id, h) for layer in (first, second)]
    step = memory.step(given, defer_chains=True)
    with pytest.raises(StepError, match=r"call start\(\) or enter it first"):
        step.start_chain()
    with step:
        assert not prefetch.started(first)
        step.start_chain(0)  # no Engram layer
        step.start_chain()
        assert prefetch.started(first)
        assert not prefetch.started(second)
        assert torch.equal(step.inject(first.layer_id, h), expected[0])
        step.start_chain(first.layer_id)  # has been reached
        assert not prefetch.started(first)
        assert torch.equal(step.inject(second.layer_id, h), expected[1])  # in line
        step.start_chain()
        assert not prefetch.started(second)
    with pytest.raises(StepError, match="it has ended"):
        step.start_chain()
    with memory.step(given, defer_chains=True) as step:
        step.start_chain(second.layer_id)
        assert (prefetch.started(first), prefetch.started(second)) == (False, True)
        memory.step(given).start()
        with pytest.raises(StepError, match="a later step overtook it"):
            step.start_chain()


def test_the_next_chain_is_the_lowest_layers(memory: EngramMemory, hidden: Hidden) -> None:
    turned = EngramMemory(
        memory.config, memory.token_map, memory.backend, layer_ids=sorted(memory.layers, reverse=True), max_tokens=8
    )
    filled(turned)
    assert turned.prefetch is not None
    assert list(turned.layers) == [14, 1]
    with turned.step(batch(3), defer_chains=True) as step:
        step.start_chain()
        assert [turned.prefetch.started(turned.layers[i]) for i in (1, 14)] == [True, False]


def test_no_batch_beyond_the_limit_and_no_word_defers(memory: EngramMemory, hidden: Hidden) -> None:
    with memory.step(batch(17), defer_chains=True) as step:
        step.start_chain()
        assert memory.prefetch is not None
        assert not any(memory.prefetch.started(layer) for layer in memory.layers.values())
        step.inject(1, hidden(17))
    with pytest.raises(InvalidArgumentError, match="^defer_chains: got 'no'"):
        memory.step(batch(3), defer_chains="no")  # type: ignore[arg-type]


def test_a_backend_may_opt_out_of_deferring(memory: EngramMemory) -> None:
    class AtOnce(InlinePrefetch):
        def defer(self, num_tokens: int) -> None:
            self.start(num_tokens)

    memory.prefetch = AtOnce(list(memory.layers.values()), 16)
    with memory.step(batch(3), defer_chains=True):
        assert all(memory.prefetch.started(layer) for layer in memory.layers.values())


def test_chains_that_cannot_be_deferred_start_at_once(memory: EngramMemory, hidden: Hidden) -> None:
    given, h, inner = batch(3), hidden(3), memory.prefetch
    assert inner is not None
    with memory.step(given) as step:
        expected = {i: step.inject(i, h) for i in memory.layers}
    memory.prefetch = AllAtOnce(inner)
    with memory.step(given, defer_chains=True) as step:
        assert all(memory.prefetch.started(layer) for layer in memory.layers.values())
        step.start_chain()
        for layer_id in memory.layers:
            assert torch.equal(step.inject(layer_id, h), expected[layer_id])
