"""Counts of rows: as a loop over the definition counts them, and in this order."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from models import tiny_config

from engram_core import EngramConfig, HashLayout, TokenBatch, TokenMap
from engram_core.errors import InvalidArgumentError, TokenMapError
from engram_core.hot import HotRows
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
