"""How a table is cut over ranks, and how the looked-up parts come together again.

Columns (hash heads) are cut contiguously, ``ceil(C / P)`` a rank, the last rank padded with zero rows that are cut
after the gather. Where that would leave a rank empty, the table is cut by rows instead: each rank looks up every
column, its own rows answer and all others are zero bits, and an integer sum of the bit patterns joins them (a float sum
would lose -0.0 and NaN payloads). Every decision here is a pure function of values that all ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engram_core.errors import InvalidArgumentError
from engram_core.parallel import Collectives, Parallel


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a table: its columns ``[first, first + real)`` of ``columns`` with padding, its rows.

    ``by_rows``: cut by rows; every column is looked up and rows outside ``[row_start, row_stop)`` are zero.
    """

    by_rows: bool
    columns: int
    first: int
    real: int
    row_start: int
    row_stop: int

    @property
    def rows(self) -> int:
        """Rows that this rank holds."""
        return self.row_stop - self.row_start

    @classmethod
    def plan(cls, rows: int, head_sizes: Sequence[int], parallel: Parallel) -> Shard:
        """The part of ``parallel.shard`` of a table of ``rows`` rows, ``head_sizes`` for each column."""
        total, parts, part = len(head_sizes), parallel.shards, parallel.shard
        each = -(-total // parts)
        if each * (parts - 1) >= total:
            size = -(-rows // parts)
            return cls(True, total, 0, total, min(part * size, rows), min((part + 1) * size, rows))
        first, last = part * each, min((part + 1) * each, total)
        start = sum(head_sizes[:first])
        # Rows past the last head belong to the last rank: no id names them, and a table may be larger than its heads.
        stop = rows if part == parts - 1 else start + sum(head_sizes[first:last])
        return cls(False, each, first, last - first, start, stop)


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens that a rank keeps: ``[start, start + real)`` of the batch, ``slot`` on every rank with padding."""

    start: int
    real: int
    slot: int


def window(num_tokens: int, parallel: Parallel) -> Window:
    """This rank's window: all tokens, or under sequence parallelism ``ceil(T / P)`` of them, the last ones fewer."""
    if not parallel.sequence:
        return Window(0, num_tokens, num_tokens)
    slot = -(-num_tokens // parallel.tensor.size)
    start = min(parallel.tensor.rank * slot, num_tokens)
    return Window(start, min(slot, num_tokens - start), slot)


class RowExchange:
    """Moves hash ids and looked-up rows between the ranks of one ``parallel``."""

    def __init__(self, parallel: Parallel, shard: Shard, columns: int) -> None:
        self._parallel = parallel
        self._shard = shard
        self._columns = columns

    def slot(self, num_tokens: int, slot_tokens: int | None) -> int:
        """Tokens that every data-parallel rank sends: ``slot_tokens``, the largest count among them."""
        if self._parallel.data_size == 1:
            return num_tokens
        if slot_tokens is None:
            raise InvalidArgumentError("slot_tokens", "None", "the largest token count over the data-parallel ranks")
        if slot_tokens < num_tokens:
            raise InvalidArgumentError("slot_tokens", str(slot_tokens), f"at least this rank's {num_tokens} tokens")
        return slot_tokens

    def ids(self, hash_ids: torch.Tensor, slot: int) -> torch.Tensor:
        """The ids to look up here: this rank's ``[T, C]``, or those of all data-parallel ranks ``[data * slot, C]``."""
        data = self._parallel.data
        if data is None or data.size == 1 or slot == 0:
            return hash_ids
        return data.all_gather(_pad(hash_ids, slot, -1), 0)

    def join(self, rows: torch.Tensor, num_tokens: int, slot: int, ahead: bool = False) -> torch.Tensor:
        """This rank's looked-up rows ``[.., c, W]`` to whole rows ``[window, C, W]`` of its own tokens.

        ``ahead``: exchange on the side stream's communicator. Without tokens on any rank nothing is exchanged.
        """
        data = self._parallel.data
        if data is not None and data.size > 1 and slot > 0:
            parts = data.all_to_all(rows.view(data.size, slot, *rows.shape[1:]))
            rows = self._merge(parts)[:num_tokens]
        if num_tokens == 0:  # so it is on all tensor ranks
            return rows.new_empty((0, self._columns, rows.shape[-1]))
        group = self._parallel.communicator(ahead)
        if self._parallel.sequence:
            return self._windows(group, rows, num_tokens)
        if group.size > 1:
            if self._shard.by_rows:
                rows = _bit_sum(group.all_gather(rows.unsqueeze(0), 0))
            else:
                rows = group.all_gather(rows, 1)
        return rows[:, : self._columns]

    def _windows(self, group: Collectives, rows: torch.Tensor, num_tokens: int) -> torch.Tensor:
        mine = window(num_tokens, self._parallel)
        if group.size > 1:
            padded = _pad(rows, mine.slot * group.size, 0)
            rows = self._merge(group.all_to_all(padded.view(group.size, mine.slot, *padded.shape[1:])))
        return rows[: mine.real, : self._columns]

    def _merge(self, parts: torch.Tensor) -> torch.Tensor:
        """Parts ``[sources, tokens, c, W]`` of the same tokens to ``[tokens, sources * c, W]`` (or their sum)."""
        if self._shard.by_rows:
            return _bit_sum(parts)
        return parts.movedim(0, 1).flatten(1, 2)


def _pad(x: torch.Tensor, tokens: int, value: int) -> torch.Tensor:
    if x.shape[0] == tokens:
        return x
    padded = x.new_full((tokens, *x.shape[1:]), value)
    padded[: x.shape[0]] = x
    return padded


def _bit_sum(parts: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension of the bit patterns: at most one part has any bit of an element set."""
    integer = torch.uint8 if parts.element_size() == 1 else torch.int16
    return parts.view(integer).sum(0, dtype=integer).view(parts.dtype)
