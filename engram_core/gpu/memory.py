"""Host memory for a table: its own size and no more, in huge pages where the system has them, all there at once.

A page-locked allocation of torch rounds up to a power of two (a table of 94 GiB would take 128), so memory is mapped
plainly and registered. Pages are touched before that, by all threads and with a progress bar: registering untouched
memory would do it on one thread, and silently.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import torch

from engram_core.checkpoint.progress import byte_progress
from engram_core.errors import TableError
from engram_core.shared import available_memory

_PIECE: Final = 2**30
_SHOWN: Final = 4 * 2**30


def host_rows(rows: int, width: int) -> torch.Tensor:
    """Zero rows ``[rows, width]`` uint8. Raises :class:`TableError` with the numbers where they don't fit."""
    nbytes = rows * width
    if nbytes == 0:
        return torch.empty(rows, width, dtype=torch.uint8, device="cpu")
    _check_room(nbytes, nbytes)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise TableError(f"placement: 'host': {nbytes} bytes can't be mapped ({error.strerror})") from None
    # A system without them refuses the advice: the table is the same, only slower to make.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    with byte_progress("host table", nbytes, enabled=nbytes >= _SHOWN) as advance:
        for begin in range(0, nbytes, _PIECE):
            _check_room(nbytes - begin, nbytes)  # again: other ranks of the node take theirs at the same time
            advance(whole[begin : begin + _PIECE].zero_().numel())
    return whole.view(rows, width)


def _check_room(left: int, nbytes: int) -> None:
    """Touching more than there is would not fail: the system would kill the process."""
    if left > (free := available_memory()):
        raise TableError(
            f"placement: 'host' needs {nbytes} bytes of host memory, {left} of them still to be had, and {free} are "
            f"free; more memory for this machine or container, placement 'shared' (one copy for all ranks of a node) "
            f"or placement 'file' mends it"
        )
