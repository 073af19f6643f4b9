"""A checkpoint's table to the packed file that placement "file" maps: can be interrupted, and goes on where it was.

Rows are written to ``.partial`` in chunks. A chunk is noted in a journal, with its checksum, only when it is on the
disk; what the journal holds is therefore never written again, and what it does not hold always is. The file gets its
name last, when everything is on the disk: a killed run, or a lost machine, leaves nothing that looks whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from engram_core.checkpoint.packed import FORMAT, PackedFile, packed_path, sidecar_path
from engram_core.checkpoint.pieces import PIECE_BYTES, read_rows
from engram_core.checkpoint.progress import byte_progress
from engram_core.errors import CheckpointError, TableError
from engram_core.formats import packed_width, unpack_rows

if TYPE_CHECKING:
    from engram_core.checkpoint.layers import LayerTensors
    from engram_core.checkpoint.shard import Stored

_SHA_HEX: Final = 64


def pack_table(
    tensors: LayerTensors, folder: str | Path, *, progress: bool = True, chunk_rows: int | None = None
) -> PackedFile:
    """Write one layer's table to ``folder``, or go on where an earlier run stopped; return the finished file.

    ``chunk_rows``: rows of a chunk (default: 32 MiB of them). A file that is there already, of this very source, is
    returned as it is. Raises :class:`TableError` where there is another one, where another run is at work, or where the
    disk is too small, with the numbers; :class:`CheckpointError` where the source can't be read.
    """
    codes, scales = tensors.codes, tensors.scales
    if codes is None or scales is None:
        raise CheckpointError(f"layer {tensors.layer_id}: no table in this checkpoint; its rows are needed")
    rows, head_dim = codes.shape
    chunk = max(1, PIECE_BYTES // packed_width(head_dim)) if chunk_rows is None else chunk_rows
    plan: dict[str, Any] = {
        "layer_id": tensors.layer_id,
        "rows": rows,
        "head_dim": head_dim,
        "chunk_rows": chunk,
        "source": {"codes": _origin(codes), "scales": _origin(scales)},
    }
    target = packed_path(folder, tensors.layer_id)
    partial = target.with_name(target.name + ".partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _journal(target.with_name(partial.name + ".journal")) as (journal, path):
            if target.exists():
                return _finished(target, plan, [path, partial])
            checksums = _resume(journal, path, partial, plan)
            _check_space(target.parent, partial, rows * packed_width(head_dim))
            _write(codes, scales, partial, journal, checksums, chunk, progress)
            packed = PackedFile(target, checksums=tuple(checksums), **plan)
            _publish(packed, partial)
            path.unlink()
    except OSError as error:
        raise TableError(f"{error.filename or partial}: {error.strerror or error}") from None
    return packed


def _origin(tensor: Stored) -> dict[str, Any]:
    """Enough to notice that a source has changed: a model trained further has the same header."""
    status = tensor.file.stat()
    return {
        "file": tensor.file.name,
        "tensor": tensor.name,
        "offset": tensor.offset,
        "file_bytes": status.st_size,
        "modified_ns": status.st_mtime_ns,
    }


@contextmanager
def _journal(path: Path) -> Iterator[tuple[FileIO, Path]]:
    """The journal, open and locked: two runs into one file would mix their chunks."""
    with open(path, "a+b", buffering=0) as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TableError(f"{path}: another run is packing this table; wait for it, or end it") from None
        yield journal, path


def _finished(target: Path, plan: dict[str, Any], leftovers: list[Path]) -> PackedFile:
    for path in leftovers:
        path.unlink(missing_ok=True)
    packed = PackedFile.open(target)
    held = {key: getattr(packed, key) for key in plan if key != "chunk_rows"}
    wanted = {key: value for key, value in plan.items() if key != "chunk_rows"}
    if held != wanted:
        key = next(key for key in wanted if held[key] != wanted[key])
        raise TableError(
            f"{target}: is there already, of another source: {key} is {held[key]}, and would be {wanted[key]}; remove "
            f"it to pack anew"
        )
    return packed


def _resume(journal: FileIO, path: Path, partial: Path, plan: dict[str, Any]) -> list[str]:
    """The checksums of the chunks that are on the disk; a new journal is begun where there is none."""
    journal.seek(0)
    head, *lines = journal.read().split(b"\n")
    opening = json.dumps({"format": FORMAT, **plan}).encode()
    if not lines:  # new, or killed within its first line
        journal.truncate(0)
        journal.write(opening + b"\n")
        partial.unlink(missing_ok=True)
        return []
    if head != opening:
        raise TableError(
            f"{path}: belongs to another source, or to another chunk size; remove it to pack this one anew"
        )
    lines.pop()  # what follows the last line end: nothing, or a line cut short
    checksums = [line.decode("ascii", "replace") for line in lines]
    if not all(len(line) == _SHA_HEX for line in checksums):
        raise TableError(f"{path}: damaged; remove it to pack this one anew")
    journal.truncate(len(opening) + 1 + len(checksums) * (_SHA_HEX + 1))
    need = min(len(checksums) * plan["chunk_rows"], plan["rows"]) * packed_width(plan["head_dim"])
    have = partial.stat().st_size if partial.exists() else 0
    if have < need:
        raise TableError(f"{partial}: has {have} bytes; its journal says {need}; remove {path.name} to pack it anew")
    return checksums


def _check_space(folder: Path, partial: Path, need: int) -> None:
    left = need - (partial.stat().st_size if partial.exists() else 0)
    free = shutil.disk_usage(folder).free
    if left > free:
        raise TableError(f"{folder}: has {free} bytes free; {left} more are needed for a table of {need}")


def _write(
    codes: Stored,
    scales: Stored,
    partial: Path,
    journal: FileIO,
    checksums: list[str],
    chunk: int,
    progress: bool,
) -> None:
    rows, head_dim = codes.shape
    width = packed_width(head_dim)
    buffer = torch.empty(min(chunk, rows), width, dtype=torch.uint8)
    first = min(len(checksums) * chunk, rows)
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        with byte_progress(f"packing {partial.stem}", rows * width, progress, done=first * width) as report:
            pieces = read_rows(codes, scales, first, rows, report, piece_rows=chunk, drop_cache=True)
            for start, code_bytes, scale_bytes in pieces:
                packed = buffer[: code_bytes.shape[0]]
                values, exponents = unpack_rows(packed)
                values.view(torch.uint8).copy_(code_bytes)
                exponents.copy_(scale_bytes)
                data = packed.view(-1).numpy().data
                _write_at(descriptor, partial, data, start * width)
                os.fdatasync(descriptor)
                os.posix_fadvise(descriptor, start * width, len(data), os.POSIX_FADV_DONTNEED)
                checksums.append(hashlib.sha256(data).hexdigest())
                journal.write(checksums[-1].encode() + b"\n")
        os.ftruncate(descriptor, rows * width)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, path: Path, data: memoryview, offset: int) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(descriptor, data[done:], offset + done)
        except OSError as error:
            raise TableError(
                f"{path}: {error.strerror or error} at byte {offset + done}; the same command goes on from here"
            ) from None


def _publish(packed: PackedFile, partial: Path) -> None:
    """The JSON first: a file of rows under its own name always has one."""
    beside = sidecar_path(packed.path)
    draft = beside.with_name(beside.name + ".partial")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(packed.sidecar())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, beside)
    os.replace(partial, packed.path)
    folder = os.open(packed.path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
