"""The gate over slices of dim, all ranks played: what it gives, what it sends, what it refuses."""

from __future__ import annotations

import pytest
import torch
from engram_reference.backend import ReferenceBackend
from engram_rocm.backend import RocmBackend
from played import CPU, Numbers, Play, Seat, post, projection

from engram_core.backend import GateWeights
from engram_core.errors import CollectiveError, InvalidArgumentError

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("ranks", "copies", "dim"),
    [(2, 4, 128), (4, 4, 128), (8, 4, 256), (3, 1, 96), (2, 2, 320), (2, 8, 64), (5, 4, 1280)],
)
def test_every_split_gives_the_gate(ranks: int, copies: int, dim: int) -> None:
    numbers = Numbers.make(5, copies, dim)
    out, _ = post(numbers, ranks)
    numbers.judge(out)


def test_the_published_geometry_sends_2592_bytes_a_rank_and_token() -> None:
    """dim 5120, H = 4, P = 4: the slices of keys and value, 5 * 1280 bf16, would be 12,800."""
    tokens = 7
    numbers = Numbers.make(tokens, 4, 5120)
    out, play = post(numbers, 4)
    numbers.judge(out)
    sent = [(group, operation, shape, dtype) for group, operation, *_, shape, dtype in play.log[0]]
    assert sent == [("tensor", "all_gather", (tokens, 1280 + 4 * 4), BF16)]
    assert all(log == play.log[0] for log in play.log)
    (_, _, shape, dtype), wkv = sent[0], projection(Seat(0, 4), 5120, 4)
    assert shape[1] * dtype.itemsize == 2592
    assert wkv.kv_features * dtype.itemsize == 12800


@pytest.mark.parametrize("strided", [False, True])
def test_closed_rows_keep_their_bits_whatever_kv_holds(strided: bool) -> None:
    numbers = Numbers.make(9, 4, 128)
    numbers.hidden[4] = -0.0
    mask = torch.tensor([True, False, True, True, False, True, True, True, True])
    numbers.kv[1] = torch.nan
    numbers.kv[4] = torch.inf
    numbers.kv[7:] = torch.nan
    out, _ = post(numbers, 2, mask, real=7, strided=strided)
    numbers.judge(out, mask, 7)
    none, _ = post(numbers, 2, mask, real=0, strided=strided)
    assert torch.equal(none.view(torch.int16), numbers.hidden.view(torch.int16))


@pytest.mark.parametrize("at", [0, 32, 127])
def test_nan_in_one_ranks_slice_reaches_the_whole_copy_and_no_other(at: int) -> None:
    numbers = Numbers.make(3, 2, 128)
    numbers.kv[1, 128 + at] = torch.nan
    out, _ = post(numbers, 4)
    numbers.judge(out, random=False)
    assert out[1, 1].isnan().all()
    assert not out[1, 0].isnan().any()


def test_nan_in_hidden_reaches_the_output() -> None:
    numbers = Numbers.make(2, 4, 64)
    numbers.hidden[0, 3, 40] = torch.nan
    out, _ = post(numbers, 2)
    assert out[0, 3].isnan().all()
    assert int(out.isnan().sum()) == 64


def test_float32_weights_and_large_numbers() -> None:
    numbers = Numbers.make(3, 4, 64, torch.float32)
    numbers.hidden *= 2.0**50
    numbers.kv *= 2.0**40
    out, _ = post(numbers, 2)
    numbers.judge(out, random=False)


# The contract's probes, with the sums of a constant split over the ranks.
@pytest.mark.parametrize(
    ("h", "key", "value", "eps", "expected"),
    [
        (2.0**-12, 1.0, 1.0, 1e-20, 0.8046875),
        (2.0**-12, 1.0, 1.0, 1e-6, 0.6640625),
        (0.0, 0.0, 1.0, 1e-20, 0.5),
    ],
)
def test_probes(h: float, key: float, value: float, eps: float, expected: float) -> None:
    # dim 64 where the contract has 4: q scaled so that dot is the same.
    kv = torch.cat([torch.full((1, 64), key), torch.full((1, 64), value)], 1).to(BF16)
    q = torch.full((1, 64), (4 / 64) ** 0.5)
    numbers = Numbers(torch.full((1, 1, 64), h).to(BF16), kv, GateWeights(q, torch.ones(1, 64), eps))
    out, _ = post(numbers, 2)
    assert set(out.flatten().tolist()) == {expected}


def test_a_dot_of_exactly_zero_is_positive() -> None:
    kv = torch.cat([torch.ones(1, 64), -torch.ones(1, 64)], 1).to(BF16)
    numbers = Numbers(
        torch.full((1, 1, 64), 0.5).to(BF16), kv, GateWeights(torch.zeros(1, 64), torch.ones(1, 64), 1e-20)
    )
    out, _ = post(numbers, 2)
    assert {int(bits) & 0xFFFF for bits in out.view(torch.int16).flatten()} == {0xB983}


def test_without_tokens_nothing_is_exchanged() -> None:
    numbers = Numbers.make(0, 4, 64)
    wkv = projection(Seat(1, 2), 64, 4)  # a seat raises on every exchange
    out = RocmBackend(CPU).post_wkv(numbers.hidden, numbers.slice(wkv), numbers.weights, wkv=wkv, num_kv_tokens=0)
    assert out.shape == (0, 4, 64)


def test_rows_are_the_same_alone_and_in_a_batch() -> None:
    numbers = Numbers.make(4, 4, 64)
    out, _ = post(numbers, 2)
    alone = Numbers(numbers.hidden[2:3], numbers.kv[2:3], numbers.weights)
    assert torch.equal(post(alone, 2)[0], out[2:3])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hidden_states": torch.zeros(2, 4, 32, dtype=BF16)}, "^hidden_states"),
        ({"kv": torch.zeros(2, 320, dtype=BF16)}, "^kv"),
        ({"gate": GateWeights(torch.ones(4, 128), torch.ones(4, 128), 0.0)}, "^(gate|hidden_states)"),
        ({"gate": GateWeights(torch.ones(8, 64), torch.ones(8, 64), 0.0)}, "^(gate|hidden_states)"),
        ({"token_mask": torch.ones(3, dtype=torch.bool)}, "^token_mask"),
        ({"token_mask": torch.ones(2)}, "^token_mask"),
        ({"num_kv_tokens": 3}, "^num_kv_tokens"),
        ({"out": torch.zeros(2, 4, 64)}, "^out"),
    ],
)
def test_wrong_operands_are_refused_before_anything_is_exchanged(change: dict[str, object], said: str) -> None:
    wkv = projection(Seat(0, 2), 64, 4)
    given = {
        "hidden_states": torch.zeros(2, 4, 64, dtype=BF16),
        "kv": torch.zeros(2, 160, dtype=BF16),
        "gate": GateWeights(torch.ones(4, 64), torch.ones(4, 64), 0.0),
        "wkv": wkv,
    }
    with pytest.raises(InvalidArgumentError, match=said):
        RocmBackend(CPU).post_wkv(**{**given, **change})  # type: ignore[arg-type]


def test_out_over_an_input_is_refused() -> None:
    numbers = Numbers.make(2, 4, 64)
    wkv = projection(Seat(0, 2), 64, 4)
    with pytest.raises(InvalidArgumentError, match="^out: got memory that overlaps hidden_states"):
        RocmBackend(CPU).post_wkv(numbers.hidden, numbers.slice(wkv), numbers.weights, wkv=wkv, out=numbers.hidden)


def test_another_backends_projection_is_refused() -> None:
    numbers = Numbers.make(2, 4, 64)
    spec = projection(Seat(0, 1), 64, 4).spec
    with pytest.raises(InvalidArgumentError, match="^wkv: got ReferenceWkv"):
        RocmBackend(CPU).post_wkv(
            numbers.hidden, numbers.kv, numbers.weights, wkv=ReferenceBackend(CPU).create_wkv(spec)
        )


def test_collectives_that_lose_a_rank_are_an_error() -> None:
    class Deaf(Seat):
        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            return x

    numbers = Numbers.make(2, 4, 64)
    wkv = projection(Deaf(0, 2), 64, 4)
    with pytest.raises(CollectiveError, match=r"gave \[2, 48\]; needed are 2 x \[2, 48\]"):
        RocmBackend(CPU).post_wkv(numbers.hidden, numbers.slice(wkv), numbers.weights, wkv=wkv)


def test_collectives_may_join_in_another_order_of_memory() -> None:
    class Transposed:
        def __init__(self, inner: object) -> None:
            self.inner = inner
            self.rank, self.size = inner.rank, inner.size  # type: ignore[attr-defined]

        def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
            return self.inner.all_gather(x, dim).T.contiguous().T  # type: ignore[attr-defined,no-any-return]

        def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError

    numbers = Numbers.make(3, 4, 64)
    play: Play[torch.Tensor] = Play(2, CPU)
    group = play.everyone()

    def act(rank: int) -> torch.Tensor:
        wkv = projection(Transposed(group[rank]), 64, 4)
        return RocmBackend(CPU).post_wkv(numbers.hidden, numbers.slice(wkv), numbers.weights, wkv=wkv)

    for out in play.run(act):
        numbers.judge(out)
