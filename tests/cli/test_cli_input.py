"""Bad input: one line that names the file, the key and the value; the right exit code; no traceback."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_model import COMPRESSED, hf_config

from engram_core.cli import inputs, memory


def refused(done: Any, *parts: str) -> None:
    assert (done.code, done.out) == (2, "")
    for part in parts:
        assert part in done.line


TEXTS = {
    "empty": (b"", "{path}: empty; --text needs some text"),
    "white space": (b" \n\t\n", "{path}: 4 characters of white space; --text needs some text"),
    "byte order mark alone": ("\ufeff".encode(), "{path}: empty; --text needs some text"),
    "not UTF-8": (b"caf\xe9 \n", "{path}: not UTF-8: byte 0xe9 at offset 3; --text needs UTF-8 text"),
    "UTF-16": ("the".encode("utf-16"), "{path}: not UTF-8: byte 0xff at offset 0; --text needs UTF-8 text"),
    "too large": (b"a " * 2**19 + b"b", "{path}: larger than 1 MiB; --text needs a shorter text"),
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("json_flag", [[], ["--json"]], ids=["text", "json"])
def test_text(cli: Callable[..., Any], small: list[str], text: Path, name: str, json_flag: list[str]) -> None:
    content, message = TEXTS[name]
    text.write_bytes(content)
    done = cli(*small, *json_flag)
    assert (done.code, done.out, done.line) == (2, "", message.format(path=text))


def test_text_missing_and_folder(cli: Callable[..., Any], tmp_path: Path) -> None:
    missing = tmp_path / "no such"
    refused(cli("run", "--text", missing), f"{missing}: No such file or directory; --text needs a readable text file")
    refused(cli("run", "--text", tmp_path), f"{tmp_path}: Is a directory")


def test_text_without_a_token(cli: Callable[..., Any], small: list[str], text: Path, tokenizer: Path) -> None:
    made = json.loads(tokenizer.read_text())
    made["model"]["unk_token"] = "<unk>"
    made["normalizer"] = {"type": "Replace", "pattern": {"Regex": "."}, "content": ""}
    tokenizer.write_text(json.dumps(made))
    refused(cli(*small), f"{text}: the tokenizer makes no token of its")


@pytest.mark.parametrize("name", ["empty", "white space", "not UTF-8"])
def test_standard_input(cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    content, message = TEXTS[name]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
    small[small.index("--text") + 1] = "-"
    assert cli(*small).line == message.format(path="standard input")


def test_closed_standard_input(cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    small[small.index("--text") + 1] = "-"
    refused(cli(*small), "standard input is closed; --text - reads the text from it")


@pytest.mark.parametrize("key", hf_config())
def test_config_without_a_key(
    cli: Callable[..., Any], small: list[str], config_file: Callable[..., Path], key: str
) -> None:
    refused(cli(*small[:-1], path := config_file(**{key: None})), f"{path}: the key {key} is missing")


VALUES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "string for an int": ({"engram_n_heads": "8"}, ("engram_n_heads is '8' (str)", "integer")),
    "float for an int": ({"engram_vocab_size": 101.0}, ("engram_vocab_size is 101.0 (float)",)),
    "bool for an int": ({"hidden_size": True}, ("hidden_size is True (bool)",)),
    "int for a list": ({"engram_layer_ids": 1}, ("engram_layer_ids is 1 (int)",)),
    "string in a list": ({"engram_layer_ids": [1, "x"]}, ("engram_layer_ids[1] is 'x' (str)",)),
    "zero": ({"engram_head_dim": 0}, ("engram_head_dim is 0", "greater than 0")),
    "not a multiple of 32": ({"engram_head_dim": 40}, ("engram_head_dim is 40; a multiple of 32",)),
    "hc_mult": ({"hc_mult": 3}, ("hc_mult is 3; 1, 2, 4 or 8",)),
    "heads without end": ({"engram_n_heads": 10**9}, ("engram_n_heads is 1000000000", "256")),
    "negative eps": ({"rms_norm_eps": -1.0}, ("rms_norm_eps is -1.0",)),
    "pad outside the vocabulary": ({"engram_pad_token_id": 99}, ("pad_token_id", "99", "[0, 14)")),
}


@pytest.mark.parametrize("name", VALUES)
def test_config_with_a_wrong_value(
    cli: Callable[..., Any], small: list[str], config_file: Callable[..., Path], name: str
) -> None:
    changes, parts = VALUES[name]
    refused(cli(*small[:-1], config_file(**changes)), *parts)


def test_nested_config_names_its_place(cli: Callable[..., Any], small: list[str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": hf_config(engram_n_heads=None)}))
    refused(cli(*small), f"{path}: text_config: the key engram_n_heads is missing")


def test_table_smaller_than_its_primes(
    cli: Callable[..., Any], small: list[str], config_file: Callable[..., Path]
) -> None:
    path = config_file(engram_num_embeddings=[400, 500])
    refused(cli(*small[:-1], path), f"{path}: ", "num_embeddings", "layer 1 has 400 rows", "at least 4")


NOT_CONFIGS = {
    "not JSON": (b"{'a': 1}", "not JSON (line 1, column 2"),
    "cut off": (b'{"engram_n_heads": 8', "not JSON"),
    "empty": (b"", "not JSON"),
    "not an object": (b"[1, 2]", "holds a list; a JSON object is needed"),
    "no Engram": (b'{"hidden_size": 64}', "no engram_* key"),
    "not UTF-8": (b'{"a": "\xe9"}', "not UTF-8 (byte 7)"),
    "nested without end": (b"[" * 200_000, "not JSON (nested too deep)"),
    "number without end": (b'{"engram_n_heads": ' + b"9" * 5000 + b"}", "not JSON"),
}


@pytest.mark.parametrize("name", NOT_CONFIGS)
def test_not_a_config(cli: Callable[..., Any], small: list[str], tmp_path: Path, name: str) -> None:
    content, message = NOT_CONFIGS[name]
    path = tmp_path / "config.json"
    path.write_bytes(content)
    refused(cli(*small), f"{path}: {message}")


def test_config_missing(cli: Callable[..., Any], small: list[str], tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    refused(cli(*small[:-1], path), f"{path}: No such file or directory")
    (tmp_path / "folder").mkdir()
    refused(cli(*small[:-1], tmp_path / "folder"), f"{tmp_path / 'folder' / 'config.json'}: No such file")


def test_tables_that_do_not_fit(
    cli: Callable[..., Any], small: list[str], config_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 3 * 2**30)
    path = config_file(engram_vocab_size=16_000_000, engram_num_embeddings=[384_006_168, 384_016_682])
    done = cli(*small[:-1], path)
    refused(
        done,
        f"{path}: engram_num_embeddings asks for 768,022,850 rows x 33 bytes over 2 layers",
        "23.6 GiB; 3.0 GiB are free on cpu; pass a smaller engram_vocab_size: --vocab-size 20000",
    )
    assert cli(*small[:-1], path, "--vocab-size", 101).code == 0


def test_tokenizer_of_another_size(
    cli: Callable[..., Any], small: list[str], config_file: Callable[..., Path], tokenizer: Path
) -> None:
    path = config_file(engram_compressed_vocab_size=99_092)
    refused(cli(*small[:-1], path), f"{tokenizer}: ", f"has {COMPRESSED} compressed ids", "is 99092")


def test_not_a_tokenizer(cli: Callable[..., Any], small: list[str], tokenizer: Path, tmp_path: Path) -> None:
    tokenizer.write_text("{}")
    refused(cli(*small), f"{tokenizer}: not a tokenizer.json")
    tokenizer.unlink()
    refused(cli(*small), f"{tokenizer}: no such file; a tokenizer.json is needed")


def test_demo_extra_missing(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    refused(cli("run"), "the DeepSeek V4 tokenizer is not installed", "extra demo", "--tokenizer FILE")


OPTIONS = {
    "seed no number": (["--seed", "x"], ("--seed is 'x'; a number from 0 to 9223372036854775807 is needed",)),
    "seed empty": (["--seed", ""], ("--seed is ''",)),
    "seed negative": (["--seed", "-1"], ("--seed is '-1'",)),
    "seed a fraction": (["--seed", "1.5"], ("--seed is '1.5'",)),
    "seed too large": (["--seed", str(2**63)], ("--seed is '9223372036854775808'",)),
    "seed without end": (["--seed", "9" * 5000], ("--seed is '999",)),
    "check-tokens zero": (["--check-tokens", "0"], ("--check-tokens is '0'",)),
    "check-tokens word": (
        ["--check-tokens", "some"],
        ("--check-tokens is 'some'; a number from 1 to 1048576, or all, is needed",),
    ),
    "check-tokens digits of another script": (["--check-tokens", "٣"], ("--check-tokens is '٣'",)),
    "vocab-size": (["--vocab-size", "1"], ("--vocab-size is '1'; a number from 2 to 4294967296 is needed",)),
    "step-tokens": (["--step-tokens", "0"], ("--step-tokens is '0'; a number from 1 to 65536 is needed",)),
    "no such option": (["--sed", "1"], ("--sed",)),
    "argument": (["extra"], ("extra",)),
    "value missing": (["--text"], ("--text",)),
    "device": (["--device", "gpu"], ("device: got 'gpu'; need a torch device",)),
    "device not here": (["--device", "cpu:x"], ("cpu:x",)),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(cli: Callable[..., Any], small: list[str], name: str) -> None:
    arguments, parts = OPTIONS[name]
    refused(cli(*small, *arguments), *parts)


def test_unknown_command(cli: Callable[..., Any]) -> None:
    refused(cli("rnu"), "rnu", "(see engram-core --help)")
