"""A progress bar of bytes: how much, how fast, how long still; silent where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(what: str, total: int | None, enabled: bool = True, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A function to call with the bytes just handled.

    Shown on standard error, where that is a terminal and ``enabled``; otherwise nothing is written at all. ``total``:
    None where nobody knows. ``done``: bytes that an earlier run handled.
    """
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), speed_estimate_period=30) as bar:
        task = bar.add_task(what, total=total, completed=done)
        yield lambda count: bar.update(task, advance=count)
