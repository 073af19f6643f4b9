"""Rows in host memory that are served from elsewhere: gathered by the CPU, or cached in device memory."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch
from engram_nvidia.backend import NvidiaBackend
from test_kernels_tables import CPU, DIM, ROWS, WIDTH, FakeHip, fill, rows, runtime, spec

from engram_core.errors import InvalidArgumentError, TableError
from engram_core.formats import rows_to_bf16
from engram_core.gpu.gather import CpuGather
from engram_core.gpu.hot import HotCache
from engram_core.gpu.table import GpuTable, Tuning
from engram_core.kernels.lookup import lookup_rows


@pytest.mark.parametrize("start", [0, 2**31 + 5])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_cpu_gathers_of_tables_beyond_int32(start: int, dtype: torch.dtype) -> None:
    """int32 ids name the first 2**31 rows of them, and a shard that starts later holds none of these."""
    packed = rows()[:1].expand(2**31 + 5, WIDTH)
    out = torch.empty(2, 2, WIDTH, dtype=torch.uint8)
    for ids in ([[-1, 3], [7, -(2**31)]], [[1, 3], [7, 2**31 - 1]]):
        asked = torch.tensor(ids, dtype=dtype)
        CpuGather(packed, start, CPU)(asked, out)
        here = (asked.to(torch.int64) >= start).unsqueeze(-1)
        assert torch.equal(out, rows()[0].expand(2, 2, WIDTH).masked_fill(~here, 0))


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("packed", [False, True])
def test_the_cpu_gathers_what_it_has_the_ids_of(share: float, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows lie in host memory, ids came in CPU memory and there are enough tokens; and never in a capture."""
    hip = FakeHip()
    table = GpuTable(spec(), CPU, runtime(hip), Tuning(cpu_tokens=4, device_share=share, ordered=6))
    fill(table, rows(1))
    there = rows(2)
    ctypes.memmove(hip.view, there.data_ptr(), ROWS * WIDTH)  # what the device would read
    ids = torch.randint(-3, ROWS + 3, (5, 3), generator=torch.Generator().manual_seed(0))

    def from_(source: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
        owned = (asked >= 0) & (asked < ROWS)
        found = source[asked.clamp(0, ROWS - 1)].masked_fill(~owned[..., None], 0)
        return found if packed else rows_to_bf16(found)

    assert table.host_ids_from == 4
    assert torch.equal(table.lookup(ids, packed=packed, host_ids=ids), from_(rows(1), ids))
    assert torch.equal(table.lookup(ids[:3], packed=packed, host_ids=ids[:3]), from_(rows(2), ids[:3]))
    assert torch.equal(table.lookup(ids, packed=packed), from_(rows(2), ids))
    monkeypatch.setattr("engram_core.gpu.table.is_capturing", lambda device: True)
    assert torch.equal(table.lookup(ids, packed=packed, host_ids=ids), from_(rows(2), ids))


@pytest.mark.parametrize("cache_bytes", [0, 10**4])
def test_few_rows_are_in_flight_over_the_bus_beside_other_work(
    cache_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int | None, bool]] = []

    def record(*given: Any, in_flight: int | None, order: torch.Tensor | None, **rest: Any) -> torch.Tensor:
        asked.append((in_flight, order is not None))
        return lookup_rows(*given, in_flight=in_flight, order=order, **rest)

    monkeypatch.setattr("engram_core.gpu.table.lookup_rows", record)
    hip = FakeHip()
    tuning = Tuning(in_flight=4, ordered=20, in_order=8)
    table = GpuTable(replace(spec(), cache_bytes=cache_bytes), CPU, runtime(hip), tuning)
    there = rows(1)
    fill(table, there)
    ctypes.memmove(hip.view, there.data_ptr(), ROWS * WIDTH)
    if cache_bytes:
        table.cache_rows(torch.arange(0, ROWS, 2))
    ids = torch.randint(0, ROWS, (7, 3), generator=torch.Generator().manual_seed(0))
    for tokens, background in ((2, False), (2, True), (7, False), (7, True)):
        found = table.lookup(ids[:tokens], packed=True, background=background)
        assert torch.equal(found, there[ids[:tokens]])
    few, ordered = (8, 16) if cache_bytes else (4, 8)
    assert asked == [(None, False), (few, False), (ordered, True), (ordered, True)]


def test_a_cache_smaller_than_its_index_is_refused() -> None:
    hip = FakeHip()
    with pytest.raises(InvalidArgumentError, match="cache_bytes.*at least 78: the index of 40 rows, and one row"):
        GpuTable(replace(spec(), cache_bytes=77), CPU, runtime(hip))
    assert not hip.calls  # gigabytes are neither touched nor page-locked first
    assert GpuTable(replace(spec(), cache_bytes=78), CPU, runtime(FakeHip())).cache_rows(torch.arange(3)) == 1


def test_a_write_through_the_views_reaches_the_cache() -> None:
    table = NvidiaBackend(CPU).create_table(replace(spec(), cache_bytes=10**4))
    fill(table, rows(1))
    assert table.cache_rows(torch.arange(ROWS)) == ROWS
    ids = torch.tensor([[3, 12, 39]])
    assert torch.equal(table.lookup(ids, packed=True), rows(1)[ids])
    table.values.copy_(rows(2)[:, :DIM].view(torch.float8_e4m3fn))
    table.scales.copy_(rows(2)[:, DIM:])
    assert torch.equal(table.lookup(ids, packed=True), rows(2)[ids])
    assert table.cache_hits() == (6, 6)


def test_the_cache_follows_a_load_after_a_write_through_the_views() -> None:
    """At once: a captured graph that is replayed next can't bring it up to date."""
    table = NvidiaBackend(CPU).create_table(replace(spec(), cache_bytes=10**4))
    assert isinstance(table, GpuTable)
    assert table._hot is not None
    table.cache_rows(torch.arange(ROWS))
    table.packed.copy_(rows(1))
    table.load(rows(2)[:5, :DIM], rows(2)[:5, DIM:])
    assert torch.equal(table._hot.set.rows[:ROWS], torch.cat([rows(2)[:5], rows(1)[5:]]))


def test_what_another_process_writes_while_the_cache_is_brought_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    table = NvidiaBackend(CPU).create_table(replace(spec("shared"), cache_bytes=10**4))
    assert isinstance(table, GpuTable)
    table.cache_rows(torch.arange(ROWS))
    table.packed.copy_(rows(1))
    refresh = HotCache.refresh

    def overtaken(cache: HotCache, first: int, last: int) -> None:
        refresh(cache, first, last)
        monkeypatch.undo()
        table.packed.copy_(rows(2))

    monkeypatch.setattr(HotCache, "refresh", overtaken)
    table.settle()
    ids = torch.tensor([[3, 12, 39]])
    assert torch.equal(table.lookup(ids, packed=True), rows(2)[ids])


def test_rows_are_cached_between_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    table = NvidiaBackend(CPU).create_table(replace(spec(), cache_bytes=10**4))
    monkeypatch.setattr("engram_core.table.is_capturing", lambda device: True)
    for call in (lambda: table.cache_rows(torch.arange(3)), table.cache_hits):
        with pytest.raises(TableError, match=r"^cache_\w+: .*can't be captured"):
            call()
