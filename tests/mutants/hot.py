"""Faults of the cache of hot rows, which the reference has not: run on the NVIDIA backend, interpreted."""

from __future__ import annotations

from functools import partial

from mutants.model import Mutant

_cache = "engram_core.gpu.hot:HotCache."
_table = "engram_core.gpu.table:GpuTable."
_m = partial(Mutant, area="hot")

MUTANTS = (
    _m(
        name="hot-not-refreshed",
        function=_table + "load",
        says="cached rows stay as they were when the table is loaded",
        old="self._hot.refresh(first, first + int(loaded.shape[0]))",
        new="pass",
        cases=("rows-hot-rows", "rows-hot-rows-shard"),
    ),
    _m(
        name="hot-refreshed-from-the-top",
        function=_table + "load",
        says="of a shard other rows than the loaded ones are copied again",
        old="first = start - self.shard.row_start",
        new="first = start",
        cases=("rows-hot-rows-shard",),
    ),
    _m(
        name="hot-views-unseen",
        function=_table + "settle",
        says="cached rows stay as they were when the table is written through its views",
        old="self._hot.refresh(0, self.shard.rows)",
        new="pass",
        cases=("rows-hot-rows",),
    ),
    _m(
        name="hot-another-shard",
        function=_table + "store_cache",
        says="ids are not taken relative to the shard",
        old="ids - self.shard.row_start",
        new="ids + 0",
        cases=("rows-hot-rows-shard",),
    ),
    _m(
        name="hot-slot-off-by-one-word",
        function=_cache + "replace",
        says="a word's rank counts its own rows too, so that slots are those of later rows",
        old="counts.cumsum(0) - counts",
        new="counts.cumsum(0)",
        cases=("rows-hot-rows", "rows-hot-rows-few"),
    ),
    _m(
        name="hot-unsorted",
        function=_cache + "replace",
        says="rows lie in the order in which they were wanted, and are found in the order of their ids",
        old=".sort().values",
        new="",
        cases=("rows-hot-rows", "rows-hot-rows-few"),
    ),
    _m(
        name="hot-duplicates-kept",
        function=_cache + "replace",
        says="a row that is named twice is cached twice",
        old="_first_of_each(local)",
        new="local",
        cases=("rows-hot-rows",),
    ),
    _m(
        name="hot-beyond-capacity",
        function=_cache + "replace",
        says="more rows are cached than there is room for",
        old="[: self.set.rows.shape[0]]",
        new="[: self.set.rows.shape[0] + 1]",
        cases=("rows-hot-rows-few",),
    ),
    _m(
        name="hot-least-wanted",
        function=_cache + "replace",
        says="the last rows are kept, not the first",
        old="[: self.set.rows.shape[0]]",
        new="[-self.set.rows.shape[0] :]",
        cases=("rows-hot-rows-few",),
    ),
    _m(
        name="hot-bits-reversed",
        function=_cache + "replace",
        says="the bits of a word are set from the top",
        old="one << self._kept % _WORD",
        new="one << (_WORD - 1 - self._kept % _WORD)",
        cases=("rows-hot-rows",),
    ),
    _m(
        name="hot-hits-never-reset",
        function=_cache + "hits",
        says="hits are counted since the table was made, not since the last call",
        old="self.set.counts.zero_()",
        new="pass",
        cases=("rows-hot-rows",),
    ),
    _m(
        name="hot-hits-of-one-lane",
        function=_cache + "hits",
        says="only the first of the counters is read",
        old="self.set.counts.sum(1)",
        new="self.set.counts[:, 0]",
        cases=("rows-hot-rows",),
    ),
)
