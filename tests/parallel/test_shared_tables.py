"""Tables shared by the processes of a node give what one process gives, however they were filled."""

from __future__ import annotations

import processes
import torch
from models import tiny_config

from engram_core import EngramMemory, Parallel, TokenBatch, TokenMap, TorchCollectives
from engram_core.synthetic import Synthetic


def _synthetic(rank: int, size: int) -> None:
    config, token_map = tiny_config(), TokenMap.identity(64, 2)
    group = TorchCollectives()
    hidden = torch.randn(5, 4, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    batch = TokenBatch.single(torch.arange(5))
    alone = EngramMemory(config, token_map, "reference", max_tokens=8)
    Synthetic(config).load(alone)
    with alone.step(batch) as step:
        expected = step.inject(14, step.inject(1, hidden))
    for parallel in (Parallel(group), Parallel(Parallel.single().tensor, data=group)):
        memory = EngramMemory(config, token_map, "reference", "shared", parallel, max_tokens=8)
        Synthetic(config).load(memory)
        for layer_id, layer in memory.layers.items():
            assert layer.table._shared is not None
            assert torch.equal(layer.table._shared.packed, alone.layers[layer_id].table.packed)
        with memory.step(batch, slot_tokens=5) as step:
            assert torch.equal(step.inject(14, step.inject(1, hidden)), expected)


def test_synthetic_rows_are_all_there_before_any_rank_reads() -> None:
    """The writer stores every rank's rows, and not only its own; the others wait for it."""
    processes.run(3, _synthetic)
