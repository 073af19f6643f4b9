"""Counts of rows: as a loop over the definition counts them, in this order, and in a file that says what it is."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import tiny_config

from engram_core import EngramConfig, HashLayout, TokenBatch, TokenMap
from engram_core.errors import InvalidArgumentError, TableError, TokenMapError
from engram_core.hot import HotRows, hashing_fingerprint
from engram_core.hot_count import RowCounter, document_batches

LAYERS = (1, 14)


def documents(count: int = 30, longest: int = 90, seed: int = 0, vocabulary: int = 64) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(vocabulary) for _ in range(draw.randrange(longest + 1))] for _ in range(count)]


def row_ids(config: EngramConfig, tokens: Sequence[int], dead: Sequence[bool], place: int, layer: int) -> list[int]:
    """The rows that one token looks up, in Python integers: docs/contract.md, "Hash"; the map is the identity."""
    layout = HashLayout.from_config(config)
    blocked, roll, found = False, 0, []
    for s in range(config.max_ngram_size):
        blocked = blocked or place - s < 0 or dead[place - s] or tokens[place - s] >= config.compressed_vocab_size
        value = config.pad_token_id if blocked else tokens[place - s]
        roll ^= value * layout.multipliers[layer][s]
        for head in range(config.n_heads) if s else ():
            column = (s - 1) * config.n_heads + head
            found.append(roll % layout.primes[layer][s - 1][head] + layout.offsets[layer][column])
    return found


def brute_force(config: EngramConfig, texts: Sequence[Sequence[int]], layer: int) -> list[tuple[int, int]]:
    """``(id, count)``, most frequent first, then the smaller id."""
    counts: Counter[int] = Counter()
    for text in texts:
        for place in range(len(text)):
            counts.update(row_ids(config, text, [False] * len(text), place, layer))
    return sorted(counts.items(), key=lambda entry: (-entry[1], entry[0]))


def pairs(rows: HotRows, layer_id: int) -> list[tuple[int, int]]:
    return list(zip(rows.ids[layer_id].tolist(), rows.counts[layer_id].tolist(), strict=True))


@pytest.fixture
def counted(config: EngramConfig, token_map: TokenMap) -> HotRows:
    counter = RowCounter(config, token_map)
    counter.add_documents(documents())
    return counter.result()


@pytest.mark.parametrize("batch_tokens", [1, 2, 3, 7, 10_000])
def test_counts_are_those_of_the_definition(
    config: EngramConfig, token_map: TokenMap, batch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_core.hot_count._PENDING", 50)
    texts = [[], *documents(), [], [5], [64, 7, 900]]
    counter = RowCounter(config, token_map)
    for half in (texts[:9], texts[9:]):
        for batch in document_batches(half, 2, batch_tokens):
            assert len(batch) <= batch_tokens
            counter.add(batch)
    found = counter.result()
    assert found.tokens == counter.tokens == sum(map(len, texts))
    assert found.layer_ids == LAYERS
    for layer, layer_id in enumerate(LAYERS):
        assert pairs(found, layer_id) == brute_force(config, texts, layer)
        assert int(found.counts[layer_id].sum()) == found.tokens * config.columns
        assert found.ids[layer_id].dtype == torch.int32


def test_four_grams_and_ids_that_need_int64() -> None:
    """The published geometry over a base whose tables have more than 2**31 rows."""
    config = EngramConfig.deepseek_v41(2**27)
    token_map = TokenMap.identity(config.compressed_vocab_size, config.pad_token_id)
    texts = documents(6, 20, vocabulary=5)
    counter = RowCounter(config, token_map)
    counter.add_documents(texts)
    found = counter.result()
    assert found.ids[14].dtype == torch.int64
    assert int(found.ids[14].max()) > 2**31
    assert pairs(found, 14) == brute_force(config, texts, 1)


def test_dead_tokens_and_padding_are_not_counted(config: EngramConfig, token_map: TokenMap) -> None:
    tokens = [5, 6, 7, 8, 9, 10]
    dead = [False, True, False, False, False, False]
    batch = TokenBatch(
        input_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=torch.arange(6, dtype=torch.int32),
        query_start=torch.tensor([0, 4], dtype=torch.int32),
        lookback=torch.empty(1, 0, dtype=torch.int32),
        dead=torch.tensor(dead),
    )
    counter = RowCounter(config, token_map, [14])
    counter.add(batch)
    expected = Counter(i for place in (0, 2, 3) for i in row_ids(config, tokens, dead, place, 1))
    assert counter.tokens == 3
    assert dict(pairs(counter.result(), 14)) == expected


def test_equal_counts_come_in_the_order_of_their_ids(config: EngramConfig, token_map: TokenMap) -> None:
    counter = RowCounter(config, token_map)
    counter.add_documents([[3, 4, 5]])
    for layer_id in LAYERS:
        ids, counts = counter.result().ids[layer_id], counter.result().counts[layer_id]
        once = ids[counts == 1]
        assert once.numel() > 3
        assert once.equal(once.sort().values)


def test_counting_goes_on_after_a_result(config: EngramConfig, token_map: TokenMap, counted: HotRows) -> None:
    counter = RowCounter(config, token_map)
    for text in documents():
        counter.add_documents([text])
        counter.result(5)
    assert all(pairs(counter.result(), i) == pairs(counted, i) for i in LAYERS)


def test_two_counters_are_one(config: EngramConfig, token_map: TokenMap, counted: HotRows) -> None:
    one, other = RowCounter(config, token_map), RowCounter(config, token_map)
    one.add_documents(documents()[:13])
    other.add_documents(documents()[13:])
    one.update(other)
    assert one.result().tokens == counted.tokens
    assert all(pairs(one.result(), i) == pairs(counted, i) for i in LAYERS)
    with pytest.raises(InvalidArgumentError, match="other: got layers \\[1\\]"):
        one.update(RowCounter(config, token_map, [1]))


def test_most_cut_and_served(counted: HotRows) -> None:
    everything = counted.ids[1].numel()
    assert counted.most(1, 3).tolist() == counted.ids[1][:3].tolist()
    assert counted.most(1, 10**9).numel() == everything
    assert counted.most(1, 0).numel() == 0
    small = counted.cut(4)
    assert pairs(small, 14) == pairs(counted, 14)[:4]
    assert small.tokens == counted.tokens
    assert counted.served(counted, 1, 4) == int(counted.counts[1][:4].sum())
    assert counted.served(counted, 1, everything) == counted.tokens * 4
    assert "4 rows" in repr(small)


RARE = {"limit above": 10_000, "limit below": 30, "limit of two": 2}


@pytest.mark.parametrize("name", RARE)
def test_rare_rows_are_dropped_above_the_limit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_core.hot_count._PENDING", 200)
    config = tiny_config(vocab_size=5000)
    token_map = TokenMap.identity(config.compressed_vocab_size, config.pad_token_id)
    limit = RARE[name]
    counter = RowCounter(config, token_map, [1], limit)
    texts = [[7, 8, 9, 10] * 5 + text for text in documents(40, 30)]
    for text in texts:
        counter.add_documents([text])
        assert counter.result().ids[1].numel() <= limit
    true = dict(brute_force(config, texts, 0))
    found = pairs(counter.result(), 1)
    assert all(times <= true[i] for i, times in found)
    assert (counter.dropped[1] > 0) == (len(true) > limit) == (name != "limit above")
    if name != "limit of two":
        # The frequent ones were never dropped: their counts are whole.
        assert found[:12] == brute_force(config, texts, 0)[:12]


def test_what_was_seen_once_goes_first_and_something_stays(config: EngramConfig, token_map: TokenMap) -> None:
    counter = RowCounter(config, token_map, [1], 8)
    layer = counter._layers[1]
    layer.merge(np.arange(20, dtype=np.int32), np.array([1, 2] * 5 + [1] * 10))
    assert pairs(counter.result(), 1) == [(1, 2), (3, 2), (5, 2), (7, 2), (9, 2)]
    layer = RowCounter(config, token_map, [1], 8)._layers[1]
    layer.merge(np.arange(20, dtype=np.int32), np.ones(20, dtype=np.int64))
    assert layer.settled()[0].tolist() == [0, 1, 2, 3]
    layer.merge(np.arange(20, dtype=np.int32), np.full(20, 3))
    assert layer.settled()[0].tolist() == list(range(8))
    assert layer.dropped == 28


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


def test_wrong_arguments(config: EngramConfig, token_map: TokenMap, counted: HotRows) -> None:
    with pytest.raises(InvalidArgumentError, match=r"layer_ids: got \[2\]; need Engram layers of the model, \[1, 14\]"):
        RowCounter(config, token_map, [2])
    with pytest.raises(InvalidArgumentError, match="layer_ids"):
        RowCounter(config, token_map, [])
    with pytest.raises(InvalidArgumentError, match="max_rows: got 1"):
        RowCounter(config, token_map, max_rows=1)
    with pytest.raises(TokenMapError, match="has 3 compressed ids"):
        RowCounter(config, TokenMap.identity(3, 2))
    with pytest.raises(InvalidArgumentError, match=r"layer_id: got 3; need a layer that was counted, \[1, 14\]"):
        counted.most(3, 1)
    for rows in (-1, True, 1.0):
        with pytest.raises(InvalidArgumentError, match="rows"):
            counted.most(1, rows)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="tokens"):
        HotRows(counted.ids, counted.counts, -1, "f")
    stranger = HotRows(counted.ids, counted.counts, 1, "f")
    with pytest.raises(InvalidArgumentError, match="counts of the same model"):
        counted.served(stranger, 1, 1)
