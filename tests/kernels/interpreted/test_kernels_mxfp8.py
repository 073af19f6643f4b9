"""Operands of the MXFP8 product, bit for bit, and the whole projection on a stand-in for FlashInfer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engram_nvidia.operands import split_rows
from engram_nvidia.wkv_mxfp8 import Mxfp8Wkv

from engram_core import Parallel, formats
from engram_core.specs import WkvSpec

CPU = torch.device("cpu")


def packed(tokens: int, columns: int, dim: int) -> torch.Tensor:
    torch.manual_seed(tokens)
    return torch.randint(0, 256, (tokens, columns, dim + dim // 32), dtype=torch.uint8)


@pytest.mark.parametrize(("tokens", "columns", "dim"), [(1, 3, 32), (5, 2, 96), (130, 1, 256)])
def test_codes_and_swizzled_scales(tokens: int, columns: int, dim: int) -> None:
    rows = packed(tokens, columns + 1, dim)[:, 1:]
    codes, scales = split_rows(rows)
    values, bytes_ = formats.unpack_rows(rows)
    assert torch.equal(codes.view(torch.uint8), values.reshape(tokens, -1).view(torch.uint8))
    assert torch.equal(scales, formats.swizzle_128x4(bytes_.reshape(tokens, -1)))


def stand_in(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_8x4_sf_layout: bool = False,
    backend: str = "auto",
) -> torch.Tensor:
    """What ``mm_mxfp8`` is documented to do, with its checks of shapes; it fills no ``out``."""
    assert backend == "cute-dsl"
    assert not use_8x4_sf_layout
    (m, k), n = a.shape, b.shape[1]
    assert b.stride() == (1, k)
    assert a_descale.shape == (-(-m // 128) * 128 * -(-k // 128) * 4,)
    assert b_descale.shape == (-(-n // 128) * 128 * -(-k // 128) * 4,)
    left = formats.dequantize(a, formats.unswizzle_128x4(a_descale, m, k // 32))
    right = formats.dequantize(b.T.contiguous(), formats.unswizzle_128x4(b_descale, n, k // 32))
    return (left.double() @ right.double().T).float().to(out_dtype)


def made(monkeypatch: pytest.MonkeyPatch, **spec: Any) -> Mxfp8Wkv:
    monkeypatch.setattr("engram_nvidia.flashinfer.load", lambda: stand_in)
    return Mxfp8Wkv(WkvSpec(**{"in_features": 256, "dim": 64, "hc_mult": 2, "parallel": Parallel.single()} | spec), CPU)


@pytest.mark.parametrize(("tokens", "by_row"), [(1, True), (130, False)])
def test_projection(monkeypatch: pytest.MonkeyPatch, tokens: int, by_row: bool) -> None:
    torch.manual_seed(0)
    codes = torch.randn(192, 256).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 124, (192 if by_row else 6, 8), dtype=torch.uint8)
    wkv = made(monkeypatch)
    wkv.load(codes, scale)
    values, bytes_ = formats.quantize_mxfp8(torch.randn(tokens, 1, 256))
    rows = formats.pack_rows(values, bytes_)
    want = formats.rows_to_bf16(rows).flatten(1).double() @ formats.dequantize_weight(codes, scale).double().T
    assert torch.equal(wkv.forward(rows), want.float().to(torch.bfloat16))
    assert torch.equal(wkv.forward(formats.rows_to_bf16(rows)), want.float().to(torch.bfloat16))
    assert wkv.forward(rows[:0]).shape == (0, 192)


def test_reloading(monkeypatch: pytest.MonkeyPatch) -> None:
    wkv = made(monkeypatch)
    codes, scale = torch.ones(192, 256).to(torch.float8_e4m3fn), torch.full((6, 8), 127, dtype=torch.uint8)
    wkv.load(codes, scale)
    held = wkv._scales
    wkv.load(codes, scale + 1)
    assert wkv._scales is held
    rows = torch.ones(1, 1, 256, dtype=torch.bfloat16)
    assert float(wkv.forward(rows)[0, 0]) == 512
    wkv.load(torch.full((192, 256), 2.0, dtype=torch.bfloat16))
    assert held is not None
    assert (held == 255).all()
    assert float(wkv.forward(rows)[0, 0]) == 512
