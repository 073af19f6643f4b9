"""One safetensors file: its header, read and judged without the library.

The library reads a tensor whole, or through a mapping whose pages stay resident; a table of 94 GiB is read in pieces,
and for that the place of its bytes in the file is needed. Releases of the library that this package admits (0.4.3 on)
do not know F8_E8M0 either. The format: a length (8 bytes, little-endian), a JSON object of that length, then the
tensors' bytes, row-major.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from engram_core.errors import CheckpointError

# The limit of the safetensors library itself.
_MOST_HEADER: Final = 100_000_000
_LENGTH: Final = 8
_METADATA: Final = "__metadata__"

ITEM_BYTES: Final = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F32": 4}
"""Bytes of an element, of the dtypes that an Engram tensor may have (the format's own names)."""


@dataclass(frozen=True)
class Stored:
    """One tensor's place: ``nbytes`` bytes at ``offset`` of ``file``; ``dtype`` by the format's own name."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclass(frozen=True)
class ShardFile:
    """``tensors``: all that the header names; ``size``: bytes of the file; ``modified``: its mtime in ns."""

    path: Path
    size: int
    modified: int
    tensors: dict[str, Stored]

    @classmethod
    def read(cls, path: Path) -> ShardFile:
        """Read the header alone.

        Raises :class:`CheckpointError` for a file that is missing, is no safetensors file, or is not as long as its
        header says (nearly always: truncated), naming the file, what came and what is needed.
        """
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                entries, base = _header(path, file, status.st_size)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}; a readable safetensors file is needed") from None
        tensors = {name: _stored(path, name, entry, base) for name, entry in entries.items() if name != _METADATA}
        end = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=base)
        if end != status.st_size:
            what = "truncated" if end > status.st_size else "too long"
            raise CheckpointError(f"{path}: {what}: has {status.st_size} bytes; its header needs {end}")
        return cls(path, status.st_size, status.st_mtime_ns, tensors)


def write_header(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The head of a safetensors file whose tensors (dtype and shape by name) follow in this order, without gaps."""
    entries: dict[str, Any] = {_METADATA: metadata} if metadata else {}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + math.prod(shape) * ITEM_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH)  # the data begins at a multiple of 8
    return len(text).to_bytes(_LENGTH, "little") + text


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """The JSON object, and where the tensors' bytes begin."""
    length = int.from_bytes(file.read(_LENGTH), "little")
    if size < _LENGTH or length > _MOST_HEADER:
        raise CheckpointError(
            f"{path}: not a safetensors file: has {size} bytes, and the first 8 give a header of {length}"
        )
    base = _LENGTH + length
    if base > size:
        raise CheckpointError(f"{path}: truncated: has {size} bytes; its header alone needs {base}")
    try:
        entries = json.loads(file.read(length))
    except ValueError as error:
        raise CheckpointError(f"{path}: not a safetensors file: its header is no JSON ({error})") from None
    if not isinstance(entries, dict):
        raise CheckpointError(
            f"{path}: not a safetensors file: its header is a {type(entries).__name__}, not an object"
        )
    return entries, base


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointError(
            f"{path}: {name}: its entry is {entry!r}; dtype, shape and data_offsets are needed"
        ) from None
    if not isinstance(dtype, str) or not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{path}: {name}: its entry is {entry!r}; a dtype, and numbers from 0 on, are needed")
    if dtype in ITEM_BYTES and math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
        raise CheckpointError(
            f"{path}: {name}: {dtype} {list(shape)} needs {math.prod(shape) * ITEM_BYTES[dtype]} bytes; its header "
            f"gives it {end - begin}"
        )
    return Stored(name, path, dtype, shape, base + begin, end - begin)
