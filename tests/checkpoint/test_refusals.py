"""Damaged checkpoints: one line with the file, the tensor, what was found and what is needed; nothing is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_helpers import shard_of
from safetensors.torch import load_file, save_file

from engram_core import EngramMemory
from engram_core.errors import CheckpointError, ConfigError, EngramError, InvalidArgumentError, TokenMapError

Load = Callable[..., EngramMemory]
INDEX = "model.safetensors.index.json"
TABLE, SCALE = "layers.1.engram.embed.weight", "layers.1.engram.embed.scale"
WKV, GATE = "layers.14.engram.wkv.weight", "layers.14.engram.k_weight"


@pytest.fixture
def refuse(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Load, expect a refusal of one line before a memory is made, and return the line without the folder's path."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("a memory was made")

    def call(error: type[EngramError] = CheckpointError, **options: object) -> str:
        monkeypatch.setattr(EngramMemory, "__init__", made)
        with pytest.raises(error) as caught:
            load(folder, **options)
        message = str(caught.value)
        assert "\n" not in message
        return message.replace(f"{folder}/", "").replace(str(folder), "model")

    return call


def change(path: Path, **tensors: Any) -> None:
    """Rewrite a shard: tensors by part after "layers.", with "__" for "."; None removes."""
    held = load_file(path)
    for key, tensor in tensors.items():
        name = "layers." + key.replace("__", ".")
        held.pop(name, None)
        if tensor is not None:
            held[name] = tensor
    save_file(held, path)


def edit(path: Path, alter: Callable[[dict[str, Any]], None]) -> None:
    held = json.loads(path.read_text())
    alter(held)
    path.write_text(json.dumps(held), encoding="utf-8")


def test_a_missing_shard(folder: Path, refuse: Callable[..., str]) -> None:
    shard_of(folder, TABLE).unlink()
    assert refuse() == (
        "model-00001-of-00003.safetensors: No such file or directory; a readable safetensors file is needed"
    )


@pytest.mark.parametrize("cut", [1, 5000])
def test_a_truncated_shard(folder: Path, refuse: Callable[..., str], cut: int) -> None:
    path = shard_of(folder, TABLE)
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(size - cut)
    assert refuse() == f"{path.name}: truncated: has {size - cut} bytes; its header needs {size}"


def test_a_header_cut_short(folder: Path, refuse: Callable[..., str]) -> None:
    path = shard_of(folder, TABLE)
    need = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    with open(path, "r+b") as file:
        file.truncate(100)
    assert refuse() == f"{path.name}: truncated: has 100 bytes; its header alone needs {need}"


def test_a_shard_that_is_too_long(folder: Path, refuse: Callable[..., str]) -> None:
    path = shard_of(folder, TABLE)
    size = path.stat().st_size
    with open(path, "ab") as file:
        file.write(b"x")
    assert refuse() == f"{path.name}: too long: has {size + 1} bytes; its header needs {size}"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a safetensors file: has 0 bytes, and the first 8 give a header of 0"),
        (b"version https://git-lfs.github.com/spec/v1", "not a safetensors file: has 42 bytes, and the first 8 give"),
        (b"\5\0\0\0\0\0\0\0{nope", "not a safetensors file: its header is no JSON"),
        (b"\2\0\0\0\0\0\0\0[]", "not a safetensors file: its header is a list, not an object"),
        (b'\7\0\0\0\0\0\0\0{"a":1}', "a: its entry is 1; dtype, shape and data_offsets are needed"),
    ],
)
def test_what_is_no_safetensors_file(folder: Path, refuse: Callable[..., str], content: bytes, said: str) -> None:
    path = shard_of(folder, TABLE)
    path.write_bytes(content)
    assert refuse().startswith(f"{path.name}: {said}")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "U8", "shape": [4], "data_offsets": [0, 3]},
        {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]},
        {"dtype": 8, "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]},
    ],
)
def test_an_entry_that_makes_no_sense(folder: Path, refuse: Callable[..., str], entry: dict[str, Any]) -> None:
    path = shard_of(folder, TABLE)
    text = json.dumps({"t": entry}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 3)
    assert refuse().startswith(f"{path.name}: t: ")


def test_a_tensor_that_the_index_places_elsewhere(folder: Path, refuse: Callable[..., str]) -> None:
    change(shard_of(folder, TABLE), **{"1__engram__embed__scale": None})
    assert refuse() == (
        "model-00001-of-00003.safetensors: layers.1.engram.embed.scale: not in this shard; "
        "model.safetensors.index.json says that it is"
    )


def test_a_tensor_that_is_nowhere(folder: Path, refuse: Callable[..., str]) -> None:
    edit(folder / INDEX, lambda held: held["weight_map"].pop(GATE))
    assert refuse() == (
        "model: layers.14.engram.k_weight: missing; layer 14 has 5 Engram tensors (layers.14.engram.embed.scale, "
        "layers.14.engram.embed.weight, layers.14.engram.q_weight, layers.14.engram.wkv.scale, "
        "layers.14.engram.wkv.weight)"
    )


def test_a_layer_without_any_tensor(folder: Path, refuse: Callable[..., str]) -> None:
    edit(folder / "config.json", lambda held: held.update(engram_layer_ids=[1, 15]))
    assert refuse() == "model: layers.15.engram.embed.weight: missing; layer 15 has 0 Engram tensors (none)"


def test_a_tensor_that_is_there_twice(folder: Path, refuse: Callable[..., str]) -> None:
    path = shard_of(folder, TABLE)
    change(path, **{"1__engram__embed_tokens__weight_scale_inv": load_file(path)[SCALE]})
    name = "layers.1.engram.embed_tokens.weight_scale_inv"
    edit(folder / INDEX, lambda held: held["weight_map"].update({name: path.name}))
    assert refuse() == (
        f"{path.name}: {name}: a second embed.scale of layer 1, after {path.name}: {SCALE}; one is needed"
    )


ROWS = 2056


@pytest.mark.parametrize(
    ("name", "tensor", "found", "needed"),
    [
        (TABLE, torch.zeros(ROWS - 1, 64).to(torch.float8_e4m3fn), "F8_E4M3 [2055, 64]", "F8_E4M3 [2056, 64]"),
        (TABLE, torch.zeros(ROWS, 64, dtype=torch.uint8), "U8 [2056, 64]", "F8_E4M3 [2056, 64]"),
        (TABLE, torch.zeros(ROWS, 64).to(torch.float8_e5m2), "F8_E5M2 [2056, 64]", "F8_E4M3 [2056, 64]"),
        (SCALE, torch.zeros(ROWS, 2), "F32 [2056, 2]", "F8_E8M0 or U8 [2056, 2]"),
        (SCALE, torch.zeros(ROWS, 1, dtype=torch.uint8), "U8 [2056, 1]", "F8_E8M0 or U8 [2056, 2]"),
        (WKV, torch.zeros(320, 256), "F32 [320, 256]", "F8_E4M3 or BF16 [320, 256]"),
        ("layers.14.engram.wkv.scale", torch.zeros(10, 8), "F32 [10, 8]", "F8_E8M0 or U8 [10, 8] or [320, 8]"),
        (GATE, torch.zeros(4, 64).half(), "F16 [4, 64]", "BF16 or F32 [4, 64]"),
        (GATE, torch.zeros(64).bfloat16(), "BF16 [64]", "BF16 or F32 [4, 64]"),
    ],
)
def test_another_dtype_or_shape(
    folder: Path, refuse: Callable[..., str], name: str, tensor: torch.Tensor, found: str, needed: str
) -> None:
    path = shard_of(folder, name)
    change(path, **{name.removeprefix("layers.").replace(".", "__"): tensor})
    assert refuse() == f"{path.name}: {name}: found {found}; needed {needed}"


def test_a_scale_beside_a_bf16_weight(folder: Path, refuse: Callable[..., str]) -> None:
    path = shard_of(folder, WKV)
    change(path, **{"14__engram__wkv__weight": torch.zeros(320, 256).bfloat16()})
    assert refuse() == f"{path.name}: layers.14.engram.wkv.scale: a scale of a BF16 weight; BF16 weights have none"


@pytest.mark.parametrize(
    ("alter", "said"),
    [
        (lambda held: held.pop("weight_map"), "the key weight_map is missing"),
        (lambda held: held["weight_map"].update({TABLE: "../x"}), f"weight_map: {TABLE} is '../x'; a file beside"),
        (lambda held: held["weight_map"].update({TABLE: 1}), f"weight_map: {TABLE} is 1; a file beside"),
    ],
)
def test_an_index_that_makes_no_sense(
    folder: Path, refuse: Callable[..., str], alter: Callable[[dict[str, Any]], None], said: str
) -> None:
    edit(folder / INDEX, alter)
    assert refuse().startswith(f"{INDEX}: {said}")


def test_an_index_that_is_no_json(folder: Path, refuse: Callable[..., str]) -> None:
    (folder / INDEX).write_text("{")
    assert refuse().startswith(f"{INDEX}: not JSON (")


def test_a_folder_without_weights(folder: Path, refuse: Callable[..., str]) -> None:
    (folder / INDEX).unlink()
    assert refuse() == f"model: holds neither {INDEX} nor model.safetensors; one of them is needed"


def test_no_folder_and_no_config(folder: Path, refuse: Callable[..., str], load: Load) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such folder"):
        load(folder / "nowhere")
    (folder / "config.json").unlink()
    assert refuse(ConfigError).startswith("config.json: No such file or directory")


def test_a_token_map_of_another_model(refuse: Callable[..., str]) -> None:
    assert refuse(token_map=None).startswith("tokenizer.json: no such file; the model's tokenizer.json, or")


def test_a_token_map_of_another_size(refuse: Callable[..., str]) -> None:
    from engram_core import TokenMap

    assert refuse(TokenMapError, token_map=TokenMap.identity(63, 2)).startswith("token_map: has 63 compressed ids")


def test_a_layer_that_has_no_engram(refuse: Callable[..., str]) -> None:
    said = refuse(InvalidArgumentError, layer_ids=(1, 2))
    assert said == "layer_ids: got [2]; need Engram layers of the model, [1, 14]"


def test_a_shard_that_shrinks_while_it_is_read(folder: Path, load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_core.checkpoint.folder import Checkpoint

    usual = Checkpoint.layers

    def layers(self: Checkpoint, *given: Any, **named: Any) -> Any:
        found = usual(self, *given, **named)
        path = shard_of(folder, TABLE)
        with open(path, "r+b") as file:
            file.truncate(path.stat().st_size - 10)
        return found

    monkeypatch.setattr(Checkpoint, "layers", layers)
    with pytest.raises(CheckpointError, match=rf"{SCALE}: truncated while it was read: ends at byte \d+$"):
        load(folder)
