"""One host copy of a table for all processes of a node.

The rows lie in an anonymous memory file (memfd): it has no name, so a crash leaves nothing behind, and the size of
/dev/shm does not limit it. One rank of each node writes; the others open the writer's descriptor through /proc and map
it read-only. Once all have mapped it the descriptor is closed: any of them may then die, and the rest keep the memory.

Making one is collective over all ranks that share the table. A rank that fails says so in the exchange, and every rank
then raises with that rank's reason: nobody waits for a rank that has given up.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from engram_core.errors import TableError
from engram_core.parallel import Parallel

# The last page holds the writer's load counter: readers can't see torch's own version of another process's tensor.
_HEADER = mmap.PAGESIZE
_NO_DESCRIPTOR = -1


@dataclass(frozen=True)
class SharedRows:
    """``packed``: all ranks' rows ``[rows, W]`` uint8 (of a reader: read-only); ``writer``: whether this rank loads."""

    packed: torch.Tensor
    writer: bool
    _loads: torch.Tensor

    def count_load(self) -> None:
        """Tell the readers that rows changed."""
        self._loads.add_(1)

    @property
    def loads(self) -> int:
        """Loads so far, by the writer."""
        return int(self._loads)


def share_rows(rows: int, width: int, parallel: Parallel, device: torch.device, node: str | None = None) -> SharedRows:
    """Zero rows ``[rows, width]`` shared by the ranks of ``parallel`` on this node; collective.

    ``node``: what tells machines apart (default: this boot and process namespace). Raises :class:`TableError` on every
    rank, with the numbers, where one of them lacks memory or can't open the writer's.
    """
    place = int.from_bytes(hashlib.sha256((node or _node()).encode()).digest()[:7], "little")
    ranks = _exchange(parallel, device, [place, os.getpid()])
    mine = parallel.tensor.rank * parallel.data_size + (0 if parallel.data is None else parallel.data.rank)
    leader = next(rank for rank, (where, _) in enumerate(ranks) if where == place)
    size = -(-rows * width // mmap.PAGESIZE) * mmap.PAGESIZE + _HEADER
    descriptor, free = _NO_DESCRIPTOR, available_memory()
    if leader == mine and size <= free:
        descriptor = os.memfd_create("engram-table", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, size)  # now, or a later write would find no page and kill the process
        except OSError:
            os.close(descriptor)
            descriptor = _NO_DESCRIPTOR
    try:
        offers = _exchange(parallel, device, [descriptor, free])
        offered, had = offers[leader]
        shared = None
        if offered != _NO_DESCRIPTOR:
            shared = _open(leader == mine, ranks[leader][1], offered, size, rows, width)
        opened = _exchange(parallel, device, [int(shared is not None), 0])
    finally:
        if descriptor != _NO_DESCRIPTOR:
            os.close(descriptor)
    if offered == _NO_DESCRIPTOR:
        raise TableError(
            f"placement: 'shared' needs {size} bytes of host memory on this node, and {had} are free to rank {leader}; "
            f"use placement 'file', or a machine or container with more memory"
        )
    if failed := [rank for rank, (done, _) in enumerate(opened) if not done]:
        raise TableError(
            f"placement: 'shared': ranks {failed} could not open the table of their node's writer through /proc; they "
            f"must run as the same user and in the same process namespace, and the writer must be alive"
        )
    assert shared is not None  # this rank is among those that opened it
    return shared


def barrier(parallel: Parallel, device: torch.device) -> None:
    """Return when every rank of ``parallel`` has come here."""
    _exchange(parallel, device, [0])


def available_memory() -> int:
    """Bytes of host memory that this process may still take: the machine's, or the least that a limit on it leaves.

    Limits are those of its control group (version 2) and of all groups above: containers, a scheduler's jobs, services.
    """
    free = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    if found := re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), re.M):
        free = int(found[1]) * 1024
    own = re.search(r"^0::/(.*)$", _read("/proc/self/cgroup"), re.M)
    # In a namespace of its own the path is "/": the container's group is the root that it sees.
    group = Path("/sys/fs/cgroup") / (own[1] if own else "")
    for folder in (group, *group.parents[: len(group.parts) - len(Path("/sys/fs/cgroup").parts)]):
        limit, used = _read(f"{folder}/memory.max").strip(), _read(f"{folder}/memory.current").strip()
        if limit.isdigit() and used.isdigit():
            # Files that were read (a checkpoint) count as used, and give way to whoever needs the memory.
            cached = re.findall(r"^(?:in)?active_file (\d+)", _read(f"{folder}/memory.stat"), re.M)
            free = min(free, int(limit) - int(used) + sum(map(int, cached)))
    return free


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except OSError:
        return ""


def _node() -> str:
    """Processes can share memory where both the running kernel and the process namespace are one."""
    return _read("/proc/sys/kernel/random/boot_id") + os.readlink("/proc/self/ns/pid")


def _exchange(parallel: Parallel, device: torch.device, values: list[int]) -> list[list[int]]:
    """Every rank's ``values``, by rank; at construction a look at them may cost a synchronisation."""
    mine = torch.tensor([values], dtype=torch.int64, device=device)
    if parallel.data is not None and parallel.data.size > 1:
        mine = parallel.data.all_gather(mine, 0)
    if parallel.tensor.size > 1:
        mine = parallel.tensor.all_gather(mine, 0)
    return [[int(v) for v in row] for row in mine.cpu().tolist()]


def _open(writer: bool, pid: int, descriptor: int, size: int, rows: int, width: int) -> SharedRows | None:
    """Map the writer's memory; None where that can't be done (the caller tells the other ranks)."""
    access = os.O_RDWR if writer else os.O_RDONLY
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writer else 0)
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", access | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        mapping = mmap.mmap(own, size, flags=mmap.MAP_SHARED, prot=protection)
    except OSError:
        return None
    finally:
        os.close(own)
    with warnings.catch_warnings():
        # torch warns that a tensor over read-only memory must not be written; EngramTable.load sees to that.
        warnings.filterwarnings("ignore", message="The given buffer is not writable", category=UserWarning)
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
    loads = whole[size - _HEADER : size - _HEADER + ctypes.sizeof(ctypes.c_int64)].view(torch.int64)
    return SharedRows(whole[: rows * width].view(rows, width), writer, loads[0])
