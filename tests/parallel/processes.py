"""Real ranks for tests: P processes over gloo, with a watchdog that prints every rank's stack instead of hanging."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WATCHDOG_S = 30
TIMEOUT_S = 20

Body = Callable[[int, int], None]


def _enter(rank: int, size: int, body: Body, store: str, watchdog_s: float) -> None:
    faulthandler.dump_traceback_later(watchdog_s, exit=True, file=sys.__stderr__)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    body(rank, size)
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def run(size: int, body: Body, watchdog_s: float = WATCHDOG_S) -> None:
    """Run ``body(rank, size)`` in ``size`` processes; raises with the first failed rank's traceback or exit code."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.start_processes(_enter, args=(size, body, store, watchdog_s), nprocs=size, start_method="spawn")


def alive(size: int) -> None:
    """Restart the watchdog: a test of many parts hangs if one part does, not if all together are slow."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True, file=sys.__stderr__)
