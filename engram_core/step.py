"""EngramStep: one forward pass over the Engram layers of a memory."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import torch

from engram_core.checks import INDEX_DTYPES, check_tensor, describe
from engram_core.errors import InvalidArgumentError, StepError
from engram_core.hashing import TokenBatch
from engram_core.layer import Engram

if TYPE_CHECKING:
    from engram_core.memory import EngramMemory


class EngramStep:
    """One forward pass: hash ids, row look-ups and WKV chains, then the gate of each layer as the decoder reaches it.

    Raises :class:`StepError` if it is used before it starts, after it ends, or after a later step started: buffers are
    the memory's, one step's at a time.
    """

    def __init__(
        self,
        memory: EngramMemory,
        batch: TokenBatch,
        token_mask: torch.Tensor | None = None,
        slot_tokens: int | None = None,
        host_ids: torch.Tensor | None = None,
        defer_chains: bool = False,
    ) -> None:
        if not isinstance(batch, TokenBatch):
            raise InvalidArgumentError("batch", describe(batch), "a TokenBatch")
        if len(batch) > memory.max_tokens:
            raise InvalidArgumentError("batch", f"{len(batch)} tokens", f"at most max_tokens = {memory.max_tokens}")
        if token_mask is not None:
            check_tensor("token_mask", token_mask, (len(batch),), (torch.bool,), memory.backend.device)
        elif batch.dead is not None:
            token_mask = ~batch.dead
        self._memory = memory
        self._batch = batch
        self._slot_tokens = slot_tokens
        if host_ids is not None:
            layout = memory.layout
            shape = (len(batch), len(layout.layer_ids), layout.columns)
            check_tensor("host_ids", host_ids, shape, INDEX_DTYPES, torch.device("cpu"))
        self._host_ids = host_ids
        if not isinstance(defer_chains, bool):
            raise InvalidArgumentError("defer_chains", describe(defer_chains), "a bool")
        self._defer = defer_chains
        self._started = self._ended = False
        self.token_mask = token_mask
        self.hash_ids: dict[int, torch.Tensor] = {}

    def start(self) -> None:
        """Hash the batch, look up every layer's rows, and start (or defer) the WKV chains of a batch small enough.

        Called on entering the context, or instead of that by an engine for which it must be an eager break; such an
        engine calls :meth:`end` when the pass is over.
        """
        memory, batch = self._memory, self._batch
        if self._started:
            raise StepError("start: this step was started already; make a new one for each forward pass")
        on_device = memory.hasher(batch)
        on_host = self._host_ids
        if on_host is None and memory.needs_host_ids:
            on_host = memory.hash_on_host(batch)
        memory.current_step = self
        self._started = True
        for layer_id, layer in memory.layers.items():
            source = on_device if layer.table.ids_device == memory.backend.device else on_host
            assert source is not None  # made above wherever a table needs them
            index = memory.layout.index(layer_id)
            ids = source[:, index]
            host_ids = None if on_host is None or source is on_host else on_host[:, index]
            layer.prepare(ids, self._slot_tokens, host_ids)
            self.hash_ids[layer_id] = ids
        if memory.prefetch is None:
            return
        if self._defer:
            memory.prefetch.defer(len(batch))
        else:
            memory.prefetch.start(len(batch))

    def start_chain(self, layer_id: int | None = None) -> None:
        """Start the deferred chain of this layer, or of the next one, behind what the current stream holds now.

        The next: the lowest layer that was neither reached nor has a chain yet. Nothing where none is left, of a layer
        without Engram, or in a step whose chains started with it. On every rank in the same places. A layer that is
        reached before its chain was started runs in line, with the same bits.
        """
        self._layer(layer_id)
        prefetch = self._memory.prefetch
        if prefetch is None:
            return
        for each, layer in sorted(self._memory.layers.items()):
            if layer_id in (None, each) and not prefetch.started(layer):
                prefetch.start_layer(layer)
                if prefetch.started(layer):
                    return  # else it was reached, it can't run ahead, or the batch is too large: the next one's turn

    def __enter__(self) -> EngramStep:
        if not self._started:
            try:
                self.start()
            except BaseException:
                self.end()  # what did start must not run into the next step, or keep a capture open
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Join every chain and look-up that no layer waited for; after it nothing of the step is in flight."""
        self._ended = True
        memory = self._memory
        if memory.current_step is self:
            memory.current_step = None
            if memory.prefetch is not None:
                memory.prefetch.join()
            for layer in memory.layers.values():
                layer.await_rows()

    def wait(self, layer_id: int) -> None:
        """Make the current stream wait for this layer's chain, if one was started; other layers: nothing."""
        layer = self._layer(layer_id)
        if layer is not None and self._memory.prefetch is not None:
            self._memory.prefetch.wait(layer)

    def apply(self, layer_id: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """The gate of this layer; a layer without Engram returns ``hidden_states`` as it is."""
        layer = self._layer(layer_id)
        if layer is None:
            return hidden_states
        prefetch = self._memory.prefetch
        if prefetch is not None and prefetch.started(layer):
            return prefetch.apply(layer, hidden_states, self.hash_ids[layer_id], self.token_mask)
        staged = layer.staged
        if staged is not None and staged.table_version == layer.table.version:
            return layer.forward_staged(hidden_states, self.token_mask)
        # Its rows were taken or its table reloaded since: look them up again.
        layer.prepare(self.hash_ids[layer_id], self._slot_tokens)
        return layer.forward_staged(hidden_states, self.token_mask)

    def inject(self, layer_id: int, hidden_states: torch.Tensor) -> torch.Tensor:
        """:meth:`wait`, then :meth:`apply`."""
        self.wait(layer_id)
        return self.apply(layer_id, hidden_states)

    def _layer(self, layer_id: int | None) -> Engram | None:
        if self._memory.current_step is not self:
            if self._ended:
                raise StepError("step: it has ended")
            raise StepError(
                "step: a later step overtook it" if self._started else "step: call start() or enter it first"
            )
        return None if layer_id is None else self._memory.layers.get(layer_id)
