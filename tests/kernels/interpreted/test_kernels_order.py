"""Reading in address order and from a set of hot rows: the same bits as reading plainly."""

from __future__ import annotations

import pytest
import torch

from engram_core import formats
from engram_core.errors import InvalidArgumentError
from engram_core.kernels.lookup import HotSet, lookup_rows
from engram_core.kernels.order import address_order

DIM, WIDTH, ROWS = 64, 66, 700
START = 100


def rows() -> torch.Tensor:
    return torch.randint(0, 256, (ROWS, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(7))


def ids(tokens: int, columns: int = 5, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Some outside the window [100, 800), strided."""
    draw = torch.Generator().manual_seed(tokens)
    return torch.randint(60, 840, (tokens, columns * 2), dtype=dtype, generator=draw)[:, ::2]


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, torch.int64), (16, torch.int32), (17, torch.int64), (100, torch.int32)]
)
@pytest.mark.parametrize("together", [4096, 16])
def test_every_position_comes_once_and_by_address(
    tokens: int, dtype: torch.dtype, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engram_core.kernels.order.MOST_TOKENS", together)
    asked = ids(tokens, 3, dtype)
    order = address_order(asked, START, START + ROWS)
    assert order.dtype == torch.int32
    assert torch.equal(order.long().sort().values, torch.arange(tokens * 3))
    here = (asked >= START) & (asked < START + ROWS)
    local = (asked.long() - START).masked_fill(~here, 0).flatten()[order.long()]
    for first in range(0, tokens, together):
        last = min(first + together, tokens)
        columns = local[first * 3 : last * 3].view(3, last - first)
        assert bool((columns.diff(dim=1) >= 0).all())


def test_a_table_of_more_rows_than_a_key_holds_is_ordered_by_the_upper_bits() -> None:
    asked = torch.tensor([[2**36], [5], [2**36 + 2**30], [4], [2**35]])
    order = address_order(asked, 0, 2**37)
    assert order.tolist() == [1, 3, 4, 0, 2]  # 5 and 4 lie within one step: in the order of their tokens
    assert address_order(asked[:0], 0, 8).shape == (0,)


def hot_set(table: torch.Tensor, kept: torch.Tensor) -> HotSet:
    """Made row by row, as the docstring says."""
    words = -(-len(table) // 64)
    bits = [0] * words
    for row in kept.tolist():
        bits[row // 64] |= 1 << (row % 64)
    ranks = [sum(word.bit_count() for word in bits[:i]) for i in range(words)]
    signed = [word - 2**64 if word >> 63 else word for word in bits]
    cached = table[kept.sort().values].clone()
    return HotSet(
        cached, torch.tensor(signed), torch.tensor(ranks, dtype=torch.int32), torch.zeros(2, 64, dtype=torch.int64)
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("in_flight", [None, 1, 48])
def test_hot_rows_come_from_the_cache_and_are_counted(packed: bool, ordered: bool, in_flight: int | None) -> None:
    """The table's own copies of cached rows are spoilt: whoever read them would be found out."""
    table, asked = rows(), ids(33)
    kept = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))[:300]
    kept[:3] = torch.tensor([0, 63, ROWS - 1])  # the ends of a word, and of the table
    kept = kept.unique()
    hot = hot_set(table, kept)
    here = (asked >= START) & (asked < START + ROWS)
    local = (asked - START).masked_fill(~here, 0)
    want = table[local].masked_fill_(~here[..., None], 0)
    table[kept] = 0xFF
    out = torch.empty(33, 5, WIDTH, dtype=torch.uint8) if packed else torch.empty(33, 5, DIM, dtype=torch.bfloat16)
    order = address_order(asked, START, START + ROWS) if ordered else None
    lookup_rows(table, asked, out, START, in_flight=in_flight, order=order, hot=hot)
    expected = want if packed else formats.rows_to_bf16(want)
    assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    assert torch.equal(out.isnan(), expected.isnan())
    hits = int((here & torch.isin(local, kept)).sum())
    assert hot.counts.sum(1).tolist() == [hits, int(here.sum())]
    assert 0 < hits < int(here.sum())


def test_an_order_of_another_size_is_refused() -> None:
    out = torch.empty(3, 5, DIM, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="order"):
        lookup_rows(rows(), ids(3), out, order=torch.zeros(14, dtype=torch.int32))
