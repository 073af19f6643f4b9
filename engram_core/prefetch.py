"""InlinePrefetch: the WKV started ahead on the caller's own stream, for devices without streams.

The semantics are those of every prefetch (docs/contract.md, "Streams, graphs, steps"); only the overlap is missing. A
backend for a device without side streams can return it from its ``prefetch`` hook as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engram_core.backend import Prefetch
from engram_core.checks import check_tensor
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.layer import Engram


@dataclass
class _Chain:
    kv: torch.Tensor
    num_tokens: int
    wkv_version: int
    table_version: int


class InlinePrefetch(Prefetch):
    """Chains that run where they are started; results lie in one persistent buffer a layer."""

    def __init__(self, layers: Sequence[Engram], max_rows: int) -> None:
        """Raises :class:`UnsupportedConfigError` for a layer whose WKV can't run ahead, with all reasons."""
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 0:
            raise InvalidArgumentError("max_rows", repr(max_rows), "an int of at least 0")
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

    def start(self, num_tokens: int) -> None:
        self._chains.clear()
        if not 0 < num_tokens <= self.max_rows:
            return
        for layer in self._layers:
            staged = layer.staged
            if staged is None or staged.num_tokens != num_tokens or staged.table_version != layer.table.version:
                continue
            rows = layer.take_rows(ahead=True)
            kv = layer.project(rows, self._kv[layer][:num_tokens], ahead=True)
            self._chains[layer] = _Chain(kv, num_tokens, layer.wkv.version, layer.table.version)

    def started(self, layer: Engram) -> bool:
        chain = self._chains.get(layer)
        return chain is not None and (chain.wkv_version, chain.table_version) == (
            layer.wkv.version,
            layer.table.version,
        )

    def wait(self, layer: Engram) -> None:
        """Nothing to wait for: the chain ran where it was started."""

    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        chain = self._chains.get(layer)
        if chain is None or not self.started(layer) or chain.num_tokens != hash_ids.shape[0]:
            self._chains.pop(layer, None)
            return layer(hidden_states, hash_ids, token_mask)  # type: ignore[no-any-return]
        check_tensor("hash_ids", hash_ids, (chain.num_tokens, layer.table.spec.columns), (hash_ids.dtype,))
        out = layer.inject(hidden_states, chain.kv, chain.num_tokens, token_mask)
        del self._chains[layer]  # kept until here: a refused argument must not lose the chain
        return out

    def join(self) -> None:
        self._chains.clear()
