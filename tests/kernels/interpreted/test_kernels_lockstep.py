"""Programs in lockstep give what they give one by one: the project's kernels, and kernels made to come apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from engram_conformance.data import random_rows
from engram_nvidia.arch import INTERPRETED_CHIP
from engram_nvidia.expand import expand
from engram_nvidia.operands import split_rows
from engram_nvidia.weights import pack_weight
from engram_nvidia.wkv_few import wkv_few
from engram_nvidia.wkv_many import wkv_many
from engram_rocm.unpack import unpack_rows
from engram_rocm.weights import CodedWeight
from engram_rocm.wkv_w8a16 import wkv_w8a16
from models import tiny_config

from engram_core.hashing import TokenBatch
from engram_core.kernels import lockstep
from engram_core.kernels.gate import gate
from engram_core.kernels.hash import HashConstants, hash_ids
from engram_core.kernels.lookup import lookup_rows
from engram_core.layout import HashLayout
from engram_core.specs import GateWeights
from engram_core.tokens import TokenMap

BF16, CPU = torch.bfloat16, torch.device("cpu")


@contextmanager
def one_by_one() -> Iterator[None]:
    """Every launch comes apart before its first operation."""

    def apart(*_: object) -> None:
        raise lockstep.Apart

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lockstep.Lockstep, "create_get_program_id", apart)
        yield


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many times kernels were called in lockstep, and how many programs ran alone."""
    count = {"together": 0, "alone": 0}

    def counted(kind: type, name: str) -> None:
        original = kind.set_grid_idx  # type: ignore[attr-defined]

        def method(self: object, *at: int) -> None:
            count[name] += 1
            original(self, *at)

        monkeypatch.setattr(kind, "set_grid_idx", method)

    counted(lockstep.Lockstep, "together")
    counted(lockstep.Alone, "alone")
    return count


def run_gate() -> torch.Tensor:
    hidden, kv = torch.randn(9, 4, 96).to(BF16), torch.randn(9, 480).to(BF16)
    mask = torch.tensor([True] * 5 + [False] + [True] * 3)
    return gate(hidden, kv, GateWeights(torch.randn(4, 96), torch.randn(4, 96), 1e-20), mask, 8)


def run_hash() -> torch.Tensor:
    constants = HashConstants.of(HashLayout.from_config(tiny_config()), TokenMap.identity(64, 2), CPU)
    starts = torch.tensor([0, 4, 4, 19])
    back = torch.randint(-1, 64, (3, constants.multipliers.shape[1] - 1))
    return hash_ids(TokenBatch(torch.randint(0, 64, (21,)), torch.arange(21), starts, back), constants)


def run_lookup() -> torch.Tensor:
    table = torch.from_numpy(random_rows(np.random.default_rng(0), 50, 64))
    return lookup_rows(table, torch.randint(-3, 60, (9, 6)), torch.empty(9, 6, 64, dtype=BF16), 3)


def run_packed_lookup() -> torch.Tensor:
    table = torch.from_numpy(random_rows(np.random.default_rng(0), 50, 64))
    return lookup_rows(table, torch.randint(-3, 60, (9, 6)), torch.empty(9, 6, 66, dtype=torch.uint8))


def weight() -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 0x7F, (320, 512), dtype=torch.uint8)
    return codes.view(torch.float8_e4m3fn), torch.randint(116, 126, (10, 16), dtype=torch.uint8)


def run_few() -> torch.Tensor:
    rows, out = torch.randn(9, 512).to(BF16), torch.empty(9, 320, dtype=BF16)
    return wkv_few(rows, pack_weight(*weight(), CPU), out, INTERPRETED_CHIP)


def run_many() -> torch.Tensor:
    rows, out = torch.randn(40, 512).to(BF16), torch.empty(40, 320, dtype=BF16)
    return wkv_many(rows, pack_weight(*weight(), CPU), out, INTERPRETED_CHIP)


def run_expand() -> torch.Tensor:
    return expand(pack_weight(*weight(), CPU), torch.empty(320, 512, dtype=BF16), INTERPRETED_CHIP)


def run_operands() -> torch.Tensor:
    codes, scales = split_rows(torch.from_numpy(random_rows(np.random.default_rng(0), 12, 64)).view(3, 4, 66))
    return torch.cat([codes.view(torch.uint8).flatten(), scales])


def run_unpack() -> torch.Tensor:
    return unpack_rows(torch.from_numpy(random_rows(np.random.default_rng(0), 60, 64)).view(10, 6, 66))


def run_coded() -> torch.Tensor:
    codes, scales = weight()
    held = CodedWeight(codes.view(torch.uint8), scales, 32, True)
    return wkv_w8a16(torch.randn(20, 512).to(BF16), held, torch.empty(20, 320, dtype=BF16))


LAUNCHES = (
    run_gate, run_hash, run_lookup, run_packed_lookup, run_few, run_many, run_expand, run_operands, run_unpack,
    run_coded,
)  # fmt: skip


@pytest.mark.parametrize("launch", LAUNCHES)
def test_the_same_bits_as_one_by_one(launch: Callable[[], torch.Tensor], calls: dict[str, int]) -> None:
    torch.manual_seed(0)
    together = launch()
    assert calls["together"] > 0
    assert calls["alone"] == 0
    torch.manual_seed(0)
    with one_by_one():
        alone = launch()
    assert calls["alone"] > 1
    assert torch.equal(together.view(torch.uint8), alone.view(torch.uint8))


def test_programs_of_the_first_axis_share_a_call(calls: dict[str, int]) -> None:
    run_gate()
    assert calls == {"together": 1, "alone": 0}


@triton.jit
def _places(out, nx, ny):
    at = tl.program_id(0) + nx * (tl.program_id(1) + ny * tl.program_id(2))
    tl.store(out + at, 100 * tl.program_id(0) + 10 * tl.program_id(1) + tl.program_id(2) + tl.num_programs(0))


def test_every_program_of_a_grid_runs_once(calls: dict[str, int]) -> None:
    out = torch.zeros(2 * 3 * 300, dtype=torch.int32)
    _places[(300, 3, 2)](out, 300, 3)
    want = [100 * x + 10 * y + z + 300 for z in range(2) for y in range(3) for x in range(300)]
    assert out.tolist() == want
    assert calls == {"together": 6 * -(-300 // lockstep._LANES), "alone": 0}


@triton.jit
def _part_ways(x, out, rounds):
    me = tl.program_id(0)
    at = tl.arange(0, 4)
    # In place, so that what is not taken back is counted twice.
    tl.store(x + me * 4 + at, tl.load(x + me * 4 + at) + 1)
    tl.store(x + me * 4 + at, tl.load(x + me * 4 + at) * 3)
    total = 0
    for _ in range(rounds, rounds + me):
        total += 1
    if me > 1:
        total += 100
    tl.store(out + me, total)


def test_programs_that_part_ways_take_back_what_they_stored(calls: dict[str, int]) -> None:
    x, out = torch.arange(16), torch.zeros(4, dtype=torch.int64)
    _part_ways[(4,)](x, out, 2)
    assert x.tolist() == [3 * (i + 1) for i in range(16)]
    assert out.tolist() == [0, 1, 102, 103]
    assert calls == {"together": 1, "alone": 4}


@triton.jit
def _agree(x, out, least):
    me = tl.program_id(0)
    at = tl.arange(0, 4)
    value = tl.load(x + me * 4 + at)
    while tl.max(value, 0) < least:
        value = value * 2
    if tl.sum(value, 0) > 0:
        tl.store(out + me * 4 + at, value)


def test_branches_that_all_programs_take_stay_in_lockstep(calls: dict[str, int]) -> None:
    out = torch.zeros(12, dtype=torch.int64)
    _agree[(3,)](torch.tensor([1, 2, 3, 4] * 3), out, 30)
    assert out.tolist() == [8, 16, 24, 32] * 3
    assert calls == {"together": 1, "alone": 0}


@triton.jit
def _product(a, b):
    return a * b


@triton.jit
def _without_a_form(x, out, count):
    me = tl.program_id(0)
    at = tl.arange(0, 4)
    value = tl.load(x + me * 4 + at)
    tl.store(out + me * 6 + at, tl.cumsum(value, 0))
    tl.store(out + me * 6 + 4, tl.reduce(value, 0, _product))
    tl.store(out + me * 6 + 5, tl.atomic_add(count, 1))


def test_operations_without_a_form_run_one_by_one(calls: dict[str, int]) -> None:
    x, out, count = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8]), torch.zeros(12, dtype=torch.int64), torch.zeros(1).long()
    _without_a_form[(2,)](x, out, count)
    assert out.tolist() == [1, 3, 6, 10, 24, 0, 5, 11, 18, 26, 1680, 1]
    assert count.tolist() == [2]
    assert calls == {"together": 1, "alone": 2}


@triton.jit
def _whole_block(x, out):
    me = tl.program_id(0)
    square = tl.load(x + me * 8 + tl.arange(0, 2)[:, None] * 4 + tl.arange(0, 4)[None, :])
    tl.store(out + me * 3, tl.sum(square))
    tl.store(out + me * 3 + 1, tl.max(tl.sum(square, -1, keep_dims=True)))
    tl.store(out + me * 3 + 2, tl.sum(tl.dot(square, square.T)))


def test_reductions_over_every_axis() -> None:
    x, out = torch.arange(24.0), torch.zeros(9)
    _whole_block[(3,)](x, out)
    blocks = x.view(3, 2, 4)
    want = [[b.sum(), b.sum(1).max(), (b @ b.T).sum()] for b in blocks]
    assert out.view(3, 3).tolist() == [[float(v) for v in row] for row in want]


def test_triton_is_as_it_was_after_a_launch() -> None:
    before = {name: getattr(tl.core, name) for name in ("load", "store", "dot", "reduce")}, tl.tensor.__add__
    run_few()
    with pytest.raises(Exception, match="negative"):
        _fails[(2,)](torch.zeros(4, dtype=torch.int64))
    assert before == ({name: getattr(tl.core, name) for name in before[0]}, tl.tensor.__add__)


@triton.jit
def _fails(x):
    tl.load(x + tl.arange(0, 4)).to(tl.uint64) + -1
