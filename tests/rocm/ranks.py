"""P real processes over gloo, each with the ROCm backend in Triton's interpreter: ``TRITON_INTERPRET=1 ranks.py P``.

Every rank checks what it got against the reference on one rank, and all ranks must hold the same bits. Ends with 0, or
with the traceback of the first rank that found a difference.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import filled, tiny_config

from engram_core import EngramMemory, Parallel, TokenBatch, TokenMap, TorchCollectives

HIDDEN = 256  # slices of 32 at P = 8
TOKENS = (0, 1, 7)  # the interpreter takes 40 ms a token and layer, and there are eight ranks


@dataclass
class Counting:
    """A group that keeps what this rank sent."""

    group: TorchCollectives
    sent: list[int] = field(default_factory=list)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.sent.append(x.numel() * x.element_size())
        return self.group.all_gather(x, dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self.sent.append(x.numel() * x.element_size())
        return self.group.all_to_all(x)


def build(backend: str, parallel: Parallel | None = None, **changes: Any) -> EngramMemory:
    config = tiny_config(hidden_size=changes.pop("hidden_size", HIDDEN), **changes)
    return filled(
        EngramMemory(config, TokenMap.identity(64, 2), backend, parallel=parallel, max_tokens=32, device="cpu")
    )


def inputs(tokens: int, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 4, hidden_size, generator=generator).to(torch.bfloat16)
    mask = torch.rand(tokens, generator=generator) < 0.7
    return hidden, torch.randint(0, 64, (tokens,), generator=generator), mask


def run(memory: EngramMemory, hidden: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    with memory.step(TokenBatch.single(ids), token_mask=mask) as step:
        return step.inject(14, step.inject(1, hidden))


def same_everywhere(group: TorchCollectives, x: torch.Tensor) -> None:
    gathered = group.all_gather(x.contiguous().view(torch.uint8).unsqueeze(0), 0)
    assert bool((gathered == gathered[:1]).all()), "ranks hold different bits"


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)


def sliced(group: TorchCollectives) -> None:
    """Slices of dim, with the WKV ahead and in line; closed rows keep their bits; T=0 exchanges nothing."""
    single = build("reference")
    for ahead in (None, TorchCollectives(dist.new_group())):
        tensor = Counting(group)
        memory = build("rocm", Parallel(tensor, ahead=ahead))
        assert (memory.prefetch is None) == (ahead is None)
        wkv = memory.layers[1].wkv
        width = HIDDEN // group.size
        assert (wkv.kv_layout, wkv.kv_features, wkv.collective_in_post) == ("dim_slice", 5 * width, True)
        for tokens in TOKENS:
            hidden, ids, mask = inputs(tokens, HIDDEN)
            tensor.sent.clear()
            found = run(memory, hidden, ids, mask)
            rows = 0 if ahead is not None and tokens <= memory.prefetch_rows else 1
            assert len(tensor.sent) == (2 * (rows + 1) if tokens else 0), tensor.sent
            assert tensor.sent[rows :: rows + 1] == [tokens * 2 * (width + 16)] * 2 if tokens else not tensor.sent
            close(found, run(single, hidden, ids, mask))
            assert torch.equal(found[~mask], hidden[~mask])
            if tokens:
                same_everywhere(group, found)


def whole(group: TorchCollectives) -> None:
    """Where 32 does not divide a slice, every rank keeps the whole projection."""
    memory = build("rocm", Parallel(group), hidden_size=32 * (group.size - 1))
    assert memory.layers[1].wkv.kv_layout == "full"
    hidden, ids, mask = inputs(3, memory.config.hidden_size)
    found = run(memory, hidden, ids, mask)
    close(found, run(build("reference", hidden_size=memory.config.hidden_size), hidden, ids, mask))
    same_everywhere(group, found)


def sequence(group: TorchCollectives) -> None:
    """Under sequence parallelism each rank runs the whole projection of its window."""
    memory, single = build("rocm", Parallel(group, sequence=True)), build("reference")
    assert memory.layers[1].wkv.kv_layout == "full"
    for tokens in (0, 9):
        hidden, ids, mask = inputs(tokens, HIDDEN)
        slot = -(-tokens // group.size)
        mine = slice(min(group.rank * slot, tokens), min((group.rank + 1) * slot, tokens))
        close(run(memory, hidden[mine], ids, mask), run(single, hidden, ids, mask)[mine])


ACTS: tuple[Callable[[TorchCollectives], None], ...] = (sliced, whole, sequence)


def play(rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    try:
        group = TorchCollectives()
        for act in ACTS:
            act(group)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    # Imported before the fork: eight processes that each load torch and Triton would take most of the time.
    import engram_rocm.backend  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        size = int(sys.argv[1])
        mp.start_processes(play, args=(size, f"{folder}/store"), nprocs=size, start_method="fork")
