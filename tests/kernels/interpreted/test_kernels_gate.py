"""The gate kernel against float64, its probes, its selections bit for bit, its strides."""

from __future__ import annotations

import pytest
import torch

from engram_core.kernels.gate import gate
from engram_core.specs import GateWeights

BF16 = torch.bfloat16


def rounded(x: torch.Tensor) -> torch.Tensor:
    """float64 to bf16, once: torch's own cast goes through float32."""
    near = x.float()
    bits = near.view(torch.int32)
    odd = (near.double() != x) & (bits & 0xFFFF == 0x8000)  # a tie that float32 made
    step = torch.where((x - near.double()) * near.sign() > 0, 1, -1).to(torch.int32)
    return torch.where(odd, bits + step, bits).view(torch.float32).to(BF16)


def expected(h: torch.Tensor, kv: torch.Tensor, w: GateWeights) -> torch.Tensor:
    tokens, copies, dim = h.shape
    parts = kv.double().view(tokens, copies + 1, dim)
    hidden, key, value = h.double(), parts[:, :copies], parts[:, copies:]
    rh = (hidden.square().mean(-1) + w.eps).rsqrt()
    rk = (key.square().mean(-1) + w.eps).rsqrt()
    dot = (hidden * w.q_weight.double() * w.k_weight.double() * key).sum(-1) * rh * rk * dim**-0.5
    root = torch.copysign(dot.abs().clamp(min=w.clamp).sqrt(), dot)
    return rounded(hidden + torch.sigmoid(root)[..., None] * value)


@pytest.mark.parametrize(("copies", "dim"), [(1, 4), (2, 96), (4, 320), (8, 256)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_random(copies: int, dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    hidden = torch.randn(7, copies, dim).to(BF16)
    kv = torch.randn(7, (copies + 1) * dim).to(BF16)
    weights = GateWeights(torch.randn(copies, dim).to(dtype), torch.randn(copies, dim).to(dtype), 1e-20)
    got, want = gate(hidden, kv, weights), expected(hidden, kv, weights)
    assert (got == want).float().mean() > 0.999
    torch.testing.assert_close(got.float(), want.float(), rtol=2**-7, atol=1e-6)


def test_loop_over_tokens_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tokens run in a loop on a device; here the loop is asked for."""
    hidden, kv = torch.randn(9, 4, 96).to(BF16), torch.randn(9, 480).to(BF16)
    weights = GateWeights(torch.randn(4, 96), torch.randn(4, 96), 1e-20)
    mask = torch.tensor([True] * 5 + [False] + [True] * 3)
    want = gate(hidden, kv, weights, mask, 8)
    monkeypatch.setattr("engram_core.kernels.gate._shape", lambda *_: (2, 4, 4))
    assert torch.equal(gate(hidden, kv, weights, mask, 8), want)


def one(q: float, h: float, v: float, dim: int = 4, eps: float = 1e-20, k: float = 1.0) -> float:
    weights = GateWeights(torch.full((1, dim), q), torch.ones(1, dim), eps)
    kv = torch.cat([torch.full((1, dim), k), torch.full((1, dim), v)], dim=1).to(BF16)
    return float(gate(torch.full((1, 1, dim), h).to(BF16), kv, weights)[0, 0, 0])


def test_probes() -> None:
    assert one(0.0, 0.5, -1.0) == pytest.approx(-2.4986e-4, rel=1e-3)
    assert one(1.0, 2.0**-12, 1.0) == 0.8046875
    assert one(1.0, 2.0**-12, 1.0, eps=1e-6) == 0.6640625
    assert one(1.0, 0.0, 1.0, k=0.0) == 0.5
    assert (one(1.0, 1.0, 1.0), one(-1.0, 1.0, 1.0)) == (1.8046875, 1.1953125)
    assert one(200.0, 1.0, 1.0, dim=256) == 2.0  # a gate of 1
    assert one(-1e4, 0.0, 1.0, dim=256, k=1.0) >= 0.0


def test_masked_rows_and_rows_past_the_end_come_out_bit_for_bit() -> None:
    hidden = torch.tensor([-0.0, 1, float("nan"), 3]).to(BF16).repeat(3, 1, 1)
    hidden.view(torch.int16)[:, :, 2] = 0x7FC5  # a payload
    kv = torch.tensor([1.0, float("nan"), float("inf"), -1] * 2).to(BF16).repeat(3, 1)
    weights = GateWeights(torch.ones(1, 4), torch.ones(1, 4), 1e-20)
    before = hidden.clone().view(torch.int16)
    got = gate(hidden, kv, weights, torch.tensor([False, True, True]), 2).view(torch.int16)
    assert torch.equal(got[0], before[0])
    assert torch.equal(got[2], before[2])
    assert gate(hidden, kv, weights)[1].isnan().all()
    assert torch.equal(hidden.view(torch.int16), before)


@pytest.mark.parametrize("where", ["hidden", "key", "value"])
def test_nan_of_a_live_row_reaches_the_output(where: str) -> None:
    hidden, kv = torch.ones(1, 1, 96).to(BF16), torch.ones(1, 192).to(BF16)
    {"hidden": hidden[0, 0], "key": kv[0], "value": kv[0, 96:]}[where][5] = float("nan")
    out = gate(hidden, kv, GateWeights(torch.ones(1, 96), torch.ones(1, 96), 1e-20))
    assert out.isnan().sum() == (1 if where == "value" else 96)


def test_strides_and_a_given_output() -> None:
    torch.manual_seed(1)
    wide, kv = torch.randn(5, 9, 96).to(BF16), torch.randn(5, 700).to(BF16)
    q, k = torch.randn(8, 96)[::2], torch.randn(8, 96)[1::2]
    mask = torch.tensor([True, False] * 5)[::2]
    out = torch.zeros(10, 4, 128, dtype=BF16)
    got = gate(wide[:, 1:9:2], kv[:, 7:487], GateWeights(q, k, 1e-20), mask, out=out[::2, :, :96])
    plain = GateWeights(q.contiguous(), k.contiguous(), 1e-20)
    assert torch.equal(got, gate(wide[:, 1:9:2].contiguous(), kv[:, 7:487].contiguous(), plain, mask.contiguous()))
    assert not out[1::2].any()
    assert not out[..., 96:].any()
