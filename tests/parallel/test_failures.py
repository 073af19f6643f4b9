"""A rank that dies leaves the others with an error in bounded time, and nothing behind it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import processes
import pytest
import torch
import torch.distributed as dist
from models import filled, tiny_config

import engram_core.shared
from engram_core import EngramMemory, Parallel, TokenBatch, TokenMap, TorchCollectives
from engram_core.errors import TableError
from engram_core.shared import share_rows

CPU = torch.device("cpu")


def _killed_in_mid_step(rank: int, size: int) -> None:
    config, token_map = tiny_config(), TokenMap.identity(64, 2)
    parallel = Parallel(TorchCollectives())
    memory = filled(EngramMemory(config, token_map, "reference", "shared", parallel, max_tokens=8, prefetch_rows=0))
    hidden = torch.randn(5, 4, 64).to(torch.bfloat16)
    for number in range(1000):
        with memory.step(TokenBatch.single(torch.arange(5))) as step:
            hidden = step.inject(1, hidden)
            if rank == 1 and number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.monotonic()
            try:
                hidden = step.inject(14, hidden)
            except RuntimeError:
                assert number == 3
                assert time.monotonic() - begin < processes.TIMEOUT_S + 5
                # The dead rank's memory and ours are still whole.
                table = memory.layers[1].table
                assert bool(table.lookup(torch.full((1, 4), table.shard.row_start), packed=True).any())
                Path(os.environ["ENDED"]).joinpath(str(rank)).touch()
                os._exit(0)
    raise AssertionError("the other ranks went on without rank 1")


def test_a_rank_killed_in_mid_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENDED", str(tmp_path))
    before = set(os.listdir("/dev/shm"))
    # The launcher ends the survivors as soon as it sees a death, so they are run without it.
    context = torch.multiprocessing.get_context("spawn")
    store = str(tmp_path / "store")
    ranks = [
        context.Process(target=processes._enter, args=(rank, 3, _killed_in_mid_step, store, processes.WATCHDOG_S))
        for rank in range(3)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(90)
    assert [process.exitcode for process in ranks] == [0, -signal.SIGKILL, 0]
    assert {path.name for path in tmp_path.iterdir()} >= {"0", "2"}
    assert set(os.listdir("/dev/shm")) <= before


def _writer_dies(rank: int, size: int) -> None:
    """The writer of the shared rows dies after all have mapped them; readers keep them."""
    shared = share_rows(100, 33, Parallel(TorchCollectives()), CPU)
    assert shared.writer == (rank == 0)
    if shared.writer:
        shared.packed.copy_(torch.arange(3300).remainder(251).to(torch.uint8).view(100, 33))
        shared.count_load()
    dist.barrier()
    if shared.writer:
        dist.barrier()  # the reader has seen the writer's process id
        os._exit(0)
    dist.barrier()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        time.sleep(0.2)
        assert int(shared.packed[99, 32]) == 3299 % 251
        if shared.loads == 1 and time.monotonic() > deadline - 9:
            os._exit(0)


def test_readers_outlive_the_writer() -> None:
    processes.run(2, _writer_dies)


def _short_of_memory(rank: int, size: int) -> None:
    if rank == 0:
        engram_core.shared.available_memory = lambda: 1000  # type: ignore[assignment]
    with pytest.raises(TableError, match=r"needs 8192 bytes of host memory on this node, and 1000 are free to rank 0"):
        share_rows(100, 33, Parallel(TorchCollectives()), CPU)


def test_every_rank_hears_that_the_writer_lacks_memory() -> None:
    processes.run(3, _short_of_memory)


def _can_not_open(rank: int, size: int) -> None:
    if rank == 1:
        engram_core.shared._open = lambda *arguments: None  # type: ignore[assignment]
    with pytest.raises(TableError, match=r"ranks \[1\] could not open the table of their node's writer"):
        share_rows(100, 33, Parallel(TorchCollectives()), CPU)


def test_every_rank_hears_that_one_can_not_open() -> None:
    processes.run(3, _can_not_open)


def _two_nodes(rank: int, size: int) -> None:
    """Ranks 0 and 2 on one machine, 1 and 3 on another: two writers, two copies."""
    shared = share_rows(10, 33, Parallel(TorchCollectives()), CPU, node=f"machine {rank % 2}")
    assert shared.writer == (rank < 2)
    if shared.writer:
        shared.packed.fill_(rank + 1)
    dist.barrier()
    assert shared.packed.unique().tolist() == [rank % 2 + 1]


def test_one_copy_a_node() -> None:
    processes.run(4, _two_nodes)
