"""Shared by the tests of checkpoints."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ranks:
    """A place in a group that never talks: enough to plan and to load."""

    rank: int
    size: int

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError("nothing is exchanged while loading")

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("nothing is exchanged while loading")


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bytes, whatever the dtype: NaN included."""
    return x.contiguous().view(-1).view(torch.uint8)


def shard_of(folder: Path, tensor: str) -> Path:
    """The file that the index names for a tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / str(index["weight_map"][tensor])
