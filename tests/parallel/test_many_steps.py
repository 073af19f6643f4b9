"""Every way of sharing a model over P real processes, 200 steps of random size each, gives what one rank gives."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from models import filled, tiny_config

from engram_core import EngramConfig, EngramMemory, Parallel, TokenBatch, TokenMap, TorchCollectives
from engram_core.exchange import window
from engram_core.parallel import Collectives

STEPS = 200
MAX_TOKENS = 12


class EngineCollectives:
    """What an engine might bring instead of ours: its own class, on torch's list-based operations."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return self.all_gather(x.unsqueeze(0), 0)[:, self.rank]


def _config(columns: int, **changes: Any) -> EngramConfig:
    return tiny_config(max_ngram_size=4, n_heads=columns // 3, **changes)


def _memory(config: EngramConfig, parallel: Parallel | None = None, placement: str = "device") -> EngramMemory:
    token_map = TokenMap.identity(64, 2)
    return filled(
        EngramMemory(config, token_map, "reference", placement, parallel, max_tokens=MAX_TOKENS, prefetch_rows=6)
    )


def _batch(draw: random.Random, tokens: int) -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(draw.randrange(2**31))
    hidden = torch.randn(tokens, 4, 64, generator=generator).to(torch.bfloat16)
    dead = torch.rand(tokens, generator=generator) < 0.2
    return TokenBatch.single(torch.randint(0, 64, (tokens,), generator=generator), dead), hidden


class Expected:
    """One rank's results, computed once for all ways of sharing that see the same tokens."""

    def __init__(self, whole: EngramMemory) -> None:
        self._whole = whole
        self._known: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, seed: int, batch: TokenBatch, hidden: torch.Tensor) -> torch.Tensor:
        key = (seed, len(batch))
        if key not in self._known:
            with self._whole.step(batch) as step:
                self._known[key] = step.inject(1, hidden)
        return self._known[key]


def _compare(memory: EngramMemory, expected: Expected, counts: str) -> None:
    """``counts``: "equal" over all ranks, or "unequal" (each rank its own tokens, padded to a common slot)."""
    shared = random.Random(counts)
    rank = 0 if memory.parallel.data is None else memory.parallel.data.rank
    for number in range(STEPS):
        each = [shared.randrange(MAX_TOKENS + 1) if shared.random() > 0.1 else 0 for _ in range(8)]
        slot = max(each[: memory.parallel.data_size]) if counts == "unequal" else None
        seed = 1000 * rank + number
        batch, hidden = _batch(random.Random(seed), each[rank])
        mine = window(len(batch), memory.parallel)
        here = slice(mine.start, mine.start + mine.real)
        with memory.step(batch, slot_tokens=slot) as step:
            found = step.inject(1, hidden[here])
        want = expected.of(seed, batch, hidden)[here]
        torch.testing.assert_close(found.float(), want.float(), rtol=2**-6, atol=2**-6)


def _every_path(rank: int, size: int) -> None:
    world = TorchCollectives()
    ahead = TorchCollectives(dist.new_group())
    engine: Collectives = EngineCollectives()
    columns, rows = _config(15, layer_ids=(1,)), _config(9 if size == 8 else 3, layer_ids=(1,))
    whole_columns, whole_rows = Expected(_memory(columns)), Expected(_memory(rows))
    by_rows = _memory(rows, Parallel(world))
    if size in (4, 8):
        assert all(layer.table.shard.by_rows for layer in by_rows.layers.values())
    paths = {
        "columns": (_memory(columns, Parallel(world)), whole_columns, "equal"),
        "columns, WKV ahead": (_memory(columns, Parallel(world, ahead=ahead)), whole_columns, "equal"),
        "an engine's own collectives": (_memory(columns, Parallel(engine)), whole_columns, "equal"),
        "rows": (by_rows, whole_rows, "equal"),
        "sequence": (_memory(columns, Parallel(world, sequence=True)), whole_columns, "equal"),
        "sequence, rows": (_memory(rows, Parallel(world, sequence=True)), whole_rows, "equal"),
        "data": (_memory(columns, Parallel(Parallel.single().tensor, data=world)), whole_columns, "unequal"),
        "data, rows": (_memory(rows, Parallel(Parallel.single().tensor, data=world)), whole_rows, "unequal"),
        "shared": (_memory(columns, Parallel(world), "shared"), whole_columns, "equal"),
    }
    if size in (4, 8):  # 2 tensor ranks, the rest data-parallel: tensor ranks are neighbours
        tensors = [dist.new_group([2 * i, 2 * i + 1]) for i in range(size // 2)]
        datas = [dist.new_group(list(range(i, size, 2))) for i in range(2)]
        grid = Parallel(TorchCollectives(tensors[rank // 2]), TorchCollectives(datas[rank % 2]))
        paths["tensor and data"] = (_memory(columns, grid), whole_columns, "unequal")
        paths["tensor and data, rows"] = (_memory(rows, grid), whole_rows, "unequal")
        paths["tensor and data, shared"] = (_memory(columns, grid, "shared"), whole_columns, "unequal")
    for name, (memory, whole, counts) in paths.items():
        processes.alive(size)
        assert (memory.prefetch is not None) == (name == "columns, WKV ahead")
        _compare(memory, whole, counts)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_path(size: int) -> None:
    processes.run(size, _every_path)


def _rows_are_bit_equal(rank: int, size: int) -> None:
    world = TorchCollectives()
    for columns in (15, 9, 3):
        memory, whole = _memory(_config(columns), Parallel(world)), _memory(_config(columns))
        ids = memory.hasher(_batch(random.Random(columns), 11)[0])
        for i, (one, all_) in enumerate(zip(memory.layers.values(), whole.layers.values(), strict=True)):
            one.prepare(ids[:, i])
            all_.prepare(ids[:, i])
            assert torch.equal(one.take_rows(), all_.take_rows())


def test_rows_travel_packed_and_bit_equal() -> None:
    processes.run(4, _rows_are_bit_equal)


class Recorder:
    """Counts bytes and notes the order of operations."""

    def __init__(self, inner: Collectives) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.calls: list[tuple[str, list[int], str]] = []

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        self.calls.append(("all_gather", list(x.shape), str(x.dtype)))
        return self.inner.all_gather(x, dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(("all_to_all", list(x.shape), str(x.dtype)))
        return self.inner.all_to_all(x)


def _ahead_order(rank: int, size: int) -> None:
    """Layers are asked for in another order on each rank; the side communicator sees one order all the same."""
    main, side = Recorder(TorchCollectives()), Recorder(TorchCollectives(dist.new_group()))
    memory, whole = _memory(_config(15), Parallel(main, ahead=side)), _memory(_config(15))
    draw = random.Random(7)
    for _ in range(20):
        batch, hidden = _batch(draw, draw.randrange(1, 7))
        order = [1, 14] if rank % 2 else [14, 1]
        with memory.step(batch) as step:
            found = {layer_id: step.inject(layer_id, hidden) for layer_id in order}
        with whole.step(batch) as step:
            for layer_id in (1, 14):
                expected = step.inject(layer_id, hidden)
                torch.testing.assert_close(found[layer_id].float(), expected.float(), rtol=2**-6, atol=2**-6)
    assert not main.calls  # the chains used their own communicator alone
    width = 33 * -(-15 // size)
    assert side.calls[0][1][1:] == [width // 33, 33]
    assert side.calls[0][2] == "torch.uint8"  # packed: 33 bytes a row here, 264 in the real geometry
    logs: list[object] = [None] * size
    dist.all_gather_object(logs, side.calls)
    assert all(log == side.calls for log in logs)


def test_the_side_communicator_sees_one_order() -> None:
    processes.run(2, _ahead_order)


def _crossed(rank: int, size: int) -> None:
    """The control: operations enqueued in another order on one rank do not pair up."""
    side = TorchCollectives(dist.new_group())
    big, small = torch.full((64,), float(rank)), torch.full((3,), float(rank))
    for x in (big, small) if rank else (small, big):
        gathered = side.all_gather(x, 0)
        assert gathered.view(size, -1).mean(1).tolist() == [0.0, 1.0]


def test_a_crossed_order_is_noticed() -> None:
    with pytest.raises(Exception, match=r"terminated|Error|exit code"):
        processes.run(2, _crossed, watchdog_s=25)


def _hangs(rank: int, size: int) -> None:
    if rank == 0:
        TorchCollectives().all_gather(torch.zeros(1), 0)
    else:
        import time

        time.sleep(60)


def test_the_watchdog_ends_a_hang(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(Exception, match="exit code 1"):
        processes.run(2, partial(_hangs), watchdog_s=6)
    assert "in _hangs" in capfd.readouterr().err
