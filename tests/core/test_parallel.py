"""Several ranks give what one gives: two real processes over gloo, and what a group must refuse."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import filled, tiny_config, weights

from engram_core import EngramMemory, Parallel, TokenBatch, TokenMap, TorchCollectives
from engram_core.errors import CollectiveError, InvalidArgumentError

TOKENS = (0, 1, 7, 20)


def _expected(hidden: torch.Tensor, ids: torch.Tensor, **changes: Any) -> torch.Tensor:
    memory = filled(EngramMemory(tiny_config(**changes), TokenMap.identity(64, 2), "reference", max_tokens=32))
    with memory.step(TokenBatch.single(ids)) as step:
        return step.inject(14, step.inject(1, hidden))


def _inputs(tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * tokens + seed)
    hidden = torch.randn(tokens, 4, 64, generator=generator).to(torch.bfloat16)
    return hidden, torch.randint(0, 64, (tokens,), generator=generator)


def _memory(parallel: Parallel, **changes: Any) -> EngramMemory:
    config = tiny_config(**changes)
    return filled(EngramMemory(config, TokenMap.identity(64, 2), "reference", parallel=parallel, max_tokens=32))


def _close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """A float32 product of half the columns may round in another order: one bf16 step."""
    torch.testing.assert_close(found.float(), expected.float(), rtol=2**-7, atol=2**-7)


def _tensor(group: TorchCollectives) -> None:
    for ahead in (None, TorchCollectives(dist.new_group())):
        memory = _memory(Parallel(group, ahead=ahead))
        assert (memory.prefetch is None) == (ahead is None)
        for tokens in TOKENS:
            hidden, ids = _inputs(tokens)
            with memory.step(TokenBatch.single(ids)) as step:
                found = step.inject(14, step.inject(1, hidden))
            _close(found, _expected(hidden, ids))


def _rows(group: TorchCollectives) -> None:
    """One column over two ranks: cut by rows, joined by an integer sum; bit-equal."""
    changes = {"max_ngram_size": 2, "n_heads": 1}
    memory = _memory(Parallel(group), **changes)
    assert all(layer.table.shard.by_rows for layer in memory.layers.values())
    whole = _memory(Parallel.single(), **changes)
    for tokens in TOKENS:
        _, ids = _inputs(tokens)
        hashed = memory.hasher(TokenBatch.single(ids))
        for i, layer in enumerate(memory.layers.values()):
            layer.prepare(hashed[:, i])
            one = list(whole.layers.values())[i]
            one.prepare(hashed[:, i])
            assert torch.equal(layer.take_rows(), one.take_rows())


def _sequence(group: TorchCollectives) -> None:
    memory = _memory(Parallel(group, sequence=True))
    for tokens in TOKENS:
        hidden, ids = _inputs(tokens)
        slot = -(-tokens // group.size)
        mine = slice(group.rank * slot, min((group.rank + 1) * slot, tokens))
        with memory.step(TokenBatch.single(ids)) as step:
            found = step.inject(14, step.inject(1, hidden[mine]))
        _close(found, _expected(hidden, ids)[mine])


def _data(group: TorchCollectives) -> None:
    memory = _memory(Parallel(_Alone(), data=group))
    for counts in ((3, 5), (0, 4), (6, 0), (0, 0)):
        tokens = counts[group.rank]
        hidden, ids = _inputs(tokens, seed=group.rank)
        batch = TokenBatch.single(ids)
        # Ids in CPU memory are those of one rank's tokens, and each rank looks up those of all.
        for host_ids in (None, memory.hash_on_host(batch)):
            with memory.step(batch, slot_tokens=max(counts), host_ids=host_ids) as step:
                found = step.inject(14, step.inject(1, hidden))
            assert torch.equal(found, _expected(hidden, ids))


def _shared(group: TorchCollectives) -> None:
    """One copy for both; the second rank only reads it, and needs no exchange over data-parallel ranks."""
    config = tiny_config()
    for parallel in (Parallel(group), Parallel(_Alone(), data=group)):
        memory = EngramMemory(config, TokenMap.identity(64, 2), "reference", "shared", parallel, max_tokens=32)
        writer = group.rank == 0
        memory.load_weights(
            (n, t if writer or "embed" not in n else t.clone().view(torch.uint8).zero_().view(t.dtype))
            for n, t in weights(config).items()
        )
        tokens = 7 if parallel.data is None else 5 * group.rank
        hidden, ids = _inputs(tokens)
        with memory.step(TokenBatch.single(ids)) as step:
            _close(step.inject(14, step.inject(1, hidden)), _expected(hidden, ids))
        before = [layer.table.version for layer in memory.layers.values()]
        dist.barrier()  # the writer may not load again before the reader has looked
        memory.load_weights((n, t) for n, t in weights(config, 3).items() if "embed" in n)
        assert all(layer.table.version > v for layer, v in zip(memory.layers.values(), before, strict=True))


def _collectives(group: TorchCollectives) -> None:
    base = torch.arange(24, dtype=torch.uint8).view(2, 3, 4) + 100 * group.rank
    for x in (base, base.transpose(1, 2), base[:, ::2], base[:0]):
        for dim in range(-x.dim(), x.dim()):
            expected = torch.cat([x - 100 * group.rank + 100 * r for r in range(2)], dim)
            assert torch.equal(group.all_gather(x, dim), expected)
    for x in (base, base.transpose(1, 2)):
        expected = torch.stack([(x - 100 * group.rank + 100 * r)[group.rank] for r in range(2)])
        assert torch.equal(group.all_to_all(x), expected)
    for wrong in (base[:1], torch.tensor(1)):
        with pytest.raises(InvalidArgumentError, match=r"^x: got shape"):
            group.all_to_all(wrong)
    with pytest.raises(InvalidArgumentError, match="^dim: got 3"):
        group.all_gather(base, 3)
    group.size = 3
    with pytest.raises(CollectiveError, match="has 2 ranks, had 3 at construction"):
        group.all_gather(base, 0)


PATHS = {
    "tensor": _tensor,
    "rows": _rows,
    "sequence": _sequence,
    "data": _data,
    "shared": _shared,
    "collectives": _collectives,
}


def _run(rank: int, path: str, store: str) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        PATHS[path](TorchCollectives())
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("path", PATHS)
def test_two_processes(tmp_path: Path, path: str) -> None:
    mp.start_processes(_run, args=(path, str(tmp_path / "store")), nprocs=2, start_method="spawn")


class _Alone:
    rank, size = 0, 1

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x


class _Two(_Alone):
    size = 2


def test_a_process_without_a_group() -> None:
    single = Parallel.single()
    assert (single.tensor.rank, single.tensor.size, single.shards, single.shard) == (0, 1, 1, 0)
    x = torch.arange(3)
    assert single.tensor.all_gather(x, 0) is x
    with pytest.raises(CollectiveError, match="torch.distributed is not initialised"):
        TorchCollectives()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tensor": 5}, "^tensor: got int"),
        ({"tensor": None}, "^tensor: got NoneType"),
        ({"tensor": _Alone(), "data": "x"}, "^data: got str"),
        ({"tensor": _Alone(), "ahead": _Two()}, "^ahead: got rank 0 of 2"),
    ],
)
def test_wrong_groups_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        Parallel(**fields)


def test_a_data_parallel_step_needs_the_common_slot() -> None:
    memory = _memory(Parallel(_Alone(), data=_Two()))
    with pytest.raises(InvalidArgumentError, match="^slot_tokens: got None"):
        memory.step(TokenBatch.single(torch.arange(3))).start()
    with pytest.raises(InvalidArgumentError, match="^slot_tokens: got 2; need at least this rank's 3"):
        memory.step(TokenBatch.single(torch.arange(3)), slot_tokens=2).start()
