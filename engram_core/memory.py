"""EngramMemory: all Engram layers of a model (or of one pipeline stage), and EngramStep, one forward pass over them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, Unpack

import torch

from engram_core.backend import EngramBackend
from engram_core.checks import check_tensor, describe
from engram_core.config import EngramConfig
from engram_core.errors import InvalidArgumentError, StepError, UnsupportedConfigError
from engram_core.hashing import NgramHasher, TokenBatch, TorchHasher, check_token_map, with_lookback
from engram_core.layer import Engram
from engram_core.layout import HashLayout
from engram_core.parallel import Parallel
from engram_core.registry import get_backend
from engram_core.shared import barrier
from engram_core.specs import GateWeights, Problem, TableSpec, WkvSpec
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
        needs_host = any(layer.table.ids_device != self.backend.device for layer in self.layers.values())
        self._host_hasher = TorchHasher(self.layout, token_map, torch.device("cpu")) if needs_host else None

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
        self, batch: TokenBatch, token_mask: torch.Tensor | None = None, slot_tokens: int | None = None
    ) -> EngramStep:
        """One forward pass over ``batch``: a context in which ``inject`` is called for each decoder layer.

        ``token_mask`` ``[T]`` bool, True: the gate is open; default: every token that is not dead. ``slot_tokens``:
        with tables shared by data-parallel ranks, the largest T among them.
        """
        return EngramStep(self, batch, token_mask, slot_tokens)

    def hash_on_host(self, batch: TokenBatch) -> torch.Tensor | None:
        """Hash ids in CPU memory where some table is gathered there, from ``batch.host`` (never by reading back)."""
        if self._host_hasher is None:
            return None
        host = batch if batch.device.type == "cpu" else batch.host
        if host is None:
            raise InvalidArgumentError(
                "batch.host", "None", "the batch in CPU tensors: a table here is gathered on the CPU"
            )
        return self._host_hasher(with_lookback(host, self.layout.max_ngram_size - 1))


class EngramStep:
    """One forward pass: hash ids, row look-ups and WKV chains, then the gate of each layer as the decoder reaches it.

    Raises :class:`StepError` if it is used before it starts, after it ends, or after a later step started: buffers are
    the memory's, one step's at a time.
    """

    def __init__(
        self, memory: EngramMemory, batch: TokenBatch, token_mask: torch.Tensor | None, slot_tokens: int | None
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
        self._started = self._ended = False
        self.token_mask = token_mask
        self.hash_ids: dict[int, torch.Tensor] = {}

    def start(self) -> None:
        """Hash the batch, look up every layer's rows, and start the WKV chains where the batch is small enough.

        Called on entering the context, or instead of that by an engine for which it must be an eager break; such an
        engine calls :meth:`end` when the pass is over.
        """
        memory, batch = self._memory, self._batch
        if self._started:
            raise StepError("start: this step was started already; make a new one for each forward pass")
        on_device = memory.hasher(batch)
        on_host = memory.hash_on_host(batch)
        memory.current_step = self
        self._started = True
        for layer_id, layer in memory.layers.items():
            source = on_device if layer.table.ids_device == memory.backend.device else on_host
            assert source is not None  # hash_on_host gives them wherever a table wants them
            ids = source[:, memory.layout.index(layer_id)]
            layer.prepare(ids, self._slot_tokens)
            self.hash_ids[layer_id] = ids
        if memory.prefetch is not None:
            memory.prefetch.start(len(batch))

    def __enter__(self) -> EngramStep:
        if not self._started:
            self.start()
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

    def _layer(self, layer_id: int) -> Engram | None:
        if self._memory.current_step is not self:
            if self._ended:
                raise StepError("step: it has ended")
            raise StepError(
                "step: a later step overtook it" if self._started else "step: call start() or enter it first"
            )
        return self._memory.layers.get(layer_id)


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
