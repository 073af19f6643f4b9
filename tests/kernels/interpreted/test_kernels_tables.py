"""Tables: host memory through the device's own address of it, registered and given back; files; shards."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engram_conformance.ranks import Seat
from engram_nvidia.backend import NvidiaBackend

from engram_core import Parallel
from engram_core.backend import EngramBackend, TableSpec
from engram_core.errors import TableError
from engram_core.formats import pack_rows, quantize_mxfp8, rows_to_bf16
from engram_core.gpu.memory import host_rows
from engram_core.gpu.runtime import HostRuntime
from engram_core.gpu.table import GpuTable, Tuning

CPU = torch.device("cpu")
ROWS, DIM = 40, 64
WIDTH = DIM * 33 // 32


class FakeHip:
    """A runtime whose device sees registered memory at another address: in a second buffer, the "device's view".

    ``fail``: names of calls that answer with error 2.
    """

    def __init__(self, *fail: str) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.fail = fail
        self.view: Any = None
        for name in ("HostRegister", "HostUnregister", "HostGetDevicePointer", "GetLastError", "GetErrorString"):
            setattr(self, f"hip{name}", self._function(name))

    def _function(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            plain = tuple(getattr(a, "value", a) for a in args)
            self.calls.append((name, *plain))
            if name == "GetErrorString":
                return b"out of memory"
            if name == "HostRegister":
                self.view = (ctypes.c_uint8 * plain[1])()
            if name == "HostGetDevicePointer":
                args[0]._obj.value = ctypes.addressof(self.view)
            return 2 if name in self.fail else 0

        return call

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]


def runtime(hip: FakeHip) -> HostRuntime:
    return HostRuntime(hip, "hip", 8)


def spec(placement: str = "host", rank: int = 0, ranks: int = 1, path: Path | None = None) -> TableSpec:
    return TableSpec(ROWS, DIM, (10, 12, 18), placement, Parallel(Seat(rank, ranks)), path)


def rows(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return pack_rows(*quantize_mxfp8(torch.randn(ROWS, DIM, generator=generator)))


def fill(table: GpuTable, packed: torch.Tensor) -> None:
    table.load(packed[:, :DIM], packed[:, DIM:])


def test_rows_are_read_through_the_devices_address_and_the_hosts_is_given_back() -> None:
    hip = FakeHip()
    table = GpuTable(spec(), CPU, runtime(hip))
    host = table.packed.data_ptr()
    assert hip.calls[0] == ("HostRegister", host, ROWS * WIDTH, 3)
    assert hip.names() == ["HostRegister", "HostGetDevicePointer"]
    assert ctypes.addressof(hip.view) != host
    here, there = rows(1), rows(2)
    fill(table, here)
    ctypes.memmove(hip.view, there.data_ptr(), there.numel())
    ids = torch.tensor([[3, 12, 39], [0, -1, ROWS]], dtype=torch.int32)
    found = table.lookup(ids)
    expected = rows_to_bf16(there[ids.clamp(0, ROWS - 1).long()])
    expected[1, 1:] = 0
    assert torch.equal(found, expected)
    assert table.graph_safe
    del table
    gc.collect()
    assert hip.calls[-1] == ("HostUnregister", host)


def test_loading_writes_where_the_host_sees_it() -> None:
    table = GpuTable(spec(), CPU, runtime(FakeHip()))
    before = table.version
    fill(table, rows())
    assert torch.equal(table.packed, rows())
    assert table.version != before


@pytest.mark.parametrize(
    ("fail", "said", "calls"),
    [
        (
            ("HostRegister",),
            r"2640 bytes of host memory can't be page-locked \(out of memory\); .*memlock",
            ["HostRegister", "GetLastError", "GetErrorString"],
        ),
        (
            ("HostGetDevicePointer",),
            r"the device has no address .*placement 'device'",
            ["HostRegister", "HostGetDevicePointer", "GetLastError", "GetErrorString", "HostUnregister"],
        ),
    ],
)
def test_a_refusal_of_the_runtime_is_an_error_that_leaves_nothing_behind(
    fail: tuple[str, ...], said: str, calls: list[str]
) -> None:
    """The runtime's last error is cleared (it would fail the next launch), and what was registered is given back."""
    hip = FakeHip(*fail)
    with pytest.raises(TableError, match=said):
        GpuTable(spec(), CPU, runtime(hip))
    assert hip.names() == calls


def test_a_runtime_that_is_not_loaded_is_named() -> None:
    with pytest.raises(TableError, match="need libamdhip64.so, and this process has not loaded it"):
        HostRuntime.loaded("libamdhip64.so", "hip")


def test_the_runtime_is_found_among_the_loaded_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def open_library(path: str) -> FakeHip:
        opened.append(path)
        return FakeHip()

    monkeypatch.setattr(ctypes, "CDLL", open_library)
    monkeypatch.setattr("engram_core.gpu.runtime._MAPS", Path(__file__).parent / "maps.txt")
    HostRuntime.loaded("libamdhip64.so", "hip")
    assert opened == ["/opt/torch/lib with spaces/libamdhip64.so.7.1"]


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_shard_registers_its_own_rows(ranks: int) -> None:
    packed = rows()
    for rank in range(ranks):
        hip = FakeHip()
        table = GpuTable(spec("host", rank, ranks), CPU, runtime(hip))
        own = packed[table.shard.row_start : table.shard.row_stop].contiguous()
        assert hip.calls[0][2] == own.numel()
        fill(table, packed)
        ctypes.memmove(hip.view, own.data_ptr(), own.numel())
        ids = torch.tensor([[3, 12, 39], [9, 21, 22]])
        assert torch.equal(table.lookup(ids, packed=True), _packed(table, packed, ids))


def _packed(table: GpuTable, packed: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    shard = table.shard
    mine = ids[:, shard.first : shard.first + shard.real]
    found = packed[mine]
    found[(mine < shard.row_start) | (mine >= shard.row_stop)] = 0
    padded = torch.zeros(len(ids), shard.columns, WIDTH, dtype=torch.uint8)
    padded[:, : shard.real] = found
    return padded


def test_a_shard_without_rows_registers_nothing() -> None:
    """Three rows over five ranks, by rows: one a rank, and none for the last two."""
    hip = FakeHip()
    small = TableSpec(3, DIM, (3,), "host", Parallel(Seat(4, 5)))
    table = GpuTable(small, CPU, runtime(hip))
    assert hip.calls == []
    assert not table.lookup(torch.tensor([[0], [2]])).any()


@pytest.mark.parametrize("placement", ["host", "file"])
def test_a_shard_without_rows_is_not_gathered_by_the_cpu_either(placement: str, tmp_path: Path) -> None:
    path = None
    if placement == "file":
        path = tmp_path / "rows"
        path.write_bytes(bytes(3 * WIDTH))
    small = TableSpec(3, DIM, (3,), placement, Parallel(Seat(4, 5)), path)
    table = GpuTable(small, CPU, runtime(FakeHip()), Tuning(cpu_tokens=1))
    ids = torch.tensor([[0], [2]])
    assert not table.lookup(ids, torch.ones(2, 1, DIM, dtype=torch.bfloat16), host_ids=ids).any()


@pytest.mark.parametrize("placement", ["device", "host", "shared"])
def test_in_the_interpreter_the_host_is_the_device(placement: str) -> None:
    table = NvidiaBackend(CPU).create_table(spec(placement))
    assert isinstance(table, GpuTable)
    fill(table, rows())
    ids = torch.tensor([[3, 12, 39]])
    assert torch.equal(table.lookup(ids), rows_to_bf16(rows()[ids]))
    assert table.graph_safe


def test_a_file_is_gathered_from_its_mapping(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(rows().numpy().tobytes())
    table = NvidiaBackend(CPU).create_table(spec("file", path=path))
    ids = torch.tensor([[3, 12, 39], [-5, 0, 10]])
    expected = rows_to_bf16(rows()[ids.clamp_min(0)])
    expected[1, 0] = 0
    assert torch.equal(table.lookup(ids), expected)
    assert not table.graph_safe


def test_host_rows_are_zero_and_writable() -> None:
    held = host_rows(3, WIDTH)
    assert held.shape == (3, WIDTH)
    assert not held.any()
    held[1] = 7
    assert host_rows(0, WIDTH).shape == (0, WIDTH)


def test_more_rows_than_there_is_memory_are_refused_with_the_numbers() -> None:
    """Touching them would not fail: the system would kill the process."""
    with pytest.raises(
        TableError, match=r"'host' needs 2640000000000000 bytes of host memory, .* and \d+ are free; .*'file'"
    ):
        host_rows(10**13, 264)


def test_memory_that_others_take_meanwhile_is_missed_before_it_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([1000, 1000, 1000, 500])
    monkeypatch.setattr("engram_core.gpu.memory.available_memory", lambda: next(free))
    monkeypatch.setattr("engram_core.gpu.memory._PIECE", 100)
    with pytest.raises(
        TableError, match="needs 990 bytes of host memory, 790 of them still to be had, and 500 are free"
    ):
        host_rows(10, 99)


def test_the_tables_own_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is current when the last tensor over registered memory goes: kernels may still read it."""
    hip, waited = FakeHip(), []
    table = GpuTable(spec(), CPU, runtime(hip))
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: waited.append((device, hip.names()[-1])))
    del table
    gc.collect()
    assert waited == [(CPU, "HostGetDevicePointer")]
    assert hip.names()[-1] == "HostUnregister"


def test_a_table_that_goes_during_a_capture_is_given_back_with_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the device would spoil the capture."""
    hips, capturing, waited = [FakeHip(), FakeHip()], [True], []
    monkeypatch.setattr("engram_core.gpu.runtime.is_capturing", lambda device: capturing[0], raising=False)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device=None: waited.append(device))
    tables = [GpuTable(spec(), CPU, runtime(hip)) for hip in hips]
    for given_back in (0, 2):
        del tables[0]
        gc.collect()
        assert sum("HostUnregister" in hip.names() for hip in hips) == len(waited) == given_back
        capturing[0] = False


@pytest.mark.parametrize("placement", ["device", "host", "shared"])
@pytest.mark.parametrize(("made", "used"), [(True, False), (False, True), (True, True)])
def test_inference_mode_where_a_table_is_made_or_used(placement: str, made: bool, used: bool) -> None:
    cache_bytes = 0 if placement == "device" else 10**4
    with torch.inference_mode(made):
        table = NvidiaBackend(CPU).create_table(replace(spec(placement), cache_bytes=cache_bytes))
    ids = torch.tensor([[3, 12, 39]])
    with torch.inference_mode(used):
        before = table.version
        fill(table, rows(1))
        assert table.version != before
        if cache_bytes:
            table.cache_rows(torch.arange(ROWS))
        fill(table, rows(2))
        assert torch.equal(table.lookup(ids, packed=True), rows(2)[ids])
        table.packed.copy_(rows(3))
        assert torch.equal(table.lookup(ids, packed=True), rows(3)[ids])


def test_a_default_device_moves_nothing(backend: EngramBackend) -> None:
    """Engines build their models under one."""
    packed, wanted, ids = rows(1), torch.arange(ROWS), torch.tensor([[3, 12, 39]])
    with torch.device("meta"):
        assert backend.create_table(spec()).packed.device == CPU
        table = GpuTable(replace(spec(), cache_bytes=10**4), CPU, None)
        assert table.cache_rows(wanted) == ROWS
        fill(table, packed)
        assert torch.equal(table.lookup(ids, packed=True), packed[ids])


def test_readers_of_shared_rows_register_them_without_the_right_to_write() -> None:
    hip = FakeHip()
    table = GpuTable(spec("shared"), CPU, runtime(hip))
    assert table._shared is not None
    table._shared = replace(table._shared, writer=False)
    table._register(runtime(hip))
    assert [call[3] for call in hip.calls if call[0] == "HostRegister"] == [3, 3 | 8]
