"""The WKV kernels of the NVIDIA backend against float64, and which of them runs."""

from __future__ import annotations

import pytest
import torch
from engram_nvidia.arch import INTERPRETED_CHIP
from engram_nvidia.expand import expand
from engram_nvidia.weights import PackedWeight, pack_weight
from engram_nvidia.wkv_few import wkv_few
from engram_nvidia.wkv_many import wkv_many
from engram_nvidia.wkv_w8a16 import W8A16Wkv, copy_tokens, few_tokens

from engram_core import Parallel, formats
from engram_core.specs import WkvSpec

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def weight(n: int, k: int, by_row: bool = False, low: int = 116, high: int = 126) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(n + k)
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x11
    rows = n if by_row else n // 32
    return codes.view(torch.float8_e4m3fn), torch.randint(low, high, (rows, k // 32), dtype=torch.uint8)


def close(got: torch.Tensor, rows: torch.Tensor, dense: torch.Tensor) -> None:
    """docs/contract.md, "WKV"."""
    exact = rows.double() @ dense.double().T
    size = rows.double().abs() @ dense.double().abs().T
    ulp = 2.0 ** (torch.frexp(exact).exponent.clamp(min=-125) - 8).double()
    assert ((got.double() - exact).abs() <= ulp / 2 + 2**-16 * size + rows.shape[1] * 2.0**-126).all()
    assert (got == exact.float().to(BF16)).float().mean() >= 0.99


CASES = [(96, 512, 3, False), (320, 640, 17, False), (80, 480, 9, True), (64, 1024, 40, True)]


@pytest.mark.parametrize(("n", "k", "tokens", "by_row"), CASES)
@pytest.mark.parametrize("kernel", [wkv_few, wkv_many])
def test_products(kernel: object, n: int, k: int, tokens: int, by_row: bool) -> None:
    codes, scale = weight(n, k, by_row)
    packed = pack_weight(codes, scale, CPU)
    assert packed.by_row == by_row
    rows = torch.randn(tokens, k + 32).to(BF16)[:, :k]
    out = torch.zeros(tokens, n + 32, dtype=BF16)
    kernel(rows, packed, out[:, :n], INTERPRETED_CHIP)  # type: ignore[operator]
    close(out[:, :n], rows, formats.dequantize_weight(codes, scale).to(BF16))
    assert not out[:, n:].any()


@pytest.mark.parametrize(("n", "k", "tokens", "by_row"), CASES[:3])
def test_expansion_is_exact(n: int, k: int, tokens: int, by_row: bool) -> None:
    codes, scale = weight(n, k, by_row, 0, 255)
    got = expand(pack_weight(codes, scale, CPU), torch.empty(n, k, dtype=BF16), INTERPRETED_CHIP)
    want = formats.dequantize_weight(codes, scale).to(BF16)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))


def test_nan_codes_and_scales_reach_their_outputs() -> None:
    codes, scale = weight(96, 512)
    codes.view(torch.uint8)[5, 7], scale[2, 3] = 0xFF, 255
    packed = pack_weight(codes, scale, CPU)
    assert not packed.fast
    got = wkv_few(torch.ones(2, 512, dtype=BF16), packed, torch.empty(2, 96, dtype=BF16), INTERPRETED_CHIP)
    assert got.isnan()[0].nonzero().flatten().tolist() == [5, *range(64, 96)]


def test_wide_scales_are_not_decoded_fast() -> None:
    for high, fast in ((135, True), (136, False)):
        assert pack_weight(*weight(32, 128, low=high - 1, high=high), CPU).fast == fast


def test_rows_of_a_tile_are_independent() -> None:
    packed = pack_weight(*weight(64, 512), CPU)
    rows = torch.randn(6, 512).to(BF16)
    whole = wkv_few(rows, packed, torch.empty(6, 64, dtype=BF16), INTERPRETED_CHIP)
    alone = wkv_few(rows[3:4], packed, torch.empty(1, 64, dtype=BF16), INTERPRETED_CHIP)
    assert torch.equal(whole[3:4], alone)


def made(keep_bf16: bool = False) -> W8A16Wkv:
    return W8A16Wkv(WkvSpec(512, 32, 2, Parallel.single(), keep_bf16=keep_bf16), CPU, INTERPRETED_CHIP)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_module(keep: bool, tokens: int) -> None:
    codes, scale = weight(96, 512)
    wkv = made(keep)
    wkv.load(codes, scale)
    rows = torch.randn(tokens, 4, 128).to(BF16)
    close(wkv.forward(rows), rows.flatten(1), formats.dequantize_weight(codes, scale).to(BF16))
    assert wkv.forward(rows[:0]).shape == (0, 96)


def test_more_tokens_than_the_main_loop_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engram_nvidia.wkv_w8a16._WORKSPACE_TOKENS", 33)
    codes, scale = weight(96, 512)
    wkv = made()
    wkv.load(codes, scale)
    rows = torch.randn(34, 4, 128).to(BF16)
    close(wkv.forward(rows), rows.flatten(1), formats.dequantize_weight(codes, scale).to(BF16))


def test_reloading_writes_in_place_or_poisons_what_a_graph_may_hold() -> None:
    codes, scale = weight(96, 512)
    wkv = made()
    wkv.load(codes, scale)
    held = wkv._packed
    assert isinstance(held, PackedWeight)
    wkv.load(codes, scale + 1)
    assert wkv._packed is held
    assert torch.equal(held.scales[:3, :16], scale + 1)
    wkv.load(codes, torch.full_like(scale, 200))  # no longer decoded fast: another kernel
    assert wkv._packed is not held
    assert (held.scales == 135).all()
    wkv.load(torch.ones(96, 512, dtype=BF16))
    assert wkv.dense_only
    assert float(wkv.forward(torch.ones(1, 4, 128, dtype=BF16))[0, 0]) == 512


def test_the_switch_points_grow_with_the_outputs() -> None:
    assert [few_tokens(n) for n in (25600, 12800, 6400, 3200)] == [16, 32, 32, 32]
    assert [copy_tokens(n) for n in (25600, 12800, 6400, 3200)] == [64, 32, 16, 16]
