"""All ranks in one process: what a play gives, and how it finds ranks that hang or disagree."""

from __future__ import annotations

import time

import pytest
import torch
from engram_conformance.ranks import Hang, Mismatch, Play

from engram_core.parallel import Collectives, Parallel

CPU = torch.device("cpu")


def test_gather_and_all_to_all_in_rank_order() -> None:
    play: Play[tuple[list[int], list[int]]] = Play(3, CPU)
    seats = play.everyone()

    def act(rank: int) -> tuple[list[int], list[int]]:
        gathered = seats[rank].all_gather(torch.tensor([[rank], [rank + 10]]), 1)
        crossed = seats[rank].all_to_all(torch.tensor([100 * rank + i for i in range(3)]))
        return gathered.flatten().tolist(), crossed.tolist()

    for rank, (gathered, crossed) in enumerate(play.run(act)):
        assert gathered == [0, 1, 2, 10, 11, 12]
        assert crossed == [rank, 100 + rank, 200 + rank]
    assert play.log[0] == play.log[2]


def test_handles_are_collectives() -> None:
    handle = Play[None](2, CPU).everyone()[1]
    assert isinstance(handle, Collectives)
    assert Parallel(handle).tensor.rank == 1


def test_only_one_rank_runs_at_a_time() -> None:
    play: Play[None] = Play(4, CPU)
    seats, inside = play.everyone(), []

    def act(rank: int) -> None:
        for _ in range(3):
            inside.append(rank)
            time.sleep(0.001)
            assert inside[-1] == rank, "another rank ran between two exchanges"
            seats[rank].all_gather(torch.zeros(1), 0)

    play.run(act)
    assert sorted(inside) == sorted([0, 1, 2, 3] * 3)


def test_what_was_sent_is_a_copy() -> None:
    play: Play[list[float]] = Play(2, CPU)
    seats = play.everyone()

    def act(rank: int) -> list[float]:
        mine = torch.full((1,), float(rank))
        result = seats[rank].all_gather(mine, 0)
        mine.fill_(9)
        return list(result.tolist())

    assert play.run(act) == [[0.0, 1.0]] * 2


def test_a_rank_that_skips_an_exchange_is_found_at_once() -> None:
    play: Play[None] = Play(3, CPU)
    seats, began = play.everyone(), time.monotonic()

    def act(rank: int) -> None:
        if rank:
            seats[rank].all_gather(torch.zeros(1), 0)

    with pytest.raises(Hang, match=r"ranks \[1, 2\] wait"):
        play.run(act)
    assert time.monotonic() - began < 10


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    play: Play[None] = Play(2, CPU)
    one, two = play.everyone("one"), play.everyone("two")

    def act(rank: int) -> None:
        for group in (one, two) if rank else (two, one):
            group[rank].all_gather(torch.zeros(1), 0)

    with pytest.raises(Hang, match="wait in"):
        play.run(act)


@pytest.mark.parametrize("kind", ["shape", "dtype", "operation", "dim"])
def test_ranks_that_disagree(kind: str) -> None:
    play: Play[None] = Play(2, CPU)
    seats = play.everyone()

    def act(rank: int) -> None:
        x = torch.zeros(2, 2)
        if rank and kind == "shape":
            x = torch.zeros(2, 3)
        elif rank and kind == "dtype":
            x = x.double()
        if rank and kind == "operation":
            seats[rank].all_to_all(x)
        else:
            seats[rank].all_gather(x, rank if kind == "dim" else 0)

    with pytest.raises(Mismatch, match="others do"):
        play.run(act)


def test_the_first_failure_is_what_is_raised() -> None:
    play: Play[None] = Play(3, CPU)
    seats = play.everyone()

    def act(rank: int) -> None:
        if rank == 1:
            raise KeyError("rank 1 broke")
        seats[rank].all_gather(torch.zeros(1), 0)

    with pytest.raises(KeyError, match="rank 1 broke"):
        play.run(act)
