"""Work spread over the CPU's cores. NumPy lets go of the interpreter's lock in its loops, so threads do run at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

_pool: ThreadPoolExecutor | None = None


def spread(work: Callable[[slice], None], count: int, grain: int) -> None:
    """Call ``work`` on slices that cover ``range(count)``, in threads where each would get at least ``grain``."""
    parts = min(CORES, count // grain)
    if parts <= 1:
        work(slice(0, count))
        return
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(CORES, thread_name_prefix="acme")
    each = -(-count // parts)
    others = [_pool.submit(work, slice(i, min(i + each, count))) for i in range(each, count, each)]
    try:
        work(slice(0, each))
    finally:
        wait(others)  # nothing is in flight when this returns, whatever failed
    for other in others:
        other.result()


def _forget() -> None:
    # A forked child has none of its parent's threads: work given to their pool would never be done.
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
