"""Kernels that run for long, on a stream of one's choice: whatever should wait for that stream and does not is seen.

Nothing here is only probable. An attempt proves something only if all of it was enqueued, and what waits for nothing
had time to run, while every delay still ran; otherwise it is made again with longer delays. Where the host waits for
the device, as it may in some places, no length is enough, and nothing can race.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from engram_conformance.subject import Subject

CYCLES: Final = 40_000_000
"""About 20 ms."""
_LONGER: Final = (1, 4, 16)
_MARGIN: Final = 0.004  # seconds: for what waits for nothing
_MOST_STREAMS: Final = 128


def needs_streams(subject: Subject) -> None:
    """End the case where the device has no streams that can be delayed."""
    if subject.device.type == "cpu":
        subject.not_run("a CPU has no streams")
    if subject.device.type != "cuda":
        subject.not_run(f"a delay on a stream needs torch.cuda; the device is {subject.device}")


def sleep(cycles: int = CYCLES) -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def new_stream() -> torch.cuda.Stream:
    """The next of torch's streams."""
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


class Delay:
    """Delays of one attempt."""

    def __init__(self, cycles: int) -> None:
        self._cycles = cycles
        self._ends: list[torch.Event] = []

    def __call__(self, *streams: torch.Stream) -> None:
        """Of these streams, or of the current one."""
        for stream in streams or (torch.cuda.current_stream(),):
            with torch.cuda.stream(stream):  # type: ignore[arg-type]
                sleep(self._cycles)
                self._ends.append(torch.cuda.current_stream().record_event())

    def held(self) -> bool:
        """Whether all of them still run, some time after everything was enqueued."""
        time.sleep(_MARGIN)
        return bool(self._ends) and not any(end.query() for end in self._ends)


def race(subject: Subject, attempt: Callable[[Delay], Callable[[], None]], rounds: int = 3) -> None:
    """``attempt(delay)`` enqueues everything and returns what judges it, called when the device is done.

    Several rounds, since two streams may share a queue of the hardware by accident, and then wait for each other: each
    round should make its streams anew.
    """
    needs_streams(subject)
    for _ in range(rounds):
        for longer in _LONGER:
            delay = Delay(CYCLES * longer)
            try:
                judge = attempt(delay)
                held = delay.held()
            finally:
                torch.cuda.synchronize()  # nothing may write into memory that a failure gave back
            judge()
            if held:
                break


class Watch:
    """Which of torch's streams were given out since this was made, whoever asked for them.

    torch has a fixed number of them and gives them out in turn.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        first = new_stream()
        self._turns = [first]
        while (stream := new_stream()).stream_id != first.stream_id:
            self._turns.append(stream)
            if len(self._turns) > _MOST_STREAMS:
                subject.not_run("torch gives out streams in another way than in turn: those in use can't be told")
        self._begin = 1  # ``first`` has just come up again

    def streams(self, but: Sequence[torch.Stream | None] = ()) -> list[torch.Stream]:
        """Those, without ``but``."""
        last, without = new_stream().stream_id, {stream.stream_id for stream in but if stream is not None}
        end = next(i for i, stream in enumerate(self._turns) if stream.stream_id == last)
        if end < self._begin:
            end += len(self._turns)
        turns = self._turns * 2
        return [stream for stream in turns[self._begin : end] if stream.stream_id not in without]
