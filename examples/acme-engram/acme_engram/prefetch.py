"""The WKV ahead of its layer, in a thread: the decoder's own work and the chains run side by side.

One thread for each Prefetch: chains run in the order of their layers, and the first one needed is the first one done.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch

from engram_core.backend import Prefetch
from engram_core.checks import check_tensor, describe
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.layer import Engram


@dataclass
class _Chain:
    kv: Future[torch.Tensor]
    num_tokens: int
    versions: tuple[int, int]


class ThreadPrefetch(Prefetch):
    """Chains of ``layers``, of at most ``max_rows`` tokens, each into a buffer of its own."""

    def __init__(self, layers: Sequence[Engram], max_rows: int) -> None:
        """Raises :class:`UnsupportedConfigError` for a layer whose WKV can't run ahead, with all reasons."""
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 0:
            raise InvalidArgumentError("max_rows", describe(max_rows), "an int of at least 0")
        for layer in layers:
            if reasons := layer.backend.prefetchable(layer):
                raise UnsupportedConfigError(f"prefetch: the WKV of layer {layer.layer_id} can't run ahead", reasons)
        self.max_rows = max_rows
        self._layers = tuple(layers)
        self._chains: dict[Engram, _Chain] = {}
        self._kv = {
            layer: torch.empty(max_rows, layer.wkv.kv_features, dtype=layer.wkv.spec.dtype, device=layer.backend.device)
            for layer in layers
        }
        self._process = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="acme-ahead")

    def start(self, num_tokens: int) -> None:
        self._survive_fork()
        # An earlier step's chain that still runs is before these in the thread's queue: it writes its buffer first.
        self._chains.clear()
        if not 0 < num_tokens <= self.max_rows:
            return
        for layer in self._layers:
            staged = layer.staged
            if staged is None or staged.num_tokens != num_tokens or staged.table_version != layer.table.version:
                continue
            # A copy: the next step may look up into the layer's buffer while this chain still waits for its turn.
            rows = layer.take_rows(ahead=True).clone()
            kv = self._thread.submit(layer.project, rows, self._kv[layer][:num_tokens], ahead=True)
            self._chains[layer] = _Chain(kv, num_tokens, _versions(layer))

    def started(self, layer: Engram) -> bool:
        self._survive_fork()
        chain = self._chains.get(layer)
        return chain is not None and chain.versions == _versions(layer)

    def wait(self, layer: Engram) -> None:
        if self.started(layer):
            self._chains[layer].kv.result()  # raises here what the chain raised there

    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        chain = self._chains.get(layer)
        if chain is None or not self.started(layer) or chain.num_tokens != hash_ids.shape[0]:
            self._chains.pop(layer, None)
            plain: torch.Tensor = layer(hidden_states, hash_ids, token_mask)
            return plain
        check_tensor("hash_ids", hash_ids, (chain.num_tokens, layer.table.spec.columns), (hash_ids.dtype,))
        out = layer.inject(hidden_states, chain.kv.result(), chain.num_tokens, token_mask)
        del self._chains[layer]  # kept until here: a refused argument must not lose the chain
        return out

    def join(self) -> None:
        self._survive_fork()
        chains = [chain.kv for chain in self._chains.values()]
        self._chains.clear()
        wait(chains)
        for chain in chains:
            chain.result()  # a failure is told, even where no layer asked for the result

    def _survive_fork(self) -> None:
        # A forked child has neither its parent's thread nor the results that it would have brought.
        if self._process != os.getpid():
            self._process = os.getpid()
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="acme-ahead")
            self._chains.clear()


def _versions(layer: Engram) -> tuple[int, int]:
    """What a result holds for: the weights and the rows that it was made from."""
    return layer.wkv.version, layer.table.version
