"""Tables: placements, shards, ids that must read nothing, and loading byte for byte."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import engram_core.shared
from engram_core import EngramTable, Parallel, TableSpec
from engram_core.backend import EngramBackend
from engram_core.errors import InvalidArgumentError, TableError
from engram_core.exchange import Shard
from engram_core.formats import E8M0, FP8, rows_to_bf16
from engram_core.table import is_capturing

SIZES = (11, 13, 17, 19)
ROWS = sum(SIZES)


def spec(placement: str = "device", path: Path | None = None, rows: int = ROWS, dim: int = 64) -> TableSpec:
    return TableSpec(rows, dim, SIZES, placement, Parallel.single(), path)


def random_rows(rows: int = ROWS, dim: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 256, (rows, dim), dtype=torch.uint8, generator=generator)
    return values, torch.randint(0, 256, (rows, dim // 32), dtype=torch.uint8, generator=generator)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit-equal, any NaN equal to any NaN."""
    both = a.isnan() & b.isnan()
    bits = torch.int16
    return bool((both | (a.contiguous().view(bits) == b.contiguous().view(bits))).all())


@pytest.fixture(params=["device", "host", "shared", "file"])
def table(request: pytest.FixtureRequest, backend: EngramBackend, tmp_path: Path) -> EngramTable:
    values, scales = random_rows()
    if request.param == "file":
        path = tmp_path / "rows"
        path.write_bytes(torch.cat([values, scales], dim=1).numpy().tobytes())
        return backend.create_table(spec("file", path))
    made = backend.create_table(spec(request.param))
    made.load(values.view(FP8), scales.view(E8M0))
    return made


def test_every_placement_gives_the_same_rows(table: EngramTable) -> None:
    values, scales = random_rows()
    ids = torch.tensor([[0, 12, 30, 59], [10, 23, 40, 41]])
    expected = rows_to_bf16(torch.cat([values, scales], dim=1))[ids]
    assert same(table.lookup(ids), expected)
    assert torch.equal(table.lookup(ids, packed=True), torch.cat([values, scales], dim=1)[ids])
    assert torch.equal(table.values.view(torch.uint8), values)
    assert torch.equal(table.scales, scales)
    assert table.graph_safe == (table.spec.placement != "file")


def test_ids_outside_give_zero_rows_whatever_out_held(table: EngramTable) -> None:
    ids = torch.tensor([[-1, ROWS, 2**31 - 1, 5], [-(2**31), 3, -7, 2]], dtype=torch.int32)
    out = torch.full((2, 4, 64), float("nan"), dtype=torch.bfloat16)
    assert table.lookup(ids, out=out) is out
    bits = out.view(torch.int16)
    assert int(bits[0, :3].abs().max()) == 0
    assert int(bits[1, (0, 2)].abs().max()) == 0
    assert same(out[0, 3], table.lookup(torch.full((1, 4), 5))[0, 0])


def test_ids_of_any_strides(table: EngramTable) -> None:
    wide = torch.randint(0, ROWS, (6, 3, 8))
    ids = wide[:, 1, ::2]
    assert not ids.is_contiguous()
    assert same(table.lookup(ids), table.lookup(ids.contiguous()))
    flipped = wide[:4, 0, :6].T
    assert same(table.lookup(flipped[:5].contiguous()), table.lookup(flipped[:5]))


def test_more_tokens_than_a_chunk(table: EngramTable) -> None:
    ids = torch.randint(-2, ROWS + 2, (1300, 4))
    found = table.lookup(ids)
    assert same(found[[0, 511, 512, 1299]], table.lookup(ids[[0, 511, 512, 1299]]))


def test_writes_through_the_views_are_seen(backend: EngramBackend) -> None:
    table = backend.create_table(spec())
    before = table.version
    table.values[7].copy_(torch.full((64,), 1.0).to(FP8))
    table.scales[7].fill_(128)
    assert table.version != before
    assert table.lookup(torch.full((1, 4), 7)).tolist() == [[[2.0] * 64] * 4]


def test_load_in_pieces(backend: EngramBackend) -> None:
    values, scales = random_rows()
    table = backend.create_table(spec())
    for start in (0, 20, 40):
        table.load(values[start : start + 20], scales[start : start + 20], start)
    assert torch.equal(table.packed, torch.cat([values, scales], dim=1))


@pytest.mark.parametrize("start", [-1, 41])
def test_load_outside_is_refused_and_writes_nothing(backend: EngramBackend, start: int) -> None:
    values, scales = random_rows()
    table = backend.create_table(spec())
    with pytest.raises(InvalidArgumentError, match=rf"^start: got {start} for 20 rows"):
        table.load(values[:20], scales[:20], start)
    assert not bool(table.packed.any())


def test_load_refuses_scales_as_numbers(backend: EngramBackend) -> None:
    values, scales = random_rows()
    table = backend.create_table(spec())
    with pytest.raises(InvalidArgumentError, match=r"^scales: got .*float32"):
        table.load(values, scales.float())
    assert not bool(table.packed.any())


def test_a_file_of_another_size_is_refused_with_both_numbers(backend: EngramBackend, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"\0" * (ROWS * 66 - 1))
    with pytest.raises(TableError, match=rf"rows: has {ROWS * 66 - 1} bytes.*exactly {ROWS * 66}"):
        backend.create_table(spec("file", path))
    with pytest.raises(TableError, match="missing: No such file"):
        backend.create_table(spec("file", tmp_path / "missing"))


def test_a_file_table_is_never_written(backend: EngramBackend, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    values, scales = random_rows()
    content = torch.cat([values, scales], dim=1).numpy().tobytes()
    path.write_bytes(content)
    path.chmod(0o400)
    table = backend.create_table(spec("file", path))
    table.scales.fill_(127)
    with pytest.raises(TableError, match="^load: a table of placement 'file'"):
        table.load(values, scales)
    assert path.read_bytes() == content


def test_the_last_row_beyond_eight_gibibytes(backend: EngramBackend, tmp_path: Path) -> None:
    """A sparse file: row offsets are int64."""
    rows = 2**33 // 264 + 10
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(rows * 264)
        file.seek((rows - 1) * 264)
        file.write(b"\x38" * 256 + b"\x80" * 8)
    assert os.stat(path).st_blocks * 512 < 2**20
    table = backend.create_table(TableSpec(rows, 256, (rows,), "file", Parallel.single(), path))
    found = table.lookup(torch.tensor([[rows - 1], [rows - 2], [rows]]))
    assert found[:, 0, 0].tolist() == [2.0, 0.0, 0.0]


def test_shared_memory_is_measured_first(backend: EngramBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engram_core.shared, "available_memory", lambda: 4096)
    with pytest.raises(TableError, match=r"needs \d+ bytes of host memory on this node, and 4096 are free to rank 0"):
        backend.create_table(spec("shared"))


def test_a_containers_memory_is_free_where_only_cached_files_are_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemFree: 1 kB\nMemAvailable:   900 kB\n",
        "/sys/fs/cgroup/memory.max": "500000\n",
        "/sys/fs/cgroup/memory.current": "450000\n",
        "/sys/fs/cgroup/memory.stat": "anon 50000\nfile 400000\nshmem 30000\ninactive_anon 9\n"
        "inactive_file 300000\nactive_file 70000\n",
    }
    monkeypatch.setattr(engram_core.shared, "_read", lambda path: files.get(path, ""))
    assert engram_core.shared.available_memory() == 420000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert engram_core.shared.available_memory() == 900 * 1024


def test_a_limit_of_any_group_above_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/meminfo": "MemAvailable:   900 kB\n",
        "/proc/self/cgroup": "0::/slurm/job_7/step\n",
        "/sys/fs/cgroup/slurm/job_7/memory.max": "500000\n",
        "/sys/fs/cgroup/slurm/job_7/memory.current": "200000\n",
        "/sys/fs/cgroup/slurm/job_7/step/memory.max": "max\n",
        "/sys/fs/cgroup/slurm/job_7/step/memory.current": "100\n",
    }
    monkeypatch.setattr(engram_core.shared, "_read", lambda path: files.get(path, ""))
    assert engram_core.shared.available_memory() == 300000


def test_a_capture_is_looked_for_on_the_device_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    current = [0]

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        before, current[0] = current[0], device.index or 0
        yield
        current[0] = before

    monkeypatch.setattr("torch.cuda.device", entered)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: current == [1])
    assert is_capturing(torch.device("cuda:1"))
    assert not is_capturing(torch.device("cuda:0"))


def _plan(parts: int, columns: int) -> list[Shard]:
    class Ranks:
        def __init__(self, rank: int) -> None:
            self.rank, self.size = rank, parts

        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            raise AssertionError

        all_to_all = all_gather

    sizes = range(10, 10 + columns)
    return [Shard.plan(sum(sizes) + 3, sizes, Parallel(Ranks(rank))) for rank in range(parts)]


@pytest.mark.parametrize(("columns", "parts"), [(24, 1), (24, 8), (15, 4), (9, 5), (24, 5)])
def test_columns_are_cut_in_order_and_rows_follow(columns: int, parts: int) -> None:
    plans = _plan(parts, columns)
    each = -(-columns // parts)
    assert [p.real for p in plans] == [min(each, columns - each * r) for r in range(parts)]
    assert all(p.columns == each and not p.by_rows for p in plans)
    assert [p.row_start for p in plans[1:]] == [p.row_stop for p in plans[:-1]]
    assert plans[-1].row_stop == sum(range(10, 10 + columns)) + 3


@pytest.mark.parametrize(("columns", "parts"), [(24, 7), (24, 16), (9, 4), (9, 8), (1, 2)])
def test_rows_are_cut_where_columns_would_leave_a_rank_empty(columns: int, parts: int) -> None:
    plans = _plan(parts, columns)
    assert all(p.by_rows and p.columns == p.real == columns for p in plans)
    assert plans[0].row_start == 0
    assert [p.row_start for p in plans[1:]] == [p.row_stop for p in plans[:-1]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rows": 59}, "^rows: got 59; need at least 60"),
        ({"head_dim": 40}, "^head_dim: got 40; need a multiple of 32"),
        ({"head_sizes": ()}, "^head_sizes"),
        ({"head_sizes": (0,)}, "^head_sizes"),
        ({"placement": "disk"}, "^placement: got 'disk'"),
        ({"placement": "file"}, "^path"),
        ({"path": "x"}, "^path"),
        ({"cache_bytes": -1}, "^cache_bytes"),
    ],
)
def test_wrong_specs_are_refused_by_name(change: dict[str, object], said: str) -> None:
    fields = {"rows": ROWS, "head_dim": 64, "head_sizes": SIZES, "placement": "device", "parallel": Parallel.single()}
    with pytest.raises(InvalidArgumentError, match=said):
        TableSpec(**{**fields, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "out"),
    [
        (torch.zeros(3, 5, dtype=torch.int64), None),
        (torch.zeros(3, 4), None),
        (torch.zeros(4, dtype=torch.int64), None),
        (torch.zeros(3, 4, dtype=torch.int64), torch.empty(3, 4, 64)),
        (torch.zeros(3, 4, dtype=torch.int64), torch.empty(2, 4, 64, dtype=torch.bfloat16)),
        (torch.zeros(3, 4, dtype=torch.int64), torch.empty(3, 4, 128, dtype=torch.bfloat16)[..., ::2]),
    ],
)
def test_wrong_operands_are_refused(backend: EngramBackend, ids: torch.Tensor, out: torch.Tensor | None) -> None:
    argument = "hash_ids" if out is None else "out"
    with pytest.raises(InvalidArgumentError, match=f"^{argument}: got "):
        backend.create_table(spec()).lookup(ids, out=out)
