"""The hash kernel against plain Python of the rule, the golden vectors, and the core's own definition."""

from __future__ import annotations

import pytest
import torch
from golden import TINY as GOLDEN
from models import tiny_config

from engram_core import EngramConfig, TokenBatch, TokenMap
from engram_core.hashing import TorchHasher, with_lookback
from engram_core.kernels.hash import HashConstants, hash_ids
from engram_core.layout import HashLayout

CPU = torch.device("cpu")
TINY = HashLayout.from_config(tiny_config())
IDENTITY = TokenMap.identity(64, 2)


def hashed(batch: TokenBatch, layout: HashLayout = TINY, token_map: TokenMap = IDENTITY) -> torch.Tensor:
    return hash_ids(with_lookback(batch, layout.max_ngram_size - 1), HashConstants.of(layout, token_map, CPU))


@pytest.mark.parametrize("case", GOLDEN["cases"])
def test_golden(case: dict[str, list[int]]) -> None:
    dead = torch.zeros(len(case["tokens"]), dtype=torch.bool)
    dead[case["dead"]] = True
    got = hashed(TokenBatch.single(torch.tensor(case["tokens"]), dead))
    assert got[:, 0].tolist() == case["hash_ids"]["1"]
    assert got[:, 1].tolist() == case["hash_ids"]["14"]
    assert got.dtype == torch.int32


@pytest.mark.parametrize(
    ("lookback", "token", "position", "first", "second"),
    [
        ([7, -1], 8, 3, [3, 15, 29, 49], [11, 31, 62, 113]),
        ([-1, 6], 8, 3, [7, 22, 30, 58], [14, 26, 82, 100]),
        ([-1, -1], 64, 0, [3, 13, 40, 49], [7, 35, 55, 88]),
    ],
)
def test_golden_lookback(lookback: list[int], token: int, position: int, first: list[int], second: list[int]) -> None:
    batch = TokenBatch(torch.tensor([token]), torch.tensor([position]), torch.tensor([0, 1]), torch.tensor([lookback]))
    assert hashed(batch).tolist() == [[first, second]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("requests", [1, 7, 300])
def test_packed_batches_as_the_definition(requests: int, dtype: torch.dtype) -> None:
    """Empty requests, dead and unknown tokens, padding past the end, strides, products that fill 63 bits."""
    layout = HashLayout.from_config(EngramConfig.deepseek_v41())
    torch.manual_seed(requests)
    ids = torch.randint(0, 99_092, (129_280,), dtype=torch.int32)
    ids[0] = 99_091
    token_map = TokenMap(ids, 2)
    tokens = 21
    start = torch.sort(torch.randint(0, tokens - 3, (requests + 1,))).values
    start[0] = 0
    batch = TokenBatch(
        torch.randint(-3, 129_290, (2 * tokens,)).to(dtype)[::2],
        torch.randint(0, 6, (tokens,)).to(dtype),
        start.to(dtype),
        torch.randint(-1, 129_290, (3, requests)).to(dtype).T,
        torch.rand(tokens) < 0.2,
    )
    got = hashed(batch, layout, token_map)
    assert torch.equal(got, TorchHasher(layout, token_map, CPU)(batch))
    assert (got[int(start[-1]) :] == -1).all()


def test_primes_up_to_the_largest() -> None:
    """One less than 2**31 and the smallest primes: the quotient by multiplication is exact for both."""
    layout = HashLayout.from_config(tiny_config(vocab_size=2**31 - 19, num_embeddings=(2**34, 2**34)))
    assert layout.needs_int64
    batch = TokenBatch.single(torch.arange(40) % 64)
    got = hashed(batch, layout)
    assert got.dtype == torch.int64
    assert torch.equal(got, TorchHasher(layout, IDENTITY, CPU)(with_lookback(batch, 2)))


def test_no_tokens() -> None:
    assert hashed(TokenBatch.single(torch.empty(0, dtype=torch.int64))).shape == (0, 2, 4)
