"""EngramMemory: all Engram layers of a model, or of one pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self, Unpack

import torch

from engram_core.backend import EngramBackend
from engram_core.checks import describe
from engram_core.config import EngramConfig
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.hashing import NgramHasher, TokenBatch, TorchHasher, check_token_map, with_lookback
from engram_core.hot import HotRows
from engram_core.layer import Engram
from engram_core.layout import HashLayout
from engram_core.parallel import Parallel
from engram_core.registry import get_backend
from engram_core.shared import barrier
from engram_core.specs import GateWeights, Problem, TableSpec, WkvSpec
from engram_core.step import EngramStep
from engram_core.tokens import TokenMap
from engram_core.weights import load_weights

if TYPE_CHECKING:
    from engram_core.checkpoint.load import MemoryOptions


class EngramMemory:
    """What an engine holds: the hasher, the layers, and the chains that run ahead.

    ``backend``: a name, a backend, or None (``ENGRAM_BACKEND``, or the best for ``device``). ``placement``: where
    tables live ("device", "host", "shared", "file"). ``max_tokens``: the largest batch. ``layer_ids``: those of this
    pipeline stage (default: all). ``table_path``: for "file", a mapping from layer id to file, or one path that holds
    ``{layer_id}``. ``cache_bytes``: device memory for hot rows, a layer. ``prefetch_rows``: the largest batch whose WKV
    runs ahead. ``keep_bf16``: a second, dequantised copy of the WKV weights may be held for speed.

    Gate weights are NaN until they are loaded, so that a forgotten load can't pass for a result.
    Raises :class:`UnsupportedConfigError` with all reasons where the backend can't do this; nothing is allocated.
    """

    # Tensors made in inference mode count no writes, so a table reloaded later would pass for the one looked up before.
    @torch.inference_mode(False)
    def __init__(
        self,
        config: EngramConfig,
        token_map: TokenMap,
        backend: str | EngramBackend | None = None,
        placement: str = "device",
        parallel: Parallel | None = None,
        max_tokens: int = 8192,
        device: torch.device | str | None = None,
        layer_ids: Sequence[int] | None = None,
        table_path: str | Path | Mapping[int, str | Path] | None = None,
        cache_bytes: int = 0,
        prefetch_rows: int = 16,
        keep_bf16: bool = False,
    ) -> None:
        for name, value, least in (("max_tokens", max_tokens, 1), ("prefetch_rows", prefetch_rows, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise InvalidArgumentError(name, describe(value), f"an int of at least {least}")
        check_token_map(config, token_map)
        self.config = config
        self.parallel = Parallel.single() if parallel is None else parallel
        self.max_tokens = max_tokens
        wanted = tuple(config.layer_ids if layer_ids is None else layer_ids)
        if unknown := [i for i in wanted if i not in config.layer_ids]:
            raise InvalidArgumentError(
                "layer_ids", f"{unknown}", f"Engram layers of the model, {list(config.layer_ids)}"
            )
        self.backend = backend if isinstance(backend, EngramBackend) else get_backend(backend, device)
        problem = Problem(config, self.parallel, placement, torch.bfloat16, max_tokens, cache_bytes)
        if reasons := self.backend.supports(problem):
            raise UnsupportedConfigError(f"the backend {self.backend.info.name} can't run this model here", reasons)
        self.layout = HashLayout.from_config(config)
        self.token_map = token_map
        specs = {
            layer_id: TableSpec(
                rows=config.num_embeddings[self.layout.index(layer_id)],
                head_dim=config.head_dim,
                head_sizes=self.layout.head_sizes(self.layout.index(layer_id)),
                placement=placement,
                parallel=self.parallel,
                path=_table_file(table_path, layer_id),
                cache_bytes=cache_bytes,
            )
            for layer_id in wanted
        }
        wkv = WkvSpec(config.wkv_in_features, config.hidden_size, config.hc_mult, self.parallel, keep_bf16=keep_bf16)
        self.hasher = NgramHasher(config, token_map, self.backend)
        self.layers: dict[int, Engram] = {
            layer_id: Engram(
                layer_id,
                self.backend.create_table(spec),
                self.backend.create_wkv(wkv),
                self._gate(),
                self.backend,
                max_tokens,
            )
            for layer_id, spec in specs.items()
        }
        ahead = [layer for layer in self.layers.values() if prefetch_rows and not self.backend.prefetchable(layer)]
        self.prefetch = self.backend.prefetch(ahead, prefetch_rows) if ahead else None
        self.prefetch_rows = prefetch_rows
        self.current_step: EngramStep | None = None
        self.needs_host_ids = any(layer.table.ids_device != self.backend.device for layer in self.layers.values())
        self._host_hasher = TorchHasher(self.layout, token_map, torch.device("cpu"))

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        token_map: TokenMap | None = None,
        *,
        progress: bool = True,
        **options: Unpack[MemoryOptions],
    ) -> Self:
        """A loaded memory of a Hugging Face folder (``config.json``, the index, shards; one ``model.safetensors`` too).

        ``token_map``: default: that of the folder's ``tokenizer.json``. ``progress``: a bar where a terminal shows it.
        ``options``: those of the constructor; for placement "file", ``table_path`` may also be a folder that
        ``engram-core pack`` made. Only the layers asked for are read, of their tables only this rank's rows, in pieces:
        memory beyond the tables and weights stays below 1 GiB.

        Raises :class:`ConfigError`, :class:`CheckpointError` or :class:`TableError` with one line naming file and
        tensor, before anything is allocated, where something is missing, truncated or of a wrong dtype or shape.
        """
        from engram_core.checkpoint.load import load_checkpoint

        return load_checkpoint(cls, path, token_map, progress=progress, **options)

    def _gate(self) -> GateWeights:
        shape = (self.config.hc_mult, self.config.hidden_size)
        q, k = (torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.backend.device) for _ in range(2))
        return GateWeights(q, k, eps=self.config.rms_norm_eps)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load tensors under DeepSeek-V4.1's names and return the names taken; others are left alone.

        May be called several times; a layer's WKV weight and scale must come in one call.
        See :mod:`engram_core.weights` for the names. Of placement "shared" collective: no rank reads a table before its
        node's writer has loaded it.
        """
        taken = load_weights(self.layers, weights)
        if any(layer.table.spec.placement == "shared" for layer in self.layers.values()):
            barrier(self.parallel, self.backend.device)
            for layer in self.layers.values():
                layer.table.settle()
        return taken

    def warmup(self, token_counts: Sequence[int]) -> None:
        """Compile and tune these very batch sizes, before any capture; collective. Needs loaded weights."""
        for count in token_counts:
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.max_tokens:
                raise InvalidArgumentError(
                    "token_counts", describe(count), f"ints from 0 to max_tokens = {self.max_tokens}"
                )
        self.backend.warmup(tuple(self.layers.values()), token_counts)

    def step(
        self,
        batch: TokenBatch,
        token_mask: torch.Tensor | None = None,
        slot_tokens: int | None = None,
        host_ids: torch.Tensor | None = None,
        defer_chains: bool = False,
    ) -> EngramStep:
        """One forward pass over ``batch``: a context in which ``inject`` is called for each decoder layer.

        ``token_mask`` ``[T]`` bool, True: the gate is open; default: every token that is not dead. ``slot_tokens``:
        with tables shared by data-parallel ranks, the largest T among them. ``host_ids``: what :meth:`hash_on_host`
        gave for this batch, ahead of the step; without it a table gathered on the CPU has the batch hashed here.
        ``defer_chains``: WKV chains start where the engine calls :meth:`EngramStep.start_chain`, and not all at once
        with the step: for a decoder that knows where it will leave the device idle.
        """
        return EngramStep(self, batch, token_mask, slot_tokens, host_ids, defer_chains)

    def hash_on_host(self, batch: TokenBatch) -> torch.Tensor:
        """Hash ids ``[T, L, C]`` in CPU memory, from ``batch.host`` (never by reading back), for :meth:`step`.

        A table that is gathered on the CPU needs them; one in host memory that the device reads too is faster with
        them for large batches (:attr:`EngramTable.host_ids_from`), if they were made ahead of the step.
        """
        if not isinstance(batch, TokenBatch):
            raise InvalidArgumentError("batch", describe(batch), "a TokenBatch")
        host = batch if batch.device.type == "cpu" else batch.host
        if host is None:
            raise InvalidArgumentError(
                "batch.host", "None", "the batch in CPU tensors: its hash ids are wanted in CPU memory"
            )
        return self._host_hasher(with_lookback(host, self.layout.max_ngram_size - 1))

    def cache_rows(self, hot: HotRows | str | Path) -> dict[int, int]:
        """Serve the most frequent rows of ``hot`` from device memory, as many a layer as ``cache_bytes`` holds.

        ``hot``: a file that ``engram-core hot-rows`` made, or what was read from it. Replaces what was cached, between
        steps and under captured graphs too; no result changes. Returns the rows kept, by layer. Raises
        :class:`TableError` for counts of another model or tokenizer, or a memory without ``cache_bytes``, and
        :class:`InvalidArgumentError` where a layer was not counted, before anything is replaced. A graph that is
        replayed never looks whether rows were written through ``table.values``: load them by :meth:`load_weights`.
        """
        if not isinstance(hot, (HotRows, str, Path)):
            raise InvalidArgumentError(
                "hot", describe(hot), "HotRows, or the path of a file that engram-core hot-rows made"
            )
        found = hot if isinstance(hot, HotRows) else HotRows.load(hot)
        found.check(self.layout, self.token_map)
        wanted = {layer_id: found.most(layer_id, layer.table.spec.rows) for layer_id, layer in self.layers.items()}
        return {layer_id: self.layers[layer_id].table.cache_rows(ids) for layer_id, ids in wanted.items()}

    def cache_hits(self) -> dict[int, tuple[int, int]]:
        """By layer the rows that the cache served, and all that were served, since the last call; waits for the device.

        Raises :class:`TableError` for a memory without ``cache_bytes``.
        """
        return {layer_id: layer.table.cache_hits() for layer_id, layer in self.layers.items()}


def _table_file(path: str | Path | Mapping[int, str | Path] | None, layer_id: int) -> str | Path | None:
    if path is None:
        return None
    if isinstance(path, Mapping):
        if layer_id not in path:
            raise InvalidArgumentError(
                "table_path", f"files for layers {sorted(path)}", f"one for layer {layer_id} too"
            )
        return path[layer_id]
    if "{layer_id}" not in str(path):
        raise InvalidArgumentError(
            "table_path", repr(str(path)), "a path that holds {layer_id}, or a mapping from layer id to file"
        )
    return str(path).replace("{layer_id}", str(layer_id))
