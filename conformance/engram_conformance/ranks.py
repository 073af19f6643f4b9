"""All ranks of a parallel run in one process: one thread each, of which exactly one runs at a time.

A rank gives the baton away only inside a collective, so the ranks never race, code that keeps global state (Triton's
interpreter) works, and a hang is found at once: where nobody can run and nobody's exchange is complete.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

T = TypeVar("T")
_TIMEOUT = 240.0


class Hang(AssertionError):  # noqa: N818
    """Ranks wait for an exchange that will never be complete."""


class Mismatch(AssertionError):  # noqa: N818
    """Ranks of one group do different things at one point."""


class _Stopped(Exception):  # noqa: N818
    """Another rank failed; this one has nothing to report."""


@dataclass
class Seat:
    """A rank and a size, and no exchange: for what must only plan (tables, refusals)."""

    rank: int
    size: int

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError("all_gather where nothing is to be exchanged")

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("all_to_all where nothing is to be exchanged")


@dataclass
class _Group:
    name: str
    members: tuple[int, ...]
    pending: dict[int, torch.Tensor] = field(default_factory=dict)
    operation: tuple[object, ...] = ()
    generation: int = 0
    results: list[torch.Tensor] = field(default_factory=list)


class _Handle:
    """One rank's :class:`~engram_core.parallel.Collectives`."""

    def __init__(self, play: Play[object], group: _Group, rank: int) -> None:
        self._play, self._group = play, group
        self.rank, self.size = rank, len(group.members)

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        dim = dim % x.dim()
        parts = self._play.exchange(self._group, self.rank, ("all_gather", dim), x)
        return torch.cat(parts, dim)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] != self.size:
            raise Mismatch(f"all_to_all of {list(x.shape)} over {self.size} ranks; one slice for each is needed")
        parts = self._play.exchange(self._group, self.rank, ("all_to_all",), x)
        return torch.stack([part[self.rank] for part in parts])


class Play(Generic[T]):
    """``size`` ranks. ``group`` gives their communicators; ``run`` plays them and returns what each returned.

    ``log`` holds, for each rank, the exchanges it took part in, in order: (group, operation, shape, dtype).
    """

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.log: list[list[tuple[object, ...]]] = [[] for _ in range(size)]
        self._device = device
        self._changed = threading.Condition()
        self._baton = threading.Lock()
        self._blocked: set[int] = set()
        self._done: set[int] = set()
        self._failure: BaseException | None = None

    def group(self, name: str, members: Sequence[int]) -> list[_Handle]:
        """One handle for each of ``members`` (ranks of the play), in that order."""
        group = _Group(name, tuple(members))
        return [_Handle(self, group, rank) for rank in range(len(group.members))]  # type: ignore[arg-type]

    def everyone(self, name: str = "tensor") -> list[_Handle]:
        """A group of all ranks."""
        return self.group(name, range(self.size))

    def run(self, act: Callable[[int], T]) -> list[T]:
        """Play ``act(rank)`` on every rank. Raises what the first failing rank raised, or :class:`Hang`."""
        results: dict[int, T] = {}

        def play(rank: int) -> None:
            with self._baton:
                try:
                    if self._failure is None:
                        self._enter_device()
                        results[rank] = act(rank)
                except _Stopped:
                    pass
                except BaseException as error:
                    self._fail(error)
            with self._changed:
                self._done.add(rank)
                self._look_for_hang()

        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT)
            if thread.is_alive():
                raise Hang(f"a rank did not end within {_TIMEOUT:g} s")
        if self._failure is not None:
            raise self._failure
        return [results[rank] for rank in range(self.size)]

    def exchange(self, group: _Group, index: int, operation: tuple[object, ...], x: torch.Tensor) -> list[torch.Tensor]:
        """Called by handles: wait for every member's tensor; the tensors in rank order."""
        rank = group.members[index]
        whole = (*operation, tuple(x.shape), x.dtype)
        self._synchronize()
        copy = x.detach().clone()
        with self._changed:
            self._alive()
            self.log[rank].append((group.name, *whole))
            if group.pending and group.operation != whole:
                self._fail(Mismatch(f"{group.name}: rank {index} does {whole}, others do {group.operation}"))
                self._alive()
            group.operation = whole
            group.pending[index] = copy
            mine = group.generation
            if len(group.pending) == len(group.members):
                group.results = [group.pending[i] for i in range(len(group.members))]
                group.pending = {}
                group.generation += 1
                self._blocked -= set(group.members)
                self._changed.notify_all()
                return group.results
            self._blocked.add(rank)
            self._look_for_hang()
        self._baton.release()
        try:
            with self._changed:
                ready = self._changed.wait_for(lambda: group.generation > mine or self._failure is not None, _TIMEOUT)
                results = group.results
        finally:
            self._baton.acquire()
        if not ready:
            raise Hang(f"{group.name}: rank {index} waited {_TIMEOUT:g} s in {whole}")
        self._alive()
        return results

    def _alive(self) -> None:
        if self._failure is not None:
            raise _Stopped

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _look_for_hang(self) -> None:
        if self._failure is None and self._blocked and len(self._blocked) + len(self._done) == self.size:
            waits = {rank: self.log[rank][-1] for rank in sorted(self._blocked)}
            self._failure = Hang(f"ranks {sorted(waits)} wait in {waits}; ranks {sorted(self._done)} have ended")
            self._changed.notify_all()

    def _enter_device(self) -> None:
        if self._device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.set_device_index(self._device.index or 0)

    def _synchronize(self) -> None:
        if self._device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize(self._device)
