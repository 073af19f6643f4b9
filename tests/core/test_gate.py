"""The gate's probes, as the contract writes them, and the operands it must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engram_core import GateWeights
from engram_core.backend import EngramBackend
from engram_core.errors import InvalidArgumentError

BF16 = torch.bfloat16


def probe(
    backend: EngramBackend,
    h: float,
    key: float,
    value: float,
    q: float = 1.0,
    dim: int = 4,
    eps: float = 1e-20,
    copies: int = 1,
) -> torch.Tensor:
    kv = torch.cat([torch.full((1, copies * dim), float(key)), torch.full((1, dim), float(value))], dim=1).to(BF16)
    weights = GateWeights(torch.full((copies, dim), float(q)), torch.ones(copies, dim), eps)
    return backend.post_wkv(torch.full((1, copies, dim), float(h)).to(BF16), kv, weights)


def test_a_dot_of_exactly_zero_is_positive(backend: EngramBackend) -> None:
    found = probe(backend, h=0.5, key=1, value=-1, q=0)
    assert {int(bits) & 0xFFFF for bits in found.view(torch.int16).flatten()} == {0xB983}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"h": 2.0**-12, "key": 1, "value": 1, "eps": 1e-20}, 0.8046875),
        ({"h": 2.0**-12, "key": 1, "value": 1, "eps": 1e-6}, 0.6640625),
        ({"h": 0, "key": 0, "value": 1}, 0.5),
        ({"h": 1, "key": 1, "value": 1}, 1.8046875),
        ({"h": 1, "key": -1, "value": 1}, 1.1953125),
    ],
)
@pytest.mark.parametrize("copies", [1, 2, 4, 8])
def test_probes(backend: EngramBackend, arguments: dict[str, Any], expected: float, copies: int) -> None:
    assert set(probe(backend, copies=copies, **arguments).flatten().tolist()) == {expected}


def test_a_closed_row_keeps_its_bits_whatever_kv_holds(backend: EngramBackend) -> None:
    hidden = torch.tensor([[[-0.0, 1, 2, 3]], [[1, 2, 3, 4]]]).to(BF16)
    kv = torch.tensor([[1, float("nan"), float("inf"), -1] * 2, [1.0] * 8]).to(BF16)
    weights = GateWeights(torch.ones(1, 4), torch.ones(1, 4), 1e-20)
    before = (hidden.clone(), kv.clone())
    found = backend.post_wkv(hidden, kv, weights, token_mask=torch.tensor([False, True]))
    assert torch.equal(found[0].view(torch.int16), hidden[0].view(torch.int16))
    assert not torch.equal(found[1], hidden[1])
    cut = backend.post_wkv(hidden, kv.flip(0), weights, num_kv_tokens=1)
    assert torch.equal(cut[1], hidden[1])
    assert not torch.equal(cut[0], hidden[0])
    for now, then in zip((hidden, kv), before, strict=True):
        assert torch.equal(now.view(torch.int16), then.view(torch.int16))


@pytest.mark.parametrize("place", ["hidden", "key"])
def test_a_nan_in_a_live_row_reaches_the_output(backend: EngramBackend, place: str) -> None:
    hidden, kv = torch.ones(2, 1, 4).to(BF16), torch.ones(2, 8).to(BF16)
    (hidden[0, 0] if place == "hidden" else kv[0])[1] = float("nan")
    found = backend.post_wkv(hidden, kv, GateWeights(torch.ones(1, 4), torch.ones(1, 4), 1e-20))
    assert bool(found[0].isnan().all())
    assert not bool(found[1].isnan().any())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hidden_states", torch.zeros(2, 1, 4)),
        ("hidden_states", torch.zeros(2, 2, 4, dtype=BF16)),
        ("hidden_states", torch.zeros(2, 1, 8, dtype=BF16)[..., ::2]),
        ("kv", torch.zeros(2, 9, dtype=BF16)),
        ("kv", torch.zeros(3, 8, dtype=BF16)),
        ("token_mask", torch.zeros(2, 1, dtype=torch.bool)),
        ("token_mask", torch.zeros(1, dtype=torch.bool)),
        ("token_mask", torch.zeros(2)),
        ("num_kv_tokens", 3),
        ("num_kv_tokens", -1),
        ("num_kv_tokens", torch.tensor(1)),
        ("out", torch.zeros(2, 1, 4)),
        ("out", torch.zeros(1, 1, 4, dtype=BF16)),
    ],
)
def test_wrong_operands_are_refused_by_name(backend: EngramBackend, name: str, value: object) -> None:
    operands: dict[str, Any] = {
        "hidden_states": torch.zeros(2, 1, 4, dtype=BF16),
        "kv": torch.zeros(2, 8, dtype=BF16),
        "gate": GateWeights(torch.ones(1, 4), torch.ones(1, 4), 1e-20),
    }
    with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*; need "):
        backend.post_wkv(**{**operands, name: value})


def test_an_output_over_an_input_is_refused(backend: EngramBackend) -> None:
    hidden, kv = torch.zeros(2, 1, 4, dtype=BF16), torch.zeros(2, 8, dtype=BF16)
    with pytest.raises(InvalidArgumentError, match="^out: got memory that overlaps hidden_states"):
        backend.post_wkv(hidden, kv, GateWeights(torch.ones(1, 4), torch.ones(1, 4), 1e-20), out=hidden)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q_weight": torch.ones(3, 4)}, "^q_weight"),
        ({"k_weight": torch.ones(1, 5)}, "^k_weight"),
        ({"q_weight": torch.ones(1, 4, dtype=torch.float16)}, "^q_weight"),
        ({"eps": float("nan")}, "^eps"),
        ({"eps": -1.0}, "^eps"),
        ({"clamp": None}, "^clamp"),
    ],
)
def test_wrong_gate_weights_are_refused(change: dict[str, Any], said: str) -> None:
    fields: dict[str, Any] = {"q_weight": torch.ones(1, 4), "k_weight": torch.ones(1, 4), "eps": 1e-20}
    with pytest.raises(InvalidArgumentError, match=said):
        GateWeights(**{**fields, **change})
