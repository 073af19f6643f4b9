"""The file of hot rows: what was saved comes back, and anything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import tiny_config
from test_hot import LAYERS, documents, pairs

from engram_core import EngramConfig, HashLayout, TokenMap
from engram_core.errors import TableError
from engram_core.hot import HotRows, hashing_fingerprint
from engram_core.hot_count import RowCounter


@pytest.fixture
def counted(config: EngramConfig, token_map: TokenMap) -> HotRows:
    counter = RowCounter(config, token_map)
    counter.add_documents(documents())
    return counter.result()


def test_round_trip(counted: HotRows, config: EngramConfig, token_map: TokenMap, tmp_path: Path) -> None:
    path = tmp_path / "hot.safetensors"
    path.write_bytes(b"an old file")
    counted.save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["hot.safetensors"]
    again = HotRows.load(path)
    again.check(HashLayout.from_config(config), token_map)
    assert (again.tokens, again.fingerprint) == (counted.tokens, counted.fingerprint)
    for layer_id in LAYERS:
        assert again.ids[layer_id].equal(counted.ids[layer_id])
        assert again.counts[layer_id].equal(counted.counts[layer_id])
        assert again.counts[layer_id].dtype == torch.int64


def test_round_trip_of_large_numbers_and_no_rows(tmp_path: Path) -> None:
    ids = torch.tensor([2**40, 5])
    rows = HotRows(
        {3: ids, 4: ids[:0]}, {3: torch.tensor([2**35, 1]), 4: torch.empty(0, dtype=torch.int64)}, 2**36, "f"
    )
    rows.save(tmp_path / "file")
    again = HotRows.load(tmp_path / "file")
    assert pairs(again, 3) == [(2**40, 2**35), (5, 1)]
    assert pairs(again, 4) == []


FOREIGN: dict[str, tuple[dict[str, Any], int | None]] = {
    "other primes": ({"vocab_size": 13}, None),
    "other layers": ({"layer_ids": (1, 15)}, None),
    "a longer n-gram": ({"max_ngram_size": 4}, None),
    "another token map": ({}, 1),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_rows_of_another_model_or_tokenizer_are_refused(counted: HotRows, token_map: TokenMap, name: str) -> None:
    changes, swap = FOREIGN[name]
    other = tiny_config(**changes)
    if swap is not None:
        token_map = TokenMap(token_map.ids.flip(0), 2)
    with pytest.raises(TableError, match=r"were counted for another model or tokenizer \(fingerprint .*hot-rows makes"):
        counted.check(HashLayout.from_config(other), token_map)


def test_a_row_outside_the_table_is_refused(config: EngramConfig, token_map: TokenMap) -> None:
    layout = HashLayout.from_config(config)
    one = torch.tensor([1])
    for layer_id, row in ((1, layout.rows[0]), (2, 0)):
        rows = HotRows({layer_id: torch.tensor([row])}, {layer_id: one}, 1, hashing_fingerprint(layout, token_map))
        with pytest.raises(TableError, match=f"layer {layer_id} has row {row} of"):
            rows.check(layout, token_map)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_refused(counted: HotRows, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "hot.safetensors"
    counted.save(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(TableError, match=f"{path}: not a file of hot rows, or cut off"):
        HotRows.load(path)


def test_what_is_no_file_of_hot_rows(counted: HotRows, token_map: TokenMap, tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no: No such file"):
        HotRows.load(tmp_path / "no")
    with pytest.raises(TableError, match=str(tmp_path)):
        HotRows.load(tmp_path)
    token_map.save(tmp_path / "map")
    with pytest.raises(TableError, match="map: format is None; 'engram-hot-rows-1' is needed"):
        HotRows.load(tmp_path / "map")


def _tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    held: dict[str, torch.Tensor | None] = {"1.ids": torch.tensor([4, 2, 3]), "1.counts": torch.tensor([9, 1, 1])}
    held.update({f"1.{key}": value for key, value in changes.items()})
    return {key: value for key, value in held.items() if value is not None}


DAMAGE: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "no counts": (_tensors(counts=None), {}, "'1.counts' is missing"),
    "no layer": ({}, {}, "layers"),
    "wrong order": (_tensors(counts=torch.tensor([1, 9, 1])), {}, "another order"),
    "ties in the wrong order": (_tensors(ids=torch.tensor([4, 3, 2])), {}, "another order"),
    "an id twice": (_tensors(ids=torch.tensor([3, 2, 3])), {}, "an id twice"),
    "a negative id": (_tensors(ids=torch.tensor([-1, 2, 3])), {}, "ids from -1"),
    "a count of zero": (_tensors(counts=torch.tensor([9, 1, 0])), {}, "counts from 0"),
    "fewer counts": (_tensors(counts=torch.tensor([9, 1])), {}, "counts[1]"),
    "floats": (_tensors(ids=torch.tensor([4.0, 2.0, 3.0])), {}, "float32"),
    "no fingerprint": (_tensors(), {"fingerprint": None}, "'fingerprint' is missing"),
    "no number of tokens": (_tensors(), {"tokens": "many"}, "many"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_refused(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors, changes, said = DAMAGE[name]
    metadata = {"format": "engram-hot-rows-1", "fingerprint": "f", "tokens": "9", **changes}
    save_file(tensors, tmp_path / "file", metadata={key: value for key, value in metadata.items() if value is not None})
    with pytest.raises(TableError) as caught:
        HotRows.load(tmp_path / "file")
    assert str(caught.value).startswith(f"{tmp_path / 'file'}: damaged (")
    assert said in str(caught.value)


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_fails_leaves_the_old_file(
    counted: HotRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    path = tmp_path / "hot.safetensors"
    counted.save(path)
    before = path.read_bytes()

    def fail(descriptor: int) -> None:
        assert len(list(tmp_path.iterdir())) == 2
        raise failure

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises((TableError, KeyboardInterrupt), match="No space left on device|^$"):
        counted.cut(1).save(path)
    assert [file.name for file in tmp_path.iterdir()] == ["hot.safetensors"]
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there(counted: HotRows, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"no/file: can't be written \(No such file"):
        counted.save(tmp_path / "no" / "file")
    (tmp_path / "file").touch()
    with pytest.raises(TableError, match=r"file/below: can't be written \(Not a directory"):
        counted.save(tmp_path / "file" / "below")
    with pytest.raises(TableError, match=r"can't be written \(File name too long"):
        counted.save(tmp_path / ("x" * 250))
