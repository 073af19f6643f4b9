"""WKV chains on a stream of their own, one event a layer, so that the first layer never waits for the last one's.

A chain is: wait for the look-up, join the ranks' columns (on ``Parallel.ahead``), project. The gate is not in it: its
exchange belongs to the decoder's stream. Every event is recorded and waited for within one step, so a step can be
captured in a graph; :meth:`StreamPrefetch.join` brings back every chain before the capture ends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engram_core.backend import Prefetch
from engram_core.layer import Engram
from engram_core.prefetch import InlinePrefetch
from engram_rocm.arch import on


class StreamPrefetch(Prefetch):
    """One :class:`InlinePrefetch` a layer, whose rules it keeps, run on a side stream."""

    def __init__(self, layers: Sequence[Engram], max_rows: int, device: torch.device) -> None:
        """Raises :class:`~engram_core.errors.UnsupportedConfigError` for a layer whose WKV can't run ahead."""
        self._chains = {layer: InlinePrefetch([layer], max_rows) for layer in layers}
        self._device = device
        self._stream = torch.Stream(device=device)
        self._done: dict[Engram, torch.Event] = {}

    def start(self, num_tokens: int) -> None:
        """Nothing of a chain starts before what the current stream holds by now: earlier gates read its buffers."""
        self.join()
        with on(self._device):
            self._stream.wait_stream(torch.accelerator.current_stream(self._device))
            with self._stream:
                for layer, chain in self._chains.items():
                    chain.start(num_tokens)
                    if chain.started(layer):
                        self._done[layer] = self._stream.record_event()

    def started(self, layer: Engram) -> bool:
        chain = self._chains.get(layer)
        return chain is not None and chain.started(layer)

    def wait(self, layer: Engram) -> None:
        done = self._done.pop(layer, None)
        if done is not None:
            torch.accelerator.current_stream(self._device).wait_event(done)

    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        self.wait(layer)  # where the engine waited, this is nothing; where it forgot, the result is still right
        chain = self._chains.get(layer)
        if chain is None:
            return layer(hidden_states, hash_ids, token_mask)  # type: ignore[no-any-return]
        return chain.apply(layer, hidden_states, hash_ids, token_mask)

    def join(self) -> None:
        for layer, chain in self._chains.items():
            self.wait(layer)
            chain.join()
