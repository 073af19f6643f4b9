"""Faults between ranks (contract, section 8)."""

from __future__ import annotations

from functools import partial

from mutants.model import Mutant

_exchange = "engram_core.exchange:RowExchange."
_m = partial(Mutant, area="parallel")
_wkv_init = partial(_m, function="engram_reference.wkv:ReferenceWkv.__init__")
_wkv_store = partial(_m, function="engram_reference.wkv:ReferenceWkv.store")
_wkv_forward = partial(_m, function="engram_reference.wkv:ReferenceWkv.forward")
_join = partial(_m, function=_exchange + "join")
_plan = partial(_m, function="engram_core.exchange:Shard.plan")
_window = partial(_m, function="engram_core.exchange:window")
_inject = partial(_m, function="engram_core.layer:Engram.inject")

MUTANTS = (
    _join(
        name="ranks-padding-not-cut",
        says="the last rank's padded columns are not cut",
        old="return rows[:, : self._columns]",
        new="return rows",
        cases=("parallel-rows-15-over-4", "parallel-tensor-columns-15-over-4"),
    ),
    _m(
        name="ranks-padding-not-cut-windows",
        function=_exchange + "_windows",
        says="the last rank's padded columns are not cut under sequence parallelism",
        old="rows[: mine.real, : self._columns]",
        new="rows[: mine.real]",
        cases=("parallel-sequence-columns-15-over-4",),
    ),
    _join(
        name="ranks-columns-reversed",
        says="columns are gathered in reverse rank order",
        old="rows = group.all_gather(rows, 1)",
        new="rows = torch.cat(group.all_gather(rows.unsqueeze(0), 0).flip(0).unbind(0), 1)",
        cases=("parallel-rows-24-over-2",),
    ),
    _wkv_forward(
        name="ranks-outputs-reversed",
        says="parts of kv are gathered in reverse rank order",
        old=".all_gather(part, 1))",
        new=".all_gather(part, 1).unflatten(1, (-1, part.shape[1])).flip(1).flatten(1))",
        cases=("parallel-tensor-2",),
    ),
    _m(
        name="ranks-float-sum",
        function="engram_core.exchange:_bit_sum",
        says="parts cut by rows are joined by a sum of values",
        old="parts.view(integer).sum(0, dtype=integer).view(parts.dtype)",
        new="parts.view(torch.float8_e4m3fn).float().sum(0).to(torch.float8_e4m3fn).view(parts.dtype)",
        cases=("parallel-rows-special-values",),
    ),
    _join(
        name="ranks-empty-skips-join",
        says="a rank without tokens skips the exchange of rows",
        old="if data is not None and data.size > 1 and slot > 0:",
        new="if data is not None and data.size > 1 and num_tokens > 0:",
        cases=("parallel-data-0-4", "parallel-data-4-0"),
    ),
    _m(
        name="ranks-empty-skips-ids",
        function=_exchange + "ids",
        says="a rank without tokens skips the exchange of ids",
        old="slot == 0:",
        new="hash_ids.shape[0] == 0:",
        cases=("parallel-data-0-4", "parallel-data-4-0"),
    ),
    _m(
        name="ranks-slot-guessed",
        function=_exchange + "slot",
        says="without a common slot each rank takes its own count",
        old="if slot_tokens is None:",
        new="if slot_tokens is None and (slot_tokens := num_tokens) < 0:",
        cases=("parallel-data-slot-missing",),
    ),
    _join(
        name="ranks-ahead-shared-rows",
        says="a chain ahead exchanges rows on the decoder's communicator",
        old="communicator(ahead)",
        new="communicator(False)",
        cases=("parallel-ahead",),
    ),
    _wkv_forward(
        name="ranks-ahead-shared-kv",
        says="a chain ahead exchanges kv on the decoder's communicator",
        old="communicator(ahead)",
        new="communicator(False)",
        cases=("parallel-ahead",),
    ),
    _m(
        name="ranks-ahead-without",
        function="engram_core.limits:prefetchable",
        says="a chain that exchanges would run ahead without a communicator for it",
        old="and parallel.ahead is None",
        new="and False",
        cases=("parallel-ahead-without",),
    ),
    _wkv_init(
        name="ranks-first-outputs",
        says="every rank computes the first outputs",
        old="first = spec.parallel.tensor.rank * each if split else 0",
        new="first = 0",
        cases=("parallel-tensor-2",),
    ),
    _wkv_init(
        name="ranks-uneven-split",
        says="outputs are split where the parts are no multiple of 32",
        old="% (ranks * BLOCK) == 0",
        new="% ranks == 0",
        cases=("parallel-tensor-8",),
    ),
    _wkv_store(
        name="ranks-first-scales",
        says="every rank takes the first scales",
        old="slice(self._columns.start // blocks, self._columns.stop // blocks)",
        new="slice(0, (self._columns.stop - self._columns.start) // blocks)",
        cases=("parallel-tensor-2",),
    ),
    _plan(
        name="ranks-empty-shard",
        says="a rank is left without columns, where the table should be cut by rows",
        old="if each * (parts - 1) >= total:",
        new="if each * (parts - 1) > total:",
        cases=("rows-shard-24-over-7",),
    ),
    _plan(
        name="ranks-rows-lost",
        says="a cut by rows loses the rows that don't divide",
        old="size = -(-rows // parts)",
        new="size = rows // parts",
        cases=("rows-shard-9-over-8", "parallel-rows-9-over-8"),
    ),
    _plan(
        name="ranks-spare-rows-lost",
        says="rows past the last head belong to no rank",
        old="stop = rows if part == parts - 1 else start",
        new="stop = start",
        cases=("rows-shard-spare",),
    ),
    _window(
        name="ranks-window-floor",
        says="windows are T // P tokens, and the rest is lost",
        old="slot = -(-num_tokens // parallel.tensor.size)",
        new="slot = num_tokens // parallel.tensor.size",
        cases=("parallel-sequence-9-over-2",),
    ),
    _window(
        name="ranks-window-past-end",
        says="the last ranks' windows begin past the batch's end",
        old="start = min(parallel.tensor.rank * slot, num_tokens)",
        new="start = parallel.tensor.rank * slot",
        cases=("parallel-sequence-5-over-4", "parallel-sequence-1-over-3"),
    ),
    _inject(
        name="ranks-window-mask",
        says="every window takes the mask's beginning",
        old="mask[mine.start : mine.start + mine.real]",
        new="mask[: mine.real]",
        cases=("parallel-sequence-masked",),
    ),
    _inject(
        name="ranks-slots-computed",
        says="padded slots of a window are computed",
        old="real = mine.real",
        new="real = slots",
        cases=("parallel-sequence-slots",),
    ),
    _m(
        name="ranks-data-order",
        function="engram_core.parallel:Parallel.shard",
        says="shards are numbered data rank major",
        old="self.tensor.rank * self.data_size + (0 if self.data is None else self.data.rank)",
        new="(0 if self.data is None else self.data.rank) * self.tensor.size + self.tensor.rank",
        cases=("parallel-data-and-tensor-columns-24",),
    ),
)
