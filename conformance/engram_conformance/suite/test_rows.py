"""Look-ups against rows decoded in NumPy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases import Case
from engram_conformance.data import random_rows
from engram_conformance.oracle.numbers import I64, U8
from engram_conformance.ranks import Seat
from engram_conformance.subject import Subject
from engram_core.info import Capability
from engram_core.parallel import Parallel
from engram_core.specs import TableSpec
from engram_core.table import EngramTable

_COLUMNS = 6
_HOT_WIDTH = 66  # of a row of 64 values


class Rig:
    """A table of random rows and its oracle."""

    def __init__(
        self,
        subject: Subject,
        tmp_path: Path,
        packed: U8 | None = None,
        head_dim: int = 64,
        parallel: Parallel | None = None,
        columns: int = _COLUMNS,
        placement: str | None = None,
        cache_bytes: int = 0,
        spare: int = 0,
    ) -> None:
        rng = subject.rng()
        sizes = tuple(int(n) for n in rng.integers(11, 41, columns))
        rows = sum(sizes) + spare
        self.packed = random_rows(rng, rows, head_dim) if packed is None else packed
        rows = self.packed.shape[0]
        sizes = sizes if sum(sizes) <= rows else (rows // columns,) * columns
        self.subject, self.sizes, self.rows, self.dim = subject, sizes, rows, self.packed.shape[1] * 32 // 33
        placement = placement or subject.placement
        path = None
        if placement == "file":
            path = tmp_path / "table"
            path.write_bytes(self.packed.tobytes())
        parallel = parallel or Parallel.single()
        self.table = subject.table(TableSpec(rows, self.dim, sizes, placement, parallel, path, cache_bytes))
        if path is None:
            self.load(slice(0, rows))

    def load(self, here: slice) -> None:
        codes, scales = self.packed[here, : self.dim], self.packed[here, self.dim :]
        self.table.load(bridge.fp8(codes), bridge.e8m0(scales), here.start)

    def ids(self, tokens: int, seed: int = 0) -> I64:
        return np.random.default_rng([self.subject.case.seed, seed]).integers(0, self.rows, (tokens, len(self.sizes)))

    def device_ids(self, ids: I64, wide: bool = False) -> torch.Tensor:
        return bridge.tensor(ids, self.table.ids_device, torch.int64 if wide else torch.int32)

    def check(self, ids: I64, given: torch.Tensor | None = None, wide: bool = False) -> None:
        """The look-up of ``ids``, as bf16 and packed."""
        given = self.device_ids(ids, wide) if given is None else given
        want = oracle.lookup_rows(self.packed, ids)
        self.subject.judge(oracle.check_bits(bridge.bits(self.table.lookup(given)), want))
        packed = self.table.lookup(given, packed=True)
        assert packed.dtype == torch.uint8
        self.subject.judge(oracle.check_bits(oracle.decode_rows(bridge.array(packed)), want, "packed rows"))


def test_codes(case: Case, subject: Subject, tmp_path: Path) -> None:
    scales = np.arange(256, dtype=np.uint8)
    packed = np.concatenate([np.tile(scales, (256, 1)), np.repeat(scales[:, None], 8, axis=1)], axis=1)
    rig = Rig(subject, tmp_path, packed)
    rig.check(np.resize(np.arange(256), (43, _COLUMNS)))


def test_blocks(case: Case, subject: Subject, tmp_path: Path) -> None:
    rng, dim = subject.rng(), case.params["head_dim"]
    packed = rng.integers(0, 256, (250, dim + dim // 32), dtype=np.uint8)
    Rig(subject, tmp_path, packed).check(np.resize(np.arange(250), (42, _COLUMNS)))


def test_probe(case: Case, subject: Subject, tmp_path: Path) -> None:
    p = case.params
    packed = np.array([[p["code"]] * 256 + list(p["scales"])] * 12, dtype=np.uint8)
    rig = Rig(subject, tmp_path, packed)
    got = bridge.bits(rig.table.lookup(rig.device_ids(np.zeros((1, _COLUMNS), dtype=np.int64))))
    want = np.repeat(np.array(p["bits"], dtype=np.uint16), 32)
    subject.judge(oracle.check_bits(got, np.broadcast_to(want, got.shape)))


def test_tokens(case: Case, subject: Subject, tmp_path: Path) -> None:
    p = case.params
    options = {name: p[name] for name in ("head_dim", "placement", "spare") if name in p}
    rig = Rig(subject, tmp_path, **options)
    tokens = p["tokens"]
    if p.get("host_ids"):
        tokens = max(tokens, rig.table.host_ids_from or 0)  # the table's own word from where on it takes them
    ids = rig.ids(tokens)
    if len(ids):
        ids[-1, -1], ids[0, 0] = rig.rows - 1, 0
    rig.check(ids, wide=p.get("wide", False))
    if p.get("host_ids"):
        found = rig.table.lookup(rig.device_ids(ids), host_ids=torch.from_numpy(ids))
        subject.judge(oracle.check_bits(bridge.bits(found), oracle.lookup_rows(rig.packed, ids), "with host ids"))


def test_nowhere(case: Case, subject: Subject, tmp_path: Path) -> None:
    p, rig = case.params, Rig(subject, tmp_path)
    # What a look-up might read instead must not show through: NaN scales at both ends of the table.
    rig.packed[[0, -1], rig.dim :] = 255
    rig.load(slice(0, rig.rows))
    named = {"rows": rig.rows, "rows+1": rig.rows + 1}
    ids = rig.ids(8)
    for place, bad in enumerate(p["ids"]):
        ids[place, place % _COLUMNS] = named.get(bad, bad)
    rig.check(ids, wide=p.get("wide", False))
    whole = np.full((3, _COLUMNS), named.get(p["ids"][0], p["ids"][0]))
    out = subject.poisoned(3, _COLUMNS, rig.dim)
    rig.table.lookup(rig.device_ids(whole, p.get("wide", False)), out=out)
    subject.judge(oracle.check_bits(bridge.bits(out), np.zeros((3, _COLUMNS, rig.dim), dtype=np.uint16)))


def test_slices(case: Case, subject: Subject, tmp_path: Path) -> None:
    rig, kind = Rig(subject, tmp_path), case.params["kind"]
    ids = rig.ids(13)
    if kind == "layer":
        whole = np.stack([rig.ids(13, 1), ids, rig.ids(13, 2)], axis=1)
        given = rig.device_ids(whole)[:, 1]
    elif kind == "transposed":
        given = rig.device_ids(np.ascontiguousarray(ids.T)).T
    else:
        given = rig.device_ids(np.repeat(ids, 2, axis=0))[::2]
    assert not given.is_contiguous()
    rig.check(ids, given)


def test_out(case: Case, subject: Subject, tmp_path: Path) -> None:
    rig, ids = Rig(subject, tmp_path), np.random.default_rng(1).integers(0, 60, (7, _COLUMNS))
    ids[0, 1], ids[4, 5], ids[6, 0] = -1, rig.rows, -(2**31)
    want = oracle.lookup_rows(rig.packed, ids)
    for packed, width, dtype in ((False, rig.dim, torch.bfloat16), (True, rig.dim * 33 // 32, torch.uint8)):
        holder = subject.poisoned(14, _COLUMNS + 3, width + 64, dtype=dtype)
        out = (
            holder[::2, 1:-2, 32 : 32 + width] if case.params.get("strided") else holder[:7, :_COLUMNS, :width].clone()
        )
        before = holder.clone()
        returned = rig.table.lookup(rig.device_ids(ids), out=out, packed=packed)
        assert returned.data_ptr() == out.data_ptr(), "`out` was given, and something else came back"
        got = bridge.bits(out) if not packed else oracle.decode_rows(bridge.array(out))
        subject.judge(oracle.check_bits(got, want))
        if case.params.get("strided"):
            out.copy_(before[::2, 1:-2, 32 : 32 + width])
            assert torch.equal(holder.view(torch.uint8), before.view(torch.uint8)), "memory around `out` was written"


def test_shard(case: Case, subject: Subject, tmp_path: Path) -> None:
    columns, ranks = case.params["columns"], case.params["ranks"]
    each = -(-columns // ranks)
    by_rows = each * (ranks - 1) >= columns  # it would leave a rank without columns
    held = 0
    for rank in range(ranks):
        rig = Rig(
            subject, tmp_path, columns=columns, parallel=Parallel(Seat(rank, ranks)), spare=case.params.get("spare", 0)
        )
        shard = rig.table.shard
        starts = np.cumsum([0, *rig.sizes])
        if by_rows:
            size = -(-rig.rows // ranks)
            owned, mine = range(min(rank * size, rig.rows), min((rank + 1) * size, rig.rows)), range(columns)
        else:
            mine = range(rank * each, min((rank + 1) * each, columns))
            owned = range(int(starts[mine.start]), rig.rows if rank == ranks - 1 else int(starts[mine.stop]))
        assert rig.table.packed.shape[0] == len(owned), f"rank {rank} holds {shard.rows} rows; {len(owned)} are its own"
        held += len(owned)
        # Every column gets ids of the whole table, so most are other ranks' rows.
        ids = rig.ids(9)
        got = bridge.bits(rig.table.lookup(rig.device_ids(ids), out=subject.poisoned(9, shard.columns, rig.dim)))
        want = np.zeros((9, columns if by_rows else each, rig.dim), dtype=np.uint16)
        want[:, : len(mine)] = oracle.lookup_rows(rig.packed, ids[:, mine.start : mine.stop], owned)
        subject.judge(oracle.check_bits(got, want, f"rows of rank {rank}"))
    assert held == rig.rows, f"the ranks hold {held} rows of {rig.rows}"


def test_load(case: Case, subject: Subject, tmp_path: Path) -> None:
    kind, rig = case.params["kind"], Rig(subject, tmp_path, head_dim=160)
    given = np.array([120, 125, 127, 130, 140], dtype=np.uint8)
    rig.packed[5, 160:] = given
    if kind == "pieces":
        for begin in (0, 5, 6):
            rig.load(slice(begin, {0: 5, 5: 6, 6: rig.rows}[begin]))
    elif kind == "typed":
        rig.table.scales.view(torch.float8_e8m0fnu)[5].copy_(bridge.e8m0(given))
    else:
        rig.check(rig.ids(5))
        rig.packed = random_rows(np.random.default_rng(9), rig.rows, 160)
        rig.packed[5, 160:] = given
        rig.load(slice(0, rig.rows))
    got = rig.table.scales[5].cpu().view(torch.uint8).numpy()
    subject.judge(oracle.check_ids(got, given, "scale bytes"))
    rig.check(np.vstack([rig.ids(5, 1), np.full((1, _COLUMNS), 5)]))


def test_hot_rows(case: Case, subject: Subject, tmp_path: Path) -> None:
    p = case.params
    rank, ranks = p.get("rank", (0, 1))
    parallel = Parallel(Seat(rank, ranks)) if ranks > 1 else None
    cache_bytes = 24 * _HOT_WIDTH if "wanted" in p else 1 << 16
    rig = Rig(subject, tmp_path, parallel=parallel, placement=p["placement"], cache_bytes=cache_bytes)
    shard, rng = rig.table.shard, subject.rng()
    ids = rig.ids(p["tokens"])
    ids[::5, 0], ids[1::5, 1] = -1, rig.rows + 7  # rows that nobody has are in no cache
    mine = ids[:, shard.first : shard.first + shard.real]
    here = (mine >= shard.row_start) & (mine < shard.row_stop)

    def look_up(cached: I64) -> None:
        rig.table.cache_hits()
        found = bridge.bits(rig.table.lookup(rig.device_ids(ids)))
        want = oracle.lookup_rows(rig.packed, np.where(here, mine, -1))
        subject.judge(oracle.check_bits(found[:, : shard.real], want))
        served = (int((np.isin(mine, cached) & here).sum()), int(here.sum()))
        assert rig.table.cache_hits() == served, f"counted other hits than {served} (served by the cache, in all)"

    def cache(wanted: I64) -> I64:
        own = wanted[(wanted >= shard.row_start) & (wanted < shard.row_stop)]
        _, firsts = np.unique(own, return_index=True)
        own = own[np.sort(firsts)]
        kept = rig.table.cache_rows(torch.from_numpy(wanted))
        assert 0 < kept <= len(own), f"{kept} rows were kept of {len(own)}"
        assert ("wanted" in p) == (kept < len(own)), f"{kept} rows of {len(own)} were kept in {cache_bytes} bytes"
        return own[:kept]

    look_up(np.empty(0, np.int64))
    cached = cache(rng.permutation(rig.rows)[: p.get("wanted", rig.rows // 2)])
    look_up(cached)
    rig.packed[:] = random_rows(rng, rig.rows, rig.dim)
    rig.load(slice(0, rig.rows // 2))
    rig.load(slice(rig.rows // 2, rig.rows))
    look_up(cached)
    changed = random_rows(rng, shard.rows, rig.dim)  # and through the views
    rig.packed[shard.row_start : shard.row_stop] = changed
    rig.table.values.view(torch.uint8).copy_(torch.from_numpy(changed[:, : rig.dim]))
    rig.table.scales.copy_(torch.from_numpy(changed[:, rig.dim :]))
    look_up(cached)
    again = rng.permutation(rig.rows)[: p.get("wanted", rig.rows // 3)]
    look_up(cache(np.concatenate([again, again[:9]])))  # the second time a row is named is nothing new
    rig.table.cache_rows(torch.empty(0, dtype=torch.int64))
    look_up(np.empty(0, np.int64))
    with subject.raises("ids"):
        rig.table.cache_rows(torch.tensor([rig.rows]))


def test_sparse(case: Case, subject: Subject, tmp_path: Path) -> None:
    rows, dim, path = case.params["rows"], 256, tmp_path / "sparse"
    width = dim + dim // 32
    marked = {0: 3, 12_201_612: 4, 2**32 // width: 5, 2**33 // width + 1: 6, rows - 2: 7, rows - 1: 8}
    rng = np.random.default_rng(0)
    content = {row: random_rows(rng, 1, dim)[0] for row in marked}
    try:
        with path.open("wb") as file:
            os.truncate(file.fileno(), rows * width)
            for row, packed in content.items():
                file.seek(row * width)
                file.write(packed.tobytes())
    except OSError as error:
        subject.not_run(f"a sparse file of {rows * width} bytes can't be made here: {error}")
    table: EngramTable = subject.table(TableSpec(rows, dim, (rows // 2, rows // 2), "file", Parallel.single(), path))
    wanted: Any = [*marked, rows, 1]
    ids = np.array(wanted).reshape(-1, 2)
    want = np.stack([oracle.decode_rows(content.get(row, np.zeros(width, dtype=np.uint8))) for row in wanted])
    want = want.reshape(len(ids), 2, dim)
    want[ids == rows] = 0
    got = table.lookup(bridge.tensor(ids, table.ids_device, torch.int32))
    subject.judge(oracle.check_bits(bridge.bits(got), want))
    assert Capability.PLACEMENT_FILE in case.needs
