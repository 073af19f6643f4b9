"""Packing: interrupted, resumed, damaged, refused; what it makes opens at once."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engram_core import EngramMemory
from engram_core.checkpoint import Checkpoint, LayerTensors, PackedFile, pack_table
from engram_core.errors import CheckpointError, TableError

Load = Callable[..., EngramMemory]
CHUNK = 100


def test_it_holds_the_packed_rows_and_says_what_they_are(
    source: LayerTensors, out: Path, expected: EngramMemory
) -> None:
    packed = pack_table(source, out, chunk_rows=CHUNK)
    assert packed.path == out / "engram-layer-1.rows"
    assert packed.path.read_bytes() == expected.layers[1].table.packed.numpy().tobytes()
    assert sorted(path.name for path in out.iterdir()) == ["engram-layer-1.rows", "engram-layer-1.rows.json"]
    held = json.loads((out / "engram-layer-1.rows.json").read_text())
    assert (held["layer_id"], held["rows"], held["head_dim"], held["chunk_rows"]) == (1, 2056, 64, CHUNK)
    assert len(held["checksums"]) == 21
    assert PackedFile.open(packed.path) == packed
    assert packed.damaged() == []


def test_the_chunk_size_does_not_matter_to_the_file(source: LayerTensors, tmp_path: Path) -> None:
    files = [pack_table(source, tmp_path / str(chunk), chunk_rows=chunk) for chunk in (None, 7, 5000)]
    assert len({file.path.read_bytes() for file in files}) == 1


def test_a_second_run_finds_it_done(source: LayerTensors, out: Path) -> None:
    first = pack_table(source, out, chunk_rows=CHUNK)
    written = first.path.stat().st_mtime_ns
    assert pack_table(source, out) == first
    assert first.path.stat().st_mtime_ns == written
    assert len(list(out.iterdir())) == 2


class _StopError(Exception):
    pass


def stop_after(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the run die after so many chunks, between the data and the journal of the next one."""
    usual, count = os.fdatasync, iter(range(10**9))

    def fdatasync(descriptor: int) -> None:
        usual(descriptor)
        if next(count) == chunks:
            raise _StopError

    monkeypatch.setattr(os, "fdatasync", fdatasync)


def test_an_interrupted_run_goes_on_where_it_was(
    folder: Path, source: LayerTensors, out: Path, expected: EngramMemory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(8, patch)
        with pytest.raises(_StopError):
            pack_table(source, out, chunk_rows=CHUNK)
    assert sorted(path.name for path in out.iterdir()) == [
        "engram-layer-1.rows.partial",
        "engram-layer-1.rows.partial.journal",
    ]
    with open(out / "engram-layer-1.rows.partial.journal", "ab") as journal:
        journal.write(b"0123")  # a line cut short
    written: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        usual = os.pwrite
        patch.setattr(os, "pwrite", lambda fd, data, at: (written.append(at), usual(fd, data, at))[1])
        packed = pack_table(source, out, chunk_rows=CHUNK)
    assert written == [at * CHUNK * 66 for at in range(8, 21)]
    assert packed.path.read_bytes() == expected.layers[1].table.packed.numpy().tobytes()
    assert packed.damaged() == []
    assert len(list(out.iterdir())) == 2


KILLED = """
import os, sys, time
from engram_core.checkpoint import Checkpoint, pack_table
usual = os.fdatasync
def slow(descriptor):
    usual(descriptor)
    time.sleep(0.05)
os.fdatasync = slow
pack_table(Checkpoint.open(sys.argv[1]).layers()[1], sys.argv[2], chunk_rows=100)
"""


def test_a_killed_run_leaves_nothing_that_looks_whole(
    folder: Path, source: LayerTensors, out: Path, load: Load, expected: EngramMemory
) -> None:
    journal = out / "engram-layer-1.rows.partial.journal"
    for at_least in (2, 9):  # killed twice, each time further on
        process = subprocess.Popen([sys.executable, "-W", "error", "-c", KILLED, str(folder), str(out)])
        try:
            deadline = time.monotonic() + 60
            while not journal.exists() or journal.read_bytes().count(b"\n") <= at_least:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert {path.suffix for path in out.iterdir()} == {".partial", ".journal"}
        with pytest.raises(TableError, match="engram-layer-1.rows: No such file or directory; a packed table is need"):
            load(folder, placement="file", table_path=out, layer_ids=(1,))
    done = journal.read_bytes().count(b"\n") - 1
    packed = pack_table(source, out, chunk_rows=CHUNK)
    assert 9 <= done < len(packed.checksums)
    assert packed.damaged() == []
    memory = load(folder, placement="file", table_path=out, layer_ids=(1,))
    assert torch.equal(memory.layers[1].table.packed, expected.layers[1].table.packed)


def test_died_between_the_two_renames(source: LayerTensors, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        usual = os.replace
        patch.setattr(os, "replace", lambda a, b: usual(a, b) if str(b).endswith("json") else _raise())
        with pytest.raises(_StopError):
            pack_table(source, out, chunk_rows=CHUNK)
    assert not (out / "engram-layer-1.rows").exists()
    with pytest.raises(TableError):
        PackedFile.open(out / "engram-layer-1.rows")
    assert pack_table(source, out, chunk_rows=CHUNK).damaged() == []
    assert len(list(out.iterdir())) == 2


def _raise() -> None:
    raise _StopError


def test_damage_is_found_and_named(source: LayerTensors, out: Path) -> None:
    packed = pack_table(source, out, chunk_rows=CHUNK)
    with open(packed.path, "r+b") as file:
        file.seek(5 * CHUNK * 66 + 3)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    assert packed.damaged() == [5]


def test_two_runs_at_once_are_refused(source: LayerTensors, out: Path) -> None:
    out.mkdir()
    with open(out / "engram-layer-1.rows.partial.journal", "ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(TableError, match=r"journal: another run is packing this table"):
            pack_table(source, out)


@pytest.mark.parametrize("finished", [True, False])
def test_a_source_that_changed_is_noticed(
    folder: Path, source: LayerTensors, out: Path, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model trained further has the same sizes and the same header."""
    if finished:
        pack_table(source, out, chunk_rows=CHUNK)
    else:
        with pytest.MonkeyPatch.context() as patch:
            stop_after(3, patch)
            with pytest.raises(_StopError):
                pack_table(source, out, chunk_rows=CHUNK)
    assert source.codes is not None
    os.utime(source.codes.file, ns=(1, 1))
    said = "is there already, of another source: source is" if finished else "journal: belongs to another source"
    with pytest.raises(TableError, match=said):
        pack_table(Checkpoint.open(folder).layers()[1], out, chunk_rows=CHUNK)


def test_a_partial_file_shorter_than_its_journal(source: LayerTensors, out: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(3, patch)
        with pytest.raises(_StopError):
            pack_table(source, out, chunk_rows=CHUNK)
    with open(out / "engram-layer-1.rows.partial", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(TableError, match=rf"partial: has 1000 bytes; its journal says {3 * CHUNK * 66}; remove engram"):
        pack_table(source, out, chunk_rows=CHUNK)


def test_a_disk_that_is_too_small(source: LayerTensors, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(TableError, match=rf"packed: has 1000 bytes free; {2056 * 66} more are needed"):
        pack_table(source, out)


def test_a_disk_that_fills_up(source: LayerTensors, out: Path, expected: EngramMemory) -> None:
    with pytest.MonkeyPatch.context() as patch:
        usual = os.pwrite

        def full(descriptor: int, data: memoryview, offset: int) -> int:
            if offset >= 10000:
                raise OSError(28, "No space left on device")
            return usual(descriptor, data[: 10000 - offset], offset)

        patch.setattr(os, "pwrite", full)
        with pytest.raises(TableError, match="No space left on device at byte 10000; the same command goes on from he"):
            pack_table(source, out, chunk_rows=CHUNK)
    packed = pack_table(source, out, chunk_rows=CHUNK)
    assert packed.path.read_bytes() == expected.layers[1].table.packed.numpy().tobytes()


def test_a_place_that_can_not_be_written(source: LayerTensors, folder: Path) -> None:
    with pytest.raises(TableError, match="config.json/x: Not a directory"):
        pack_table(source, folder / "config.json" / "x")


def test_rows_without_what_says_what_they_are(source: LayerTensors, out: Path) -> None:
    out.mkdir()
    (out / "engram-layer-1.rows").write_bytes(b"")
    with pytest.raises(TableError, match="rows.json: No such file or directory; a packed table is needed"):
        pack_table(source, out)
    assert len(list(out.iterdir())) == 1


def test_a_checkpoint_without_the_table(folder: Path, out: Path) -> None:
    with pytest.raises(CheckpointError, match="^layer 1: no table in this checkpoint"):
        pack_table(Checkpoint.open(folder).layers(tables=False)[1], out)
