"""Projections: both forms of weights, every form of scales, slices, rows packed or not, what is refused and kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engram_conformance import bridge, oracle
from engram_conformance.data import random_rows, random_weight
from engram_rocm.arch import KNOWN, Architecture
from engram_rocm.split import Split
from engram_rocm.unpack import unpack_rows
from engram_rocm.weights import CodedWeight
from engram_rocm.wkv import RocmWkv, WeightForm
from engram_rocm.wkv_w8a16 import wkv_w8a16
from played import CPU, Seat

from engram_core import Parallel
from engram_core.backend import WkvSpec
from engram_core.errors import InvalidArgumentError
from engram_core.formats import rows_to_bf16

FORMS: tuple[WeightForm, ...] = ("bf16", "fp8")
BF16 = torch.bfloat16


def made(
    form: WeightForm,
    dim: int = 64,
    copies: int = 4,
    k: int = 96,
    rank: int = 0,
    ranks: int = 1,
    sequence: bool = False,
    architecture: Architecture = KNOWN["gfx942"],
) -> RocmWkv:
    spec = WkvSpec(k, dim, copies, Parallel(Seat(rank, ranks), sequence=sequence))
    return RocmWkv(spec, CPU, architecture, form)


class Checkpoint:
    """Codes and scales ``[n, K]`` of a seed; ``by_row``: a scale row for each output."""

    def __init__(self, n: int, k: int, by_row: bool = False, seed: int = 0) -> None:
        self.codes, self.scales = random_weight(np.random.default_rng(seed), n, k, n if by_row else None)
        self.k = k

    def load(self, wkv: RocmWkv) -> RocmWkv:
        wkv.load(bridge.fp8(self.codes), bridge.e8m0(self.scales))
        return wkv

    @property
    def weight(self) -> oracle.Weight:
        return oracle.Weight(self.codes, self.scales)

    def judge(self, kv: torch.Tensor, rows: torch.Tensor, outputs: object = slice(None), random: bool = True) -> None:
        ref, size = oracle.wkv(bridge.values(rows).reshape(rows.shape[0], -1), self.weight)
        got = bridge.bits(kv)
        found = oracle.check_wkv(got, ref[:, outputs], size[:, outputs], self.k, random=random)  # type: ignore[index]
        assert found.passed, found.message


def packed_rows(tokens: int, columns: int, head_dim: int, seed: int = 1) -> torch.Tensor:
    rows = random_rows(np.random.default_rng(seed), tokens * columns, head_dim)
    return bridge.tensor(rows.reshape(tokens, columns, head_dim * 33 // 32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("ranks", "dim", "copies"), [(1, 64, 4), (2, 64, 4), (4, 128, 1), (3, 96, 2)])
def test_slices_are_the_projection(form: WeightForm, by_row: bool, ranks: int, dim: int, copies: int) -> None:
    checkpoint = Checkpoint((copies + 1) * dim, 96, by_row)
    packed = packed_rows(5, 3, 32)
    rows = rows_to_bf16(packed)
    outputs = np.arange((copies + 1) * dim).reshape(copies + 1, dim)
    for rank in range(ranks):
        wkv = checkpoint.load(made(form, dim, copies, rank=rank, ranks=ranks))
        width = dim // ranks
        assert wkv.kv_features == (copies + 1) * width
        assert wkv.kv_layout == ("dim_slice" if ranks > 1 else "full")
        mine = outputs[:, rank * width : (rank + 1) * width].ravel()
        checkpoint.judge(wkv(packed), rows, mine)
        assert torch.equal(wkv(rows), wkv(packed))


@pytest.mark.parametrize("ranks", [1, 2])
def test_bf16_weights_are_sliced_too(ranks: int) -> None:
    weight = torch.randn(5 * 64, 96, generator=torch.Generator().manual_seed(0)).to(BF16)
    rows = rows_to_bf16(packed_rows(4, 3, 32))
    ref, size = oracle.wkv(bridge.values(rows).reshape(4, -1), bridge.bits(weight))
    for form in FORMS:
        wkv = made(form, rank=ranks - 1, ranks=ranks)
        wkv.load(weight)
        mine = np.arange(320).reshape(5, ranks, -1)[:, -1].ravel()
        found = oracle.check_wkv(bridge.bits(wkv(rows)), ref[:, mine], size[:, mine], 96, random=True)
        assert found.passed, found.message


@pytest.mark.parametrize(
    ("ranks", "dim", "sequence", "architecture", "sliced"),
    [
        (1, 5120, False, "gfx942", False),
        (4, 5120, False, "gfx942", True),
        (4, 5120, False, "gfx950", True),
        (4, 5120, True, "gfx942", False),
        (4, 5120, False, "gfx90a", False),
        (3, 5120, False, "gfx942", False),  # no whole slices
        (4, 96, False, "gfx942", False),  # slices of 24
        (3, 96, False, "gfx942", True),
    ],
)
def test_which_projections_are_sliced(ranks: int, dim: int, sequence: bool, architecture: str, sliced: bool) -> None:
    wkv = made("bf16", dim, ranks=ranks, rank=ranks - 1, sequence=sequence, architecture=KNOWN[architecture])
    assert (wkv.split.sliced, wkv.collective_in_post, wkv.collective_in_forward) == (sliced, sliced, False)
    assert (wkv.kv_layout, wkv.kv_features) == (("dim_slice", 5 * dim // ranks) if sliced else ("full", 5 * dim))


def test_a_rank_holds_its_own_part_alone() -> None:
    """The checkpoint's bytes over P; what was loaded stays the caller's."""
    checkpoint = Checkpoint(320, 96)
    for form, size in (("bf16", 2), ("fp8", 1)):
        wkv = checkpoint.load(made(form, rank=1, ranks=2))
        held = wkv._weight
        codes = held.codes if isinstance(held, CodedWeight) else held
        assert codes is not None
        assert codes.untyped_storage().nbytes() == 160 * 96 * size
        assert codes.data_ptr() != torch.from_numpy(checkpoint.codes).data_ptr()
        if isinstance(held, CodedWeight):
            assert held.scales.untyped_storage().nbytes() == 160 * 96 // 32 // 32


@pytest.mark.parametrize("form", FORMS)
def test_new_weights_of_the_same_form_take_the_place_of_the_old_ones(form: WeightForm) -> None:
    """A captured graph holds the old address: it must find the new weights there."""
    first, second = Checkpoint(320, 96), Checkpoint(320, 96, seed=5)
    wkv = first.load(made(form))
    held = wkv._weight
    rows = rows_to_bf16(packed_rows(3, 3, 32))
    first.judge(wkv(rows), rows)
    second.load(wkv)
    assert wkv._weight is held
    second.judge(wkv(rows), rows)
    other = Checkpoint(320, 96, by_row=True)
    other.load(wkv)
    other.judge(wkv(rows), rows)


# Scale bytes whose weights are subnormal, overflow, or are NaN; and NaN codes: the kernel's careful path.
@pytest.mark.parametrize("byte", [3, 9, 10, 134, 135, 200, 246])
def test_every_scale_that_is_exact_in_bf16(byte: int) -> None:
    checkpoint = Checkpoint(320, 96)
    checkpoint.scales[:] = byte
    wkv = checkpoint.load(made("fp8"))
    held = wkv._weight
    assert isinstance(held, CodedWeight)
    assert held.fast == (10 <= byte <= 134)
    # Rows that bring the sums back to order 1.
    rows = rows_to_bf16(packed_rows(3, 3, 32)) * 2.0 ** max(-100, min(100, 120 - byte))
    checkpoint.judge(wkv(rows), rows, random=False)


@pytest.mark.parametrize("form", FORMS)
def test_nan_codes_and_nan_scales_reach_their_outputs_alone(form: WeightForm) -> None:
    checkpoint = Checkpoint(320, 96)
    checkpoint.codes[7, 50] = 0x7F
    checkpoint.codes[8, 50] = 0xFF
    checkpoint.scales[5, 1] = 255
    wkv = checkpoint.load(made(form))
    kv = wkv(rows_to_bf16(packed_rows(2, 3, 32)))
    bad = np.isnan(bridge.values(kv)).all(0)
    assert np.flatnonzero(bad).tolist() == [7, 8, *range(160, 192)]
    assert not np.isnan(bridge.values(kv)[:, ~bad]).any()


@pytest.mark.parametrize("tokens", [1, 17, 40, 70])
@pytest.mark.parametrize("k", [160, 512])
def test_every_tile_and_inputs_that_no_tile_divides(tokens: int, k: int) -> None:
    """Tokens pick the tile; 64 outputs are no multiple of its 128, 160 inputs none of any."""
    checkpoint = Checkpoint(64, k)
    rows = rows_to_bf16(packed_rows(tokens, k // 32, 32)).flatten(1)
    weight = CodedWeight(bridge.tensor(checkpoint.codes), bridge.tensor(checkpoint.scales), 32, True)
    holder = torch.full((tokens * 2, 80), torch.nan, dtype=BF16)
    out = holder[::2, 8:72]
    assert wkv_w8a16(rows, weight, out) is out
    checkpoint.judge(out, rows)
    out.zero_()
    assert int(holder.isnan().sum()) == holder.numel() - out.numel()


def test_all_codes_and_all_scales_are_unpacked_as_e4m3fn() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8)
    packed = torch.cat([codes, scales], 1).view(16, 16, 264)
    found = oracle.check_bits(bridge.bits(unpack_rows(packed)), bridge.bits(rows_to_bf16(packed).flatten(1)))
    assert found.passed, found.message


@pytest.mark.parametrize("head_dim", [32, 96, 160, 256])
def test_rows_of_any_width_and_strides_are_unpacked(head_dim: int) -> None:
    packed = packed_rows(3, 4, head_dim)
    expected = rows_to_bf16(packed).flatten(1)
    assert torch.equal(unpack_rows(packed), expected)
    holder = torch.zeros(6, 7, packed.shape[-1] + 5, dtype=torch.uint8)
    holder[::2, 1:5, 3:-2] = packed
    assert torch.equal(unpack_rows(holder[::2, 1:5, 3:-2]), expected)
    assert unpack_rows(packed[:0]).shape == (0, 4 * head_dim)


@pytest.mark.parametrize("form", FORMS)
def test_without_tokens_nothing_is_launched(form: WeightForm) -> None:
    wkv = Checkpoint(320, 96).load(made(form))
    out = torch.empty(0, 320, dtype=BF16)
    assert wkv(packed_rows(0, 3, 32), out=out) is out


def test_wrong_operands_of_the_launchers_are_refused() -> None:
    weight = CodedWeight(torch.zeros(64, 96, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), 32, True)
    good = torch.zeros(2, 96, dtype=BF16)
    with pytest.raises(InvalidArgumentError, match="^rows"):
        wkv_w8a16(good[:, :64], weight, torch.zeros(2, 64, dtype=BF16))
    with pytest.raises(InvalidArgumentError, match="^out"):
        wkv_w8a16(good, weight, torch.zeros(2, 96, dtype=BF16))
    for wrong in (torch.zeros(2, 3, 34, dtype=torch.uint8), torch.zeros(2, 3, 33), torch.zeros(2, 33, 3).mT):
        with pytest.raises(InvalidArgumentError, match="^rows"):
            unpack_rows(wrong)


def test_a_split_takes_rows_of_codes_and_of_scale_blocks_alike() -> None:
    split = Split(outputs=5, width=64, rank=1, ranks=2)
    rows = torch.arange(5 * 128)
    taken = split.take(rows).flatten()
    assert taken.tolist() == [h * 128 + 64 + i for h in range(5) for i in range(64)]
    blocks = split.take(torch.arange(20)).flatten()
    assert blocks.tolist() == sorted({int(row) // 32 for row in taken})
