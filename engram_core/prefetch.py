"""InlinePrefetch: the WKV started ahead on the caller's own stream, for devices without streams.

The semantics are those of every prefetch (docs/contract.md, "Streams, graphs, steps"); only the overlap is missing. A
backend for a device without side streams can return it from its ``prefetch`` hook as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engram_core.backend import Prefetch
from engram_core.checks import check_tensor
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.layer import Engram


@dataclass
class _Chain:
    kv: Any
    num_tokens: int
    wkv_version: int
    table_version: int


class InlinePrefetch(Prefetch):
    """Chains that run where they are started; results lie in one persistent buffer a layer.

    The rules are here: which chains start, which hold, what a refused argument loses. A backend that runs them
    elsewhere overrides :meth:`project` and :meth:`result`, and :meth:`wait` and :meth:`finish` where there is something
    to wait for.
    """

    def __init__(self, layers: Sequence[Engram], max_rows: int) -> None:
        """Raises :class:`UnsupportedConfigError` for a layer whose WKV can't run ahead, with all reasons."""
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 0:
            raise InvalidArgumentError("max_rows", repr(max_rows), "an int of at least 0")
        for layer in layers:
            if reasons := layer.backend.prefetchable(layer):
                raise UnsupportedConfigError(f"prefetch: the WKV of layer {layer.layer_id} can't run ahead", reasons)
        self.max_rows = max_rows
        self._tokens = 0
        self._deferred: set[Engram] = set()
        self._chains: dict[Engram, _Chain] = {}
        self._kv = {
            layer: torch.empty(max_rows, layer.wkv.kv_features, dtype=layer.wkv.spec.dtype, device=layer.backend.device)
            for layer in layers
        }

    def start(self, num_tokens: int) -> None:
        self._begin(num_tokens)
        for layer in self._kv:
            self._start(layer)

    def defer(self, num_tokens: int) -> None:
        self._begin(num_tokens)

    def start_layer(self, layer: Engram) -> None:
        self._start(layer)

    def deferred(self, layer: Engram) -> bool:
        """Whether :meth:`start_layer` may still start this layer's chain: nobody took its rows."""
        return layer in self._deferred and layer.staged is not None

    # What start is made of, and not defer and start_layer: a subclass may make those start everything at once.
    def _begin(self, num_tokens: int) -> None:
        self._chains.clear()
        self._tokens = num_tokens
        self._deferred = set(self._kv) if 0 < num_tokens <= self.max_rows else set()

    def _start(self, layer: Engram) -> None:
        if layer not in self._deferred:
            return
        self._deferred.remove(layer)
        staged = layer.staged
        if staged is None or staged.num_tokens != self._tokens or staged.table_version != layer.table.version:
            return
        rows = layer.take_rows(ahead=True)
        kv = self.project(layer, rows, self._kv[layer][: self._tokens])
        self._chains[layer] = _Chain(kv, self._tokens, layer.wkv.version, layer.table.version)

    def started(self, layer: Engram) -> bool:
        chain = self._chains.get(layer)
        return chain is not None and (chain.wkv_version, chain.table_version) == (
            layer.wkv.version,
            layer.table.version,
        )

    def project(self, layer: Engram, rows: torch.Tensor, out: torch.Tensor) -> Any:
        """Start the projection of whole ``rows`` into ``out`` ``[T, kv_features]``; what :meth:`result` is given."""
        return layer.project(rows, out, ahead=True)

    def result(self, kv: Any) -> torch.Tensor:
        """The ``kv`` that :meth:`project` promised, complete for the current stream."""
        assert isinstance(kv, torch.Tensor)
        return kv

    def promised(self, layer: Engram) -> Any:
        """What :meth:`project` gave for a chain that was :meth:`started`."""
        return self._chains[layer].kv

    def forget(self) -> None:
        """Drop all chains that were started, without waiting for any."""
        self._chains.clear()

    def finish(self, promised: Sequence[Any]) -> None:
        """Return when none of these that no layer took is in flight; nothing where they ran when they were started."""

    def wait(self, layer: Engram) -> None:
        """Nothing to wait for: the chain ran where it was started."""

    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        self._deferred.discard(layer)
        chain = self._chains.get(layer)
        if chain is None or not self.started(layer) or chain.num_tokens != hash_ids.shape[0]:
            self._chains.pop(layer, None)
            return layer(hidden_states, hash_ids, token_mask)  # type: ignore[no-any-return]
        check_tensor("hash_ids", hash_ids, (chain.num_tokens, layer.table.spec.columns), (hash_ids.dtype,))
        out = layer.inject(hidden_states, self.result(chain.kv), chain.num_tokens, token_mask)
        del self._chains[layer]  # kept until here: a refused argument must not lose the chain
        return out

    def join(self) -> None:
        left = [chain.kv for chain in self._chains.values()]
        self._begin(0)
        self.finish(left)
