"""Times on a device by graph replay: launches back to back, the median over replays, inputs in rotation."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

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
