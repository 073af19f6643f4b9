"""The command line in this process, and a model and tokenizer small enough to run in a moment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from small_model import WORDS, hf_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engram_core.cli import main


class Done(NamedTuple):
    """What a command left: its exit code, standard output and standard error."""

    code: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on standard error, without the program's name."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("engram-core: ")
        return lines[0].removeprefix("engram-core: ")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def call(*args: object) -> Done:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        return Done(code, *capsys.readouterr())

    return call


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.Fuse()
    path = tmp_path / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(hf_config(**changes)), encoding="utf-8")
        return path

    return write


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("The lamp and the sea and THE log book . café and cafe again and again .\n" * 3, encoding="utf-8")
    return path


@pytest.fixture
def small(text: Path, tokenizer: Path, config_file: Callable[..., Path]) -> list[str]:
    """Arguments of a run that takes a moment: everything small, everything given."""
    return ["run", "--text", str(text), "--tokenizer", str(tokenizer), "--config", str(config_file())]
