"""Times on a device: launches back to back in a graph, the median over replays; or single calls on a cold L2."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch


def replay(calls: Sequence[Callable[[], object]], repeats: int = 11) -> float:
    """Microseconds a call: all ``calls`` captured in one graph, the median of ``repeats`` replays over their number."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    for _ in range(2):
        graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times)


def sets_beyond_l2(nbytes: int, least: int = 2, most: int = 12) -> int:
    """How many sets of ``nbytes`` to rotate so that none is found in L2 (50 MB; 250 MB are rotated)."""
    return max(least, min(most, 250_000_000 // max(nbytes, 1) + 1))


class Clock:
    """Times one call at a time, L2 cold: by device events, or by the wall clock on a CPU.

    ``lead_us`` of :meth:`time`: the call is queued behind a spin kernel of that length, so that the device finds all of
    it waiting; 0: the device is idle when the call begins, and the host's own time counts.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        if self.cuda:
            # Read to flush: what was written would have to be written back during the call that is timed.
            self._lines = torch.ones(2**26, dtype=torch.int32, device=device)
            for _ in range(20):  # until the clocks are up
                torch.cuda._sleep(5_000_000)
            self._cycles_a_us = 4_000_000 / statistics.median(self._spent(4_000_000) for _ in range(5))

    def _spent(self, cycles: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000

    def settle(self) -> None:
        """Wait until the device has done everything."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def spin(self, us: float) -> None:
        """Occupy one thread of the current stream's device for about ``us``; on a CPU nothing."""
        if self.cuda and us > 0:
            torch.cuda._sleep(int(us * self._cycles_a_us))

    def time(self, call: Callable[[], object], lead_us: float = 0.0) -> tuple[float, float]:
        """Microseconds from the call's begin to its end on the current stream, and those that the host spent on it."""
        self.settle()
        if not self.cuda:
            start = time.perf_counter()
            call()
            spent = (time.perf_counter() - start) * 1e6
            return spent, spent
        self._lines.sum()
        if lead_us > 0:
            self.spin(lead_us)
        else:
            torch.cuda.synchronize(self.device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        start = time.perf_counter()
        call()
        host = (time.perf_counter() - start) * 1e6
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1000, host


@dataclass
class Run:
    """What is timed: ``call`` on ``stream`` (None: the current one)."""

    call: Callable[[], torch.Tensor]
    stream: torch.cuda.Stream | None = None

    def on(self) -> AbstractContextManager[Any]:
        """Make the stream the current one."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def captured(self) -> Run:
        """The same as one graph, once it is warm; its result lies at one address."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            out = self.call()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return Run(replay, self.stream)


def in_turn(
    runs: dict[str, Run], renew: Callable[[], None], clock: Clock, rounds: int, lead: float | None
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Microseconds of each run in each round, and of the host (median); ``renew`` changes the inputs before each.

    ``lead``: see :meth:`Clock.time`; None: as long as the host was found to need for the slowest of them.
    """
    slowest = 0.0
    for run in runs.values():
        with run.on():
            spent = [clock.time(run.call, 5000.0 if lead is None else lead)[1] for _ in range(3)]
        slowest = max(slowest, statistics.median(spent))
    spin = 1.5 * slowest + 300 if lead is None else lead
    times: dict[str, list[float]] = {name: [] for name in runs}
    host: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            renew()
            with runs[name].on():
                device, spent_here = clock.time(runs[name].call, spin)
            times[name].append(device)
            host[name].append(spent_here)
    return times, {name: statistics.median(each) for name, each in host.items()}


def added(with_it: Sequence[float], without: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the differences, round by round."""
    low, middle, high = statistics.quantiles([a - b for a, b in zip(with_it, without, strict=True)], n=4)
    return low, middle, high
