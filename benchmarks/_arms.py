"""The memories that ``step.py`` compares: one geometry, tables filled once and shared, knobs by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final, Literal

import torch

from engram_core import EngramConfig, EngramMemory, Parallel, TableSpec, TokenBatch, TokenMap
from engram_core.backend import EngramBackend
from engram_core.layout import table_rows
from engram_core.shared import available_memory
from engram_core.synthetic import Synthetic
from engram_core.table import EngramTable

BACKENDS: Final = {"reference": "ReferenceBackend", "nvidia": "NvidiaBackend", "rocm": "RocmBackend"}
_BLOCK: Final = 2**20


@dataclass(frozen=True)
class Variant:
    """A way of running Engram. ``chains``, ``decoder``: stream priorities, lower runs first, 0 is the lowest.

    ``deferred``: where the decoder starts chains: at each of its waits, or the last of a layer; None: all at once.
    """

    what: str
    ahead: bool = True
    chains: int = 0
    decoder: int = 0
    one_stream: bool = False
    keep_bf16: bool = False
    deferred: Literal["each", "last"] | None = None


VARIANTS: Final = {
    "inline": Variant("prefetch_rows=0: look-ups on their own stream, WKV in line", ahead=False),
    "ahead": Variant("as EngramMemory does it"),
    "high": Variant("look-ups and chains on streams of high priority", chains=-1),
    "low": Variant("the decoder on a stream of high priority, so that look-ups and chains yield", decoder=-1),
    "one": Variant("look-ups and chains on one stream", one_stream=True),
    "bf16": Variant("keep_bf16", keep_bf16=True),
    "deferred": Variant("a chain started at each wait of the decoder (`defer_chains`)", deferred="each"),
    "last": Variant("a chain started at the last wait of each layer", deferred="last"),
}


class FakeRanks:
    """Rank 0 of ``size`` tensor ranks in one process: a gather copies this rank's part for each of them.

    Left out: the links, the others' lateness, and the kernels of a real collective; ``wait`` stands for its latency.
    """

    rank = 0

    def __init__(self, size: int, wait: Callable[[], None]) -> None:
        self.size = size
        self._wait = wait

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self._wait()
        return torch.cat([x] * self.size, dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x


def parallel(ranks: int, wait: Callable[[], None]) -> Parallel:
    """``ranks`` tensor ranks, of which this process is the first."""
    return Parallel.single() if ranks == 1 else Parallel(FakeRanks(ranks, wait), ahead=FakeRanks(ranks, wait))


def config(vocab_size: int | None, tiny: bool, host: bool) -> EngramConfig:
    """The published geometry, tables scaled to ``vocab_size`` and to the host memory that is free; or a tiny one."""
    if tiny:
        sizes: dict[str, Any] = {"vocab_size": 101, "layer_ids": (1, 3), "max_ngram_size": 3, "n_heads": 8}
        return EngramConfig(
            hidden_size=256, hc_mult=4, head_dim=32, compressed_vocab_size=512, pad_token_id=2, rms_norm_eps=1e-20,
            num_embeddings=table_rows(**sizes), **sizes,
        )  # fmt: skip
    base = 2_000_000 if vocab_size is None else vocab_size
    if host:
        base = min(base, int(0.8 * available_memory() / (2 * 24 * 264)))
    return EngramConfig.deepseek_v41(vocab_size=base)


def checkpoint(config: EngramConfig) -> list[tuple[str, torch.Tensor]]:
    """WKV and gate of every layer, whole, under the checkpoint's names."""
    made = Synthetic(config)
    return [named for layer_id in config.layer_ids for named in made.tensors(layer_id)]


class Inputs:
    """Static buffers of a decode step: one token a request, each with its own lookback."""

    def __init__(self, tokens: int, config: EngramConfig, device: torch.device) -> None:
        self._vocabulary = config.compressed_vocab_size
        width = config.max_ngram_size - 1
        self.batch = TokenBatch(
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=torch.full((tokens,), 100, dtype=torch.int64, device=device),
            query_start=torch.arange(tokens + 1, dtype=torch.int64, device=device),
            lookback=torch.zeros(tokens, width, dtype=torch.int64, device=device),
        )
        shape = (tokens, config.hc_mult, config.hidden_size)
        self.hidden = torch.randn(shape, dtype=torch.bfloat16, device=device)
        self.renew()

    def renew(self) -> None:
        """Other tokens in the same buffers: no row of the last step is wanted again."""
        self.batch.input_ids.random_(0, self._vocabulary)
        self.batch.lookback.random_(0, self._vocabulary)


class Arms:
    """Memories on tables that are filled once; ``ranks``: of how many the memories are the first."""

    def __init__(
        self,
        config: EngramConfig,
        weights: list[tuple[str, torch.Tensor]],
        backend: str,
        device: torch.device,
        placement: str,
        ranks: Parallel,
        tokens: int,
    ) -> None:
        self._config, self._name, self._device, self._placement = config, backend, device, placement
        self._weights, self._ranks, self._tokens = weights, ranks, tokens
        self._tables: dict[int, EngramTable] = {}

    @property
    def table_bytes(self) -> int:
        """Of all tables, as held here."""
        return sum(table.packed.nbytes for table in self._tables.values())

    def memory(self, variant: Variant) -> EngramMemory:
        """A loaded memory, its streams as the variant wants them."""
        made = EngramMemory(
            self._config,
            TokenMap.identity(self._config.compressed_vocab_size, self._config.pad_token_id),
            self._backend(),
            self._placement,
            self._ranks,
            max_tokens=self._tokens,
            prefetch_rows=self._tokens if variant.ahead else 0,
            keep_bf16=variant.keep_bf16,
        )
        made.load_weights(self._weights)
        if variant.chains:
            for holder in (made.backend, made.prefetch):
                _set_stream(holder, torch.Stream(device=self._device, priority=variant.chains))
        if variant.one_stream:
            _set_stream(made.backend, made.prefetch._side)  # type: ignore[union-attr]
        return made

    def _backend(self) -> EngramBackend:
        base: Any = getattr(import_module(f"engram_{self._name}.backend"), BACKENDS[self._name])
        tables = self._tables

        class Sharing(base):  # type: ignore[misc]
            def create_table(self, spec: TableSpec) -> EngramTable:
                if spec.rows not in tables:  # every layer has another number of rows
                    tables[spec.rows] = super().create_table(spec)
                    fill(tables[spec.rows].packed, self.device)
                return tables[spec.rows]

        made: EngramBackend = Sharing(self._device)
        return made


def fill(packed: torch.Tensor, device: torch.device) -> None:
    """Random finite rows of order 1: one block made on the device, copied on and on (to page-locked memory by DMA)."""
    rows, width = packed.shape
    dim = width * 32 // 33
    block = torch.randint(0, 256, (min(rows, _BLOCK), width), dtype=torch.uint8, device=device)
    block -= ((block & 0x7F) == 0x7F).to(torch.uint8)  # NaN
    block[:, dim:] = torch.randint(119, 122, (block.shape[0], width - dim), dtype=torch.uint8, device=device)
    for start in range(0, rows, _BLOCK):
        part = packed[start : start + _BLOCK]
        part.copy_(block[: part.shape[0]])


def _set_stream(holder: Any, stream: torch.Stream) -> None:
    if not isinstance(getattr(holder, "_side", None), torch.Stream):
        raise SystemExit(f"step: {type(holder).__name__} has no side stream whose priority could be set")
    holder._side = stream
