"""Text by the gigabyte: files, folders and standard input as documents of at most about a megabyte.

A long file is read piece by piece, cut at the end of a line, so that neither the text nor its tokens need memory that
grows with it. Each piece is a document: the few n-grams that lie across a cut are not counted.
"""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from engram_core.cli.failure import CliError

PIECE_BYTES: Final = 2**20
_NEED: Final = "hot-rows needs UTF-8 text"


@dataclass(frozen=True)
class Document:
    """``content``: what was read, with ``nbytes`` bytes; may be white space alone."""

    content: str
    nbytes: int


@dataclass
class Corpus:
    """``named``: files that the user named, None for standard input: one that is no text is an error.

    ``found``: files of folders: what is no text is counted in ``skipped`` and left out. ``files``: those that were
    read. ``nbytes``: of all of them, None where one does not say. Raises :class:`CliError` for what is not there.
    """

    named: list[Path | None]
    found: list[Path]
    nbytes: int | None
    files: int = 0
    skipped: list[Path] = field(default_factory=list)

    @classmethod
    def of(cls, paths: Sequence[str]) -> Corpus:
        named: list[Path | None] = []
        found: list[Path] = []
        nbytes: int | None = 0
        for name in paths:
            if name == "-":
                if sys.stdin is None or sys.stdin.closed:
                    raise CliError("standard input is closed; hot-rows - reads text from it")
                if None in named:
                    raise CliError("standard input (-) is given twice; it can be read once")
                named.append(None)
                nbytes = None
                continue
            path = Path(name)
            size: int | None
            try:
                state = path.stat()
                if stat.S_ISDIR(state.st_mode):
                    files = list(_walk(path))
                    found += files
                    size = sum(file.stat().st_size for file in files)
                else:
                    named.append(path)
                    size = state.st_size if stat.S_ISREG(state.st_mode) else None
            except OSError as error:
                raise CliError(f"{error.filename or path}: {error.strerror or error}; {_NEED}") from None
            nbytes = None if nbytes is None or size is None else nbytes + size
        return cls(named, found, nbytes)

    def documents(self) -> Iterator[Document]:
        """Every document in the order of the paths given, those of folders last, by name."""
        for path in self.named:
            yield from _file(path)
            self.files += 1
        for path in self.found:
            try:
                for _ in _file(path):  # whole, before any of it is counted
                    pass
            except CliError:
                self.skipped.append(path)
            else:
                yield from _file(path)
                self.files += 1


def _walk(folder: Path) -> Iterator[Path]:
    """Regular files, hidden ones and links left out (a link's text would be counted twice), by name."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(parent, name)
            if not name.startswith(".") and stat.S_ISREG(path.lstat().st_mode):
                yield path


def _file(path: Path | None) -> Iterator[Document]:
    source = "standard input" if path is None else str(path)
    try:
        with nullcontext(sys.stdin.buffer) if path is None else open(path, "rb") as file:
            yield from _pieces(file, source)
    except OSError as error:
        raise CliError(f"{source}: {error.strerror or error}; {_NEED}") from None


def _pieces(file: BinaryIO, source: str) -> Iterator[Document]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()  # holds back a character that is not whole yet
    done, last = 0, False
    while not last:
        raw = file.read(PIECE_BYTES)
        raw += file.readline(PIECE_BYTES)  # to the end of a line, if it has one
        last = not raw
        done += len(raw)
        try:
            content = decoder.decode(raw, final=last)
        except UnicodeDecodeError as error:
            place = done - len(error.object) + error.start
            byte = error.object[error.start]
            raise CliError(f"{source}: not UTF-8: byte 0x{byte:02x} at offset {place}; {_NEED}") from None
        if "\0" in content:
            raise CliError(f"{source}: binary: a zero byte before offset {done}; {_NEED}")
        if content:
            yield Document(content, len(raw))
