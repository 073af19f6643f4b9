"""How much memory a model's Engram layers need, by placement and rank count: plain arithmetic, nothing is allocated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engram_core.exchange import Shard
from engram_core.formats import packed_width
from engram_core.layout import HashLayout
from engram_core.parallel import Parallel

if TYPE_CHECKING:
    import torch

    from engram_core.checkpoint.layers import LayerTensors
    from engram_core.config import EngramConfig


@dataclass(frozen=True)
class Need:
    """Bytes of tables with ``ranks`` tensor ranks on one node; ``placement``: as of :class:`EngramMemory`.

    ``device``: on each device (the largest rank's part); ``host``: in the node's memory; ``file``: mapped from disk,
    of which the page cache keeps what it can.
    """

    placement: str
    ranks: int
    device: int
    host: int
    file: int


def table_needs(config: EngramConfig, layer_ids: Iterable[int], ranks: Sequence[int] = (1, 2, 4, 8)) -> list[Need]:
    """What the tables of these layers need, for each placement and each rank count."""
    layout = HashLayout.from_config(config)
    width = packed_width(config.head_dim)
    indices = [layout.index(layer_id) for layer_id in layer_ids]
    whole = sum(config.num_embeddings[index] for index in indices) * width
    found = []
    for count in ranks:
        parts = [
            sum(
                Shard.plan(config.num_embeddings[i], layout.head_sizes(i), Parallel(_Place(rank, count))).rows
                for i in indices
            )
            for rank in range(count)
        ]
        found.append(Need("device", count, max(parts) * width, 0, 0))
        found.append(Need("host", count, 0, sum(parts) * width, 0))
        found.append(Need("shared", count, 0, whole, 0))
        found.append(Need("file", count, 0, 0, whole))
    return found


def weight_bytes(layers: Iterable[LayerTensors]) -> int:
    """Bytes of WKV and gate as they are stored; on every rank, but for backends that split them."""
    return sum(tensor.nbytes for layer in layers for tensor in layer.small)


def staging_bytes(config: EngramConfig, layer_count: int, max_tokens: int) -> int:
    """Bytes of the buffers for looked-up rows, packed, on a device that shares its table with no other."""
    return layer_count * max_tokens * config.columns * packed_width(config.head_dim)


@dataclass(frozen=True)
class _Place:
    """A rank of a group that only plans."""

    rank: int
    size: int

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        raise NotImplementedError("a plan exchanges nothing")

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("a plan exchanges nothing")
