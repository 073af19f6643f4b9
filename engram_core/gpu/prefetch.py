"""WKV chains on a stream of their own, one event a layer, so that an early layer never waits for a late one's chain.

A chain waits for its look-up, joins the ranks' columns (on ``Parallel.ahead``) and projects. All events are recorded
and waited for within one step, and :meth:`SideStreamPrefetch.join` brings every chain back, so a step can be captured
whole. torch.Stream and torch.Event are of whatever kind the device is (CUDA or HIP).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engram_core.backend import Prefetch
from engram_core.kernels.device import on
from engram_core.layer import Engram
from engram_core.prefetch import InlinePrefetch


class SideStreamPrefetch(Prefetch):
    """The rules are :class:`InlinePrefetch`'s, one for each layer; only where the work runs is decided here."""

    def __init__(self, layers: Sequence[Engram], max_rows: int, device: torch.device) -> None:
        """Raises :class:`~engram_core.errors.UnsupportedConfigError` for a layer whose WKV can't run ahead."""
        self._device = device
        self._side = torch.Stream(device=device)
        self._chains = {layer: InlinePrefetch([layer], max_rows) for layer in layers}
        self._events: dict[Engram, torch.Event] = {}

    def start(self, num_tokens: int) -> None:
        """The chains' buffers are free once what the current stream holds by now is done: gates read them there.

        Chains of an earlier start need no wait: these come after them on the same stream, and their events stay until
        they are waited for or replaced.
        """
        with on(self._device):
            self._follow()
            with self._side:
                for layer, chain in self._chains.items():
                    chain.start(num_tokens)
                    self._record(layer, chain)

    def defer(self, num_tokens: int) -> None:
        for chain in self._chains.values():
            chain.defer(num_tokens)

    def start_layer(self, layer: Engram) -> None:
        chain = self._chains.get(layer)
        if chain is None or not chain.deferred(layer):
            return
        with on(self._device):
            self._follow()
            with self._side:
                chain.start_layer(layer)
                self._record(layer, chain)

    def _follow(self) -> None:
        # A look-up waited for the current stream, and a chain waits for it, but for what came before the look-up alone:
        # not for weights loaded since, nor for gates of the step before that were enqueued since.
        self._side.wait_stream(torch.accelerator.current_stream(self._device))

    def _record(self, layer: Engram, chain: InlinePrefetch) -> None:
        if chain.started(layer):
            layer.reading = self._events[layer] = self._side.record_event()

    def started(self, layer: Engram) -> bool:
        chain = self._chains.get(layer)
        return chain is not None and chain.started(layer)

    def wait(self, layer: Engram) -> None:
        event = self._events.pop(layer, None)
        if event is not None:
            torch.accelerator.current_stream(self._device).wait_event(event)
            if layer.reading is event:
                layer.reading = None  # the next look-up waits for the current stream

    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        self.wait(layer)  # nothing where the engine waited already; where it forgot, the result is still right
        chain = self._chains.get(layer)
        if chain is None:
            return layer(hidden_states, hash_ids, token_mask)  # type: ignore[no-any-return]
        return chain.apply(layer, hidden_states, hash_ids, token_mask)

    def join(self) -> None:
        for layer, chain in self._chains.items():
            self.wait(layer)
            chain.join()
