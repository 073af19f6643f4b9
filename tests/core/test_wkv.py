"""The projection: forms of weights and rows, loading, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from engram_core import Parallel, Wkv, WkvSpec
from engram_core.backend import EngramBackend
from engram_core.errors import InvalidArgumentError, StepError
from engram_core.formats import FP8, dequantize_weight, pack_rows, quantize_mxfp8, rows_to_bf16

N, K = 5 * 64, 4 * 32


def checkpoint(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(N, K, generator=generator).to(FP8)
    return weight, torch.randint(118, 124, (N // 32, K // 32), dtype=torch.uint8, generator=generator)


def rows(tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return pack_rows(*quantize_mxfp8(torch.randn(tokens, 4, 32, generator=generator)))


@pytest.fixture
def wkv(backend: EngramBackend) -> Wkv:
    made = backend.create_wkv(WkvSpec(K, 64, 4, Parallel.single()))
    made.load(*checkpoint())
    return made


def exact(packed: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return rows_to_bf16(packed).flatten(1).double() @ dequantize_weight(weight, scale).double().T


@pytest.mark.parametrize("tokens", [0, 1, 33])
def test_packed_and_bf16_rows_agree_with_float64(wkv: Wkv, tokens: int) -> None:
    packed = rows(tokens)
    expected = exact(packed, *checkpoint())
    for given in (packed, rows_to_bf16(packed)):
        found = wkv(given)
        assert found.shape == (tokens, N)
        torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=2**-14)
    assert torch.equal(wkv(packed), wkv(rows_to_bf16(packed)))


def test_scales_by_rows_and_bf16_weights_are_the_same_projection(wkv: Wkv) -> None:
    weight, scale = checkpoint()
    packed = rows(5)
    expected = wkv(packed)
    wkv.load(weight, scale.repeat_interleave(32, 0).view(torch.float8_e8m0fnu))
    assert torch.equal(wkv(packed), expected)
    wkv.load(dequantize_weight(weight, scale).to(torch.bfloat16))
    assert torch.equal(wkv(packed), expected)


def test_reloading_gives_the_new_result_and_keeps_nothing_of_the_callers(wkv: Wkv) -> None:
    weight, scale = checkpoint(7)
    version = wkv.version
    wkv.load(weight, scale)
    expected = exact(rows(3), weight, scale)
    weight.view(torch.uint8).zero_()
    torch.testing.assert_close(wkv(rows(3)).double(), expected, rtol=2**-8, atol=2**-14)
    assert wkv.version != version


def test_tiny_rows_are_not_flushed(wkv: Wkv) -> None:
    weight, scale = checkpoint()
    packed = rows(2)
    packed[..., 32] = 127 - 110  # values of about 1e-33, products in the subnormals' reach
    small = dequantize_weight(weight, scale) * 2.0**-10
    wkv.load(small.to(torch.bfloat16))
    expected = rows_to_bf16(packed).flatten(1).double() @ small.double().T
    assert int((wkv(packed) != 0).sum()) > N
    torch.testing.assert_close(wkv(packed).double(), expected, rtol=2**-8, atol=K * 2.0**-126)


def test_no_weights_is_an_error(backend: EngramBackend) -> None:
    with pytest.raises(StepError, match="no weights were loaded"):
        backend.create_wkv(WkvSpec(K, 64, 4, Parallel.single()))(rows(1))


@pytest.mark.parametrize(
    ("weight", "scale", "said"),
    [
        (torch.zeros(N, K + 32), None, "^weight"),
        (torch.zeros(N, K), None, "^weight"),
        (torch.zeros(N, K).to(FP8), None, "^scale: got None"),
        (torch.zeros(N, K).to(FP8), torch.zeros(N // 32, K // 32), "^scale: got .*float32"),
        (
            torch.zeros(N, K).to(FP8),
            torch.zeros(N // 16, K // 32, dtype=torch.uint8),
            r"^scale.*\[10, 4\] or \[320, 4\]",
        ),
        (torch.zeros(N, K, dtype=torch.bfloat16), torch.zeros(N, K // 32, dtype=torch.uint8), "^scale.*need None"),
    ],
)
def test_wrong_weights_are_refused_and_the_old_ones_stay(
    wkv: Wkv, weight: torch.Tensor, scale: torch.Tensor | None, said: str
) -> None:
    before = wkv(rows(2))
    with pytest.raises(InvalidArgumentError, match=said):
        wkv.load(weight, scale)
    assert torch.equal(wkv(rows(2)), before)


@pytest.mark.parametrize(
    ("given", "out", "said"),
    [
        (torch.zeros(2, 4, 32), None, "^rows"),
        (torch.zeros(2, 5, 32, dtype=torch.bfloat16), None, "^rows"),
        (torch.zeros(2, 128, dtype=torch.bfloat16), None, "^rows"),
        (torch.zeros(2, 4, 32, dtype=torch.uint8), None, "^rows"),
        (torch.zeros(2, 4, 32, dtype=torch.bfloat16), torch.zeros(3, N, dtype=torch.bfloat16), "^out"),
        (torch.zeros(2, 4, 32, dtype=torch.bfloat16), torch.zeros(2, N), "^out"),
    ],
)
def test_wrong_operands_are_refused(wkv: Wkv, given: torch.Tensor, out: torch.Tensor | None, said: str) -> None:
    with pytest.raises(InvalidArgumentError, match=said):
        wkv(given, out=out)


def test_an_output_over_the_rows_is_refused(wkv: Wkv) -> None:
    memory = torch.zeros(2 * N, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="^out: got memory that overlaps rows"):
        wkv(memory[: 2 * K].view(2, 4, 32), out=memory.view(2, N))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"in_features": 100}, "^in_features"),
        ({"dim": 0}, "^dim"),
        ({"hc_mult": 3}, "^hc_mult"),
        ({"hc_mult": True}, "^hc_mult"),
    ],
)
def test_wrong_specs_are_refused(change: dict[str, int], said: str) -> None:
    fields = {"in_features": K, "dim": 64, "hc_mult": 4, "parallel": Parallel.single()}
    with pytest.raises(InvalidArgumentError, match=said):
        WkvSpec(**{**fields, **change})  # type: ignore[arg-type]
