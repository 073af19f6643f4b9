"""The order of packed WKV weights, in pure torch; and that the decode's bit tricks give every code."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from engram_nvidia.weights import gather, pack_weight, reorder, restore, spread, unpack_weight


def codes(n: int, k: int) -> torch.Tensor:
    torch.manual_seed(n)
    return torch.randint(0, 256, (n, k), dtype=torch.uint8)


def test_a_lanes_words_are_its_operand() -> None:
    """Unit (a, b, u), lane 4 g + t, word p, byte 2 r + e: output 16 b + 8 r + g, input 128 a + 32 u + 8 t + 2 p + e."""
    rows = codes(32, 256)
    units = reorder(rows)
    assert units.shape == (2, 2, 4, 512)
    for a, b, u, g, t, p, r, e in [(0, 0, 0, 0, 0, 0, 0, 0), (1, 1, 3, 7, 3, 3, 1, 1), (0, 1, 2, 5, 1, 2, 1, 0)]:
        byte = units[a, b, u, 16 * (4 * g + t) + 4 * p + 2 * r + e]
        assert byte == rows[16 * b + 8 * r + g, 128 * a + 32 * u + 8 * t + 2 * p + e]
    assert torch.equal(restore(units), rows)


def test_spread_words_hold_two_codes_under_a_mask_and_two_under_shifts() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    four = torch.stack([byte, byte.flip(0), byte.roll(7), byte.roll(99)], dim=-1).flatten()
    words = spread(four)
    assert torch.equal(gather(words), four)
    first = words & (0x87F087F0 - 2**32)
    second = ((words << 4) & (0x80F080F0 - 2**32)) | ((words >> 4) & 0x07000700)
    halves = [pair.view(torch.bfloat16).view(-1, 2) for pair in (first, second)]
    got = torch.cat(halves, dim=1).double() * 2.0**120
    want = four.view(torch.float8_e4m3fn).double().view(-1, 4)
    finite = ~want.isnan()
    assert torch.equal(got[finite], want[finite])
    assert torch.equal(got[finite].signbit(), want[finite].signbit())


@pytest.mark.parametrize(("n", "k", "rows"), [(25 * 32, 512, 25), (96, 480, 3), (80, 96, 80), (64, 128, 64)])
def test_checkpoint_form_comes_back(n: int, k: int, rows: int) -> None:
    weight = codes(n, k)
    scale = torch.randint(0, 256, (rows, k // 32), dtype=torch.uint8)
    packed = pack_weight(weight.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), torch.device("cpu"))
    assert (packed.padded_n % 128, packed.padded_k % 512) == (0, 0)
    got, scales = unpack_weight(packed)
    assert torch.equal(got, weight)
    assert torch.equal(scales, scale)


def test_scales_of_32_by_32_written_row_by_row_are_folded() -> None:
    weight = codes(64, 128)
    scale = torch.tensor([[120, 121, 122, 123], [124, 125, 126, 127]], dtype=torch.uint8)
    packed = pack_weight(weight.view(torch.float8_e4m3fn), scale.repeat_interleave(32, dim=0), torch.device("cpu"))
    assert not packed.by_row
    assert torch.equal(packed.scales[:2, :4], scale)
