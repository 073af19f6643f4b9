"""engram-core hot-rows: text in, a file of counts out, or one line and nothing."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from tokenizers import Tokenizer

from engram_core import EngramConfig, HashLayout, TokenMap
from engram_core.cli import corpus
from engram_core.hot import HotRows
from engram_core.hot_count import RowCounter

Cli = Callable[..., Any]
LINES = ("The lamp and the sea and THE log book .\n", "café and cafe again and again .\n", "sea sea lamp .\n")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "hot.safetensors"


@pytest.fixture
def given(tokenizer: Path, config_file: Callable[..., Path], out: Path) -> list[str]:
    """Arguments, but for the text: everything small, everything given."""
    out.parent.mkdir()
    return ["hot-rows", "--tokenizer", str(tokenizer), "--config", str(config_file()), "--out", str(out)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, one of them deep down, and what is left out."""
    made = tmp_path / "texts"
    (made / "b" / "c").mkdir(parents=True)
    (made / ".git").mkdir()
    (made / "a.txt").write_text(LINES[0] * 3, encoding="utf-8")
    (made / "b" / "c" / "d.py").write_text(LINES[1], encoding="utf-8")
    (made / "b" / "latin").write_bytes(b"the sea the sea caf\xe9\n")
    (made / "b" / "zero").write_bytes(b"the sea\0")
    (made / ".git" / "hidden").write_text("book book book")
    (made / "link").symlink_to(made / "a.txt")
    (made / "empty").touch()
    return made


def counted(given: list[str], texts: list[str]) -> HotRows:
    """What the file must hold."""
    config = EngramConfig.from_hf(given[4])
    counter = RowCounter(config, TokenMap.from_tokenizer(given[2], config.pad_token_id))
    counter.add_documents([Tokenizer.from_file(given[2]).encode(text).ids for text in texts])
    return counter.result()


def same(found: HotRows, expected: HotRows) -> bool:
    return (found.tokens, found.fingerprint, found.layer_ids) == (
        expected.tokens,
        expected.fingerprint,
        expected.layer_ids,
    ) and all(
        torch.equal(found.ids[i], expected.ids[i]) and torch.equal(found.counts[i], expected.counts[i])
        for i in found.layer_ids
    )


def test_a_folder(cli: Cli, given: list[str], folder: Path, out: Path) -> None:
    done = cli(*given, folder)
    assert (done.code, done.err) == (0, "")
    found = HotRows.load(out)
    assert same(found, counted(given, [LINES[0] * 3, LINES[1]]))
    config = EngramConfig.from_hf(given[4])
    found.check(HashLayout.from_config(config), TokenMap.from_tokenizer(given[2], config.pad_token_id))
    assert [file.name for file in out.parent.iterdir()] == [out.name]
    lines = done.out.splitlines()
    assert lines[0] == "37 tokens of 2 documents in 3 files; 2 files that are no UTF-8 text left out"
    assert lines[1].startswith("layer 1: 148 look-ups of ")
    assert lines[3] == "share of look-ups served, learnt on 30 tokens, measured on 7 of other documents:"
    assert lines[-1].startswith(f"{out}: 0.0 MiB, fingerprint {found.fingerprint[:16]}")


def test_as_data(cli: Cli, given: list[str], folder: Path, out: Path) -> None:
    data = json.loads(cli(*given, folder, "--json", "--layer", 14, "--rows", 5).out)
    found = HotRows.load(out)
    whole = counted(given, [LINES[0] * 3, LINES[1]])
    assert found.layer_ids == (14,)
    assert torch.equal(found.ids[14], whole.ids[14][:5])
    learnt, measured = counted(given, [LINES[0] * 3]), counted(given, [LINES[1]])
    rows = learnt.ids[14].numel()
    served = {"rows": rows, "bytes": rows * 33, "share": learnt.served(measured, 14, rows) / (7 * 4)}
    assert data["layers"] == [
        {
            "layer_id": 14,
            "lookups": 37 * 4,
            "distinct_rows": whole.ids[14].numel(),
            "dropped_rows": 0,
            "written_rows": 5,
            "served": [served],
        }
    ]
    assert data["skipped"] == [str(folder / "b" / "latin"), str(folder / "b" / "zero")]
    assert data["holdout"] == {"learnt_tokens": 30, "measured_tokens": 7}
    assert (data["tokens"], data["documents"], data["files"]) == (37, 2, 3)
    assert (data["out"], data["bytes"]) == (str(out), out.stat().st_size)
    assert 0 < served["share"] < 1


def test_every_other_document_is_held_out_and_all_are_written(cli: Cli, given: list[str], text: Path) -> None:
    paths = []
    for i, line in enumerate((LINES[0], LINES[2], LINES[1], LINES[2])):
        paths.append(text.with_name(f"{i}.txt"))
        paths[-1].write_text(line, encoding="utf-8")
    data = json.loads(cli(*given, *paths, "--json").out)
    assert data["holdout"] == {"learnt_tokens": 10 + 7, "measured_tokens": 4 + 4}
    assert same(HotRows.load(given[6]), counted(given, [LINES[0], LINES[1], LINES[2], LINES[2]]))
    done = cli(*given, *paths, "--no-holdout")
    assert "no estimate of the share served: no document was held out" in done.out
    assert same(HotRows.load(given[6]), counted(given, [LINES[0], LINES[1], LINES[2], LINES[2]]))


def test_one_document_leaves_nothing_to_measure(cli: Cli, given: list[str], text: Path) -> None:
    data = json.loads(cli(*given, text, "--json").out)
    assert data["holdout"] is None
    assert [layer["served"] for layer in data["layers"]] == [[], []]


def test_standard_input(cli: Cli, given: list[str], monkeypatch: pytest.MonkeyPatch, out: Path) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES[1].encode())))
    assert cli(*given, "-").code == 0
    assert same(HotRows.load(out), counted(given, [LINES[1]]))


@pytest.mark.parametrize("piece", [1, 2, 5, 40, 10_000])
def test_a_long_text_is_read_in_pieces(
    cli: Cli, given: list[str], text: Path, out: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    """Cut behind a line; a line that is too long, anywhere but inside a character."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", piece)
    content = "é" * 9 + "\n" + "".join(LINES)
    text.write_text("\ufeff" + content, encoding="utf-8")
    pieces = [document.content for document in corpus.Corpus.of([str(text)]).documents()]
    assert "".join(pieces) == content
    assert all(len(part.encode()) <= 2 * piece + 3 for part in pieces)
    assert (len(pieces) > 1) == (piece < 10_000)
    assert cli(*given, text).code == 0
    if piece == 40:
        assert same(HotRows.load(out), counted(given, pieces))


def test_rare_rows_are_dropped(
    cli: Cli, given: list[str], folder: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_core.cli.hot_rows._LEAST_KEPT", 8)
    done = cli(*given, folder, "--rows", 3)
    assert "look-ups of more than" in done.out
    assert HotRows.load(out).ids[1].numel() == 3


BAD = {
    "missing": (None, "{path}: No such file or directory; hot-rows needs UTF-8 text"),
    "not UTF-8": (b"caf\xe9 \n", "{path}: not UTF-8: byte 0xe9 at offset 3; hot-rows needs UTF-8 text"),
    "cut off in a character": (b"the caf\xc3", "{path}: not UTF-8: byte 0xc3 at offset 7; hot-rows needs UTF-8 text"),
    "binary": (b"the sea\0the sea", "{path}: binary: a zero byte before offset 15; hot-rows needs UTF-8 text"),
    "empty": (b"", "{path}: no text in 1 files; hot-rows needs some"),
    "white space": (b" \n \n", "{path}: no text in 1 files; hot-rows needs some"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("flags", [[], ["--json", "--no-holdout"]], ids=["text", "json"])
def test_bad_text(cli: Cli, given: list[str], text: Path, out: Path, name: str, flags: list[str]) -> None:
    content, message = BAD[name]
    text.unlink()
    if content is not None:
        text.write_bytes(content)
    done = cli(*given, text, *flags)
    assert (done.code, done.out, done.line) == (2, "", message.format(path=text))
    assert not list(out.parent.iterdir())


def test_bad_text_behind_good_text(
    cli: Cli, given: list[str], text: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "PIECE_BYTES", 10)
    text.write_bytes(b"the sea the sea\n" * 10 + b"the \xff")
    done = cli(*given, text)
    assert (done.code, done.out) == (2, "")
    assert done.line == f"{text}: not UTF-8: byte 0xff at offset 164; hot-rows needs UTF-8 text"
    assert not list(out.parent.iterdir())


def test_a_text_is_not_written_over(cli: Cli, given: list[str], text: Path) -> None:
    before = text.read_bytes()
    done = cli(*given, text, "--out", text)
    assert (done.code, done.line) == (2, f"{text}: is one of the texts; --out needs another file")
    assert text.read_bytes() == before


def test_unreadable_text(cli: Cli, given: list[str], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> BinaryIO:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(corpus, "open", refuse, raising=False)  # and no mode of the file: root reads every one
    assert cli(*given, text).line == f"{text}: Permission denied; hot-rows needs UTF-8 text"


def test_a_read_that_fails(cli: Cli, given: list[str], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Iterator[Any]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(corpus, "_pieces", fail)
    done = cli(*given, text)
    assert (done.code, done.line) == (2, f"{text}: Input/output error; hot-rows needs UTF-8 text")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert cli(*given, "-").line == "standard input: Input/output error; hot-rows needs UTF-8 text"


def test_closed_or_doubled_standard_input(cli: Cli, given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli(*given, "-", "-").line == "standard input (-) is given twice; it can be read once"
    monkeypatch.setattr(sys, "stdin", None)
    assert cli(*given, "-").line == "standard input is closed; hot-rows - reads text from it"


def test_bad_options(cli: Cli, given: list[str], text: Path, tmp_path: Path, out: Path) -> None:
    for place, said in (
        (out.parent, "is a folder; --out needs the name of a file"),
        (tmp_path / "no" / "file", "no such folder; --out needs one that is there"),
    ):
        done = cli(*given[:-1], place, text)
        assert done.code == 2
        assert said in done.line
    done = cli(*given, text, "--layer", 3)
    assert (done.code, done.line) == (
        2,
        "--layer: layer_ids: got [3]; need Engram layers of the model, [1, 14]",
    )
    assert cli(*given, text, "--rows", 0).code == 2
    assert cli(*given).code == 2
    assert cli(*given[:3], text, "--out", out).line.startswith(f"{given[2]}: token_map: has 11 compressed ids")
    assert not list(out.parent.iterdir())


def test_a_write_that_fails(cli: Cli, given: list[str], text: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out.write_bytes(b"the old one")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    done = cli(*given, text)
    assert (done.code, done.out) == (2, "")
    assert done.line == f"{out}: can't be written (No space left on device)"
    assert [file.read_bytes() for file in out.parent.iterdir()] == [b"the old one"]


def test_out_of_memory(cli: Cli, given: list[str], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(RowCounter, "add_documents", fail)
    assert cli(*given, text).line == "out of memory; pass smaller --rows, or one --layer at a time"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_run_that_is_stopped_leaves_no_file(given: list[str], out: Path, number: signal.Signals, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "engram_core", *given, "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A job in the background is started with SIGINT ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdin is not None
        child.stdin.write("".join(LINES).encode() * 20_000)  # more than one piece: some of it is counted
        child.stdin.flush()
        status = Path(f"/proc/{child.pid}/wchan")
        deadline = time.monotonic() + 60
        while "pipe" not in status.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(number)
        said, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, said) == (code, b"")
    assert err.splitlines() == ([b"engram-core: interrupted"] if code == 130 else [])
    assert not list(out.parent.iterdir())


def test_help_loads_no_torch() -> None:
    code = (
        "import sys\nfrom engram_core.cli import main\nmain(['hot-rows', '--help'])\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "--no-holdout" in done.stdout


def test_the_progress_bar(cli: Cli, given: list[str], text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(LINES[0].encode())))
    assert "counting" in cli(*given, text).err
    assert "counting" in cli(*given, text, "-").err  # nobody knows how much comes
    assert cli(*given, text, "--quiet").err == ""


def test_threads_are_as_before(cli: Cli, given: list[str], text: Path) -> None:
    before = torch.get_num_threads()
    assert cli(*given, text).code == 0
    assert torch.get_num_threads() == before
