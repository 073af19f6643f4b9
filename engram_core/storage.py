"""Where one rank's packed rows live: device memory, host memory or a mapped file (shared memory: ``shared.py``)."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch

from engram_core.errors import TableError
from engram_core.exchange import Shard
from engram_core.specs import TableSpec

# Linux: don't charge a private mapping of a huge file to the commit limit; Python names the flag only from 3.13 on.
_MAP_NORESERVE = 0x4000


def allocate(spec: TableSpec, shard: Shard, device: torch.device) -> torch.Tensor:
    """This rank's packed rows ``[shard.rows, W]`` uint8: zero rows, or those of ``spec.path``.

    Raises :class:`TableError` with the numbers where the memory or the file does not fit.
    """
    if spec.placement == "device":
        return torch.zeros(shard.rows, spec.width, dtype=torch.uint8, device=device)
    if spec.placement == "host":
        return torch.zeros(shard.rows, spec.width, dtype=torch.uint8, device="cpu")
    assert spec.path is not None  # TableSpec holds it to that
    return map_file(spec.path, spec.rows, spec.width)[shard.row_start : shard.row_stop]


def map_file(path: str | Path, rows: int, width: int) -> torch.Tensor:
    """A file of ``rows`` packed rows of ``width`` bytes, mapped: ``[rows, width]`` uint8.

    The mapping is private: the pages are the page cache's until something is written to the tensor, and then the change
    stays in this process; the file is never written.
    """
    try:
        with open(path, "rb") as file:
            size, need = os.fstat(file.fileno()).st_size, rows * width
            if size != need:
                raise TableError(
                    f"{path}: has {size} bytes; a table of {rows} packed rows of {width} bytes needs exactly {need}"
                )
            mapping = mmap.mmap(
                file.fileno(),
                need,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
    except OSError as error:
        raise TableError(f"{path}: {error.strerror or error}; a file of packed rows is needed") from None
    mapping.madvise(mmap.MADV_RANDOM)  # hashed ids: reading ahead would only evict rows that were wanted
    return torch.frombuffer(mapping, dtype=torch.uint8).view(rows, width)
