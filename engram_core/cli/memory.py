"""How much memory there is, and whether a model's tables fit: asked before gigabytes are touched, not after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from engram_core.cli.failure import CliError
from engram_core.formats import packed_width
from engram_core.shared import available_memory

if TYPE_CHECKING:
    from engram_core.config import EngramConfig

GIB: Final = 2**30
DEMO_VOCAB_SIZE: Final = 20_000
"""Base of the primes of the scaled-down tables: 0.12 GiB a layer, where the real one takes 94.4."""


def available(device: torch.device) -> int | None:
    """Bytes free for tables on ``device``; ``None`` where nobody says."""
    if device.type == "cpu":
        return available_memory()
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if ask is None else int(ask(device)[0])


def check_fits(config: EngramConfig, device: torch.device, source: str) -> None:
    """Refuse a model whose tables and weights are larger than the free memory of ``device``."""
    free = available(device)
    rows = sum(config.num_embeddings)
    width = packed_width(config.head_dim)
    layers = len(config.layer_ids)
    weights = layers * config.wkv_out_features * config.wkv_in_features
    need = rows * width + weights
    if free is None or need <= free:
        return
    raise CliError(
        f"{source}: engram_num_embeddings asks for {rows:,} rows x {width} bytes over {layers} layers, with the "
        f"weights {need / GIB:,.1f} GiB; {free / GIB:,.1f} GiB are free on {device}; pass a smaller engram_vocab_size: "
        f"--vocab-size {DEMO_VOCAB_SIZE} scales the tables down and nothing else"
    )
