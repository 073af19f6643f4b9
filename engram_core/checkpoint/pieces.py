"""Reading tensors in pieces: a few reads in flight, in buffers that are used again, so that memory stays bounded.

Plain positioned reads, not a mapping: the pages of a mapping would count as this process's memory until the kernel
takes them back. What was read can be dropped from the page cache as it goes: beside a table in host memory, a cache of
the same 94 GiB would push out what is needed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Final

import torch

from engram_core.checkpoint.shard import Stored
from engram_core.errors import CheckpointError

PIECE_BYTES: Final = 2**25
"""Bytes of a piece (33 MB): long enough for any disk, and few of them are well under the memory bound."""
# Reads in flight: what one NVMe disk or network file system needs to reach its rate.
_DEPTH: Final = 4

_TORCH: Final = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}

Report = Callable[[int], None]
"""Called with the bytes just read."""


def read_rows(
    codes: Stored,
    scales: Stored,
    start: int,
    stop: int,
    report: Report,
    *,
    piece_rows: int | None = None,
    drop_cache: bool = False,
    pinned: bool = False,
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Rows ``[start, stop)`` of a table in order: first row, codes ``[n, D]`` and scales ``[n, D/32]``, both uint8.

    The tensors are valid until the next piece is asked for. ``piece_rows``: rows of a piece (default: 32 MiB of them).
    ``drop_cache``: drop what was read from the page cache. ``pinned``: page-locked buffers, for a copy to a device.
    Raises :class:`CheckpointError` where a file ends early.
    """
    parts = (codes, scales)
    widths = [tensor.nbytes // max(1, tensor.shape[0]) for tensor in parts]
    size = piece_rows if piece_rows is not None else max(1, PIECE_BYTES // sum(widths))
    size = min(size, max(1, stop - start))
    starts = range(start, stop, size)
    with ExitStack() as stack:
        files = [stack.enter_context(_Reader(tensor, drop_cache)) for tensor in parts]
        pool = stack.enter_context(ThreadPoolExecutor(_DEPTH, thread_name_prefix="engram-read"))
        free = [
            [torch.empty(size, width, dtype=torch.uint8, pin_memory=pinned) for width in widths]
            for _ in range(min(_DEPTH, len(starts)))
        ]
        flying: deque[tuple[int, list[torch.Tensor], Future[None]]] = deque()

        def fly(begin: int) -> None:
            count = min(size, stop - begin)
            buffers = free.pop()
            views = [buffer[:count] for buffer in buffers]
            task = pool.submit(_fill, files, views, [begin * width for width in widths])
            flying.append((begin, buffers, task))

        coming = iter(starts)
        for begin in coming:
            fly(begin)
            if not free:
                break
        while flying:
            begin, buffers, task = flying.popleft()
            task.result()
            count = min(size, stop - begin)
            report(count * sum(widths))
            yield begin, buffers[0][:count], buffers[1][:count]
            free.append(buffers)
            following = next(coming, None)
            if following is not None:
                fly(following)


def read_whole(tensor: Stored, report: Report, *, drop_cache: bool = False) -> torch.Tensor:
    """A small tensor (a WKV weight: 157 MB), in the dtype in which it is stored."""
    data = torch.empty(tensor.nbytes, dtype=torch.uint8)
    with _Reader(tensor, drop_cache) as reader:
        for begin in range(0, tensor.nbytes, PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            reader.read(begin, piece)
            report(piece.numel())
    return data.view(_TORCH[tensor.dtype]).view(tensor.shape)


def _fill(files: list[_Reader], views: list[torch.Tensor], offsets: list[int]) -> None:
    for file, view, offset in zip(files, views, offsets, strict=True):
        file.read(offset, view)


class _Reader:
    """An open file, read within one tensor's bytes."""

    def __init__(self, tensor: Stored, drop_cache: bool) -> None:
        self._tensor = tensor
        self._drop = drop_cache and hasattr(os, "posix_fadvise")

    def __enter__(self) -> _Reader:
        try:
            self._descriptor = os.open(self._tensor.file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{self._tensor}: {error.strerror or error}; it was there when checked") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self._drop:  # pieces leave the pages at their borders behind
            os.posix_fadvise(self._descriptor, self._tensor.offset, max(1, self._tensor.nbytes), os.POSIX_FADV_DONTNEED)
        os.close(self._descriptor)

    def read(self, offset: int, into: torch.Tensor) -> None:
        """Fill ``into`` (dense bytes) from ``offset`` of the tensor on."""
        view = into.view(-1).numpy().data
        begin, done = self._tensor.offset + offset, 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], begin + done)
            except OSError as error:
                raise CheckpointError(f"{self._tensor}: {error.strerror or error} at byte {begin + done}") from None
            if count == 0:
                raise CheckpointError(f"{self._tensor}: truncated while it was read: ends at byte {begin + done}")
            done += count
        if self._drop:
            os.posix_fadvise(self._descriptor, begin, len(view), os.POSIX_FADV_DONTNEED)
