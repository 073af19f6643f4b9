"""Hash ids: golden vectors bit for bit, and every way of cutting a sequence gives what one pass gives."""

from __future__ import annotations

import random

import pytest
import torch
from golden import REAL, TINY
from models import tiny_config
from test_tokens import real_tokenizer

from engram_core import EngramConfig, HashLayout, NgramHasher, TokenBatch, TokenMap
from engram_core.backend import EngramBackend
from engram_core.errors import InvalidArgumentError

WIDTH = 2  # n - 1 of the tiny model


@pytest.fixture
def hasher(backend: EngramBackend, config: EngramConfig, token_map: TokenMap) -> NgramHasher:
    return NgramHasher(config, token_map, backend)


def test_layouts() -> None:
    tiny = HashLayout.from_config(tiny_config())
    real = HashLayout.from_config(EngramConfig.deepseek_v41())
    for layout, golden in ((tiny, TINY), (real, REAL["meta"])):
        assert [[list(size) for size in layer] for layer in layout.primes] == golden["primes"]
        assert [list(layer) for layer in layout.multipliers] == golden["multipliers"]
    assert [list(layer) for layer in tiny.offsets] == TINY["offsets"]
    assert list(real.rows) == REAL["meta"]["rows"] == [384_006_168, 384_016_682]
    assert real.primes[0][0][0] == 16_000_057
    assert real.columns == 24


def test_one_stage_hashes_as_the_whole_model() -> None:
    """Primes of layer 14 depend on layer 1: a layout is always that of the whole model."""
    assert (
        HashLayout.from_config(tiny_config(layer_ids=(14,))).primes[0]
        != (HashLayout.from_config(tiny_config()).primes[1])
    )


def _dead(case: dict[str, list[int]], tokens: list[int]) -> torch.Tensor:
    dead = torch.zeros(len(tokens), dtype=torch.bool)
    dead[case["dead"]] = True
    return dead


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", TINY["cases"])
def test_golden_tiny(hasher: NgramHasher, case: dict[str, list[int]], dtype: torch.dtype) -> None:
    tokens = case["tokens"]
    found = hasher(TokenBatch.single(torch.tensor(tokens, dtype=dtype), _dead(case, tokens)))
    assert found.dtype == torch.int32
    for layer, expected in enumerate(case["hash_ids"].values()):  # type: ignore[attr-defined]
        assert found[:, layer].tolist() == expected


def test_golden_real(backend: EngramBackend) -> None:
    token_map = TokenMap.from_tokenizer(real_tokenizer(), REAL["meta"]["pad_id"])
    hasher = NgramHasher(EngramConfig.deepseek_v41(), token_map, backend)
    assert REAL["cases"]
    for case in REAL["cases"]:
        tokens = case["token_ids"]
        found = hasher(TokenBatch.single(torch.tensor(tokens), _dead(case, tokens)))
        for layer, expected in enumerate(case["hash_ids"].values()):
            assert found[:, layer].tolist() == expected, case["name"]


@pytest.mark.parametrize(
    ("lookback", "token", "position", "expected"),
    [
        ([7, -1], 8, 3, [[3, 15, 29, 49], [11, 31, 62, 113]]),
        ([-1, 6], 8, 3, [[7, 22, 30, 58], [14, 26, 82, 100]]),
        ([9, 9], 64, 0, [[3, 13, 40, 49], [7, 35, 55, 88]]),
        ([7, 6], 8, 3, [TINY["cases"][0]["hash_ids"][layer][3] for layer in ("1", "14")]),
    ],
    ids=["older unknown", "newer unknown blocks the older", "outside the map, past the start", "known"],
)
def test_lookback(
    hasher: NgramHasher, lookback: list[int], token: int, position: int, expected: list[list[int]]
) -> None:
    batch = TokenBatch(torch.tensor([token]), torch.tensor([position]), torch.tensor([0, 1]), torch.tensor([lookback]))
    assert hasher(batch)[0].tolist() == expected


@pytest.mark.parametrize("bad", [-1, 64, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_map_is_dead(hasher: NgramHasher, bad: int) -> None:
    tokens = torch.tensor([5, 6, 7, 8])
    dead = torch.tensor([False, False, True, False])
    wild = torch.where(dead, bad, tokens)
    assert torch.equal(hasher(TokenBatch.single(wild)), hasher(TokenBatch.single(tokens, dead)))


@pytest.mark.parametrize("seed", range(20))
def test_chunked_and_packed_batches_give_what_one_pass_gives(hasher: NgramHasher, seed: int) -> None:
    draw = random.Random(seed)
    sequences = [[draw.randrange(64) for _ in range(draw.randrange(1, 20))] for _ in range(draw.randrange(1, 5))]
    dead = [[draw.random() < 0.2 for _ in sequence] for sequence in sequences]
    whole = [hasher(TokenBatch.single(torch.tensor(s), torch.tensor(d))) for s, d in zip(sequences, dead, strict=True)]
    done = [0] * len(sequences)
    while any(at < len(s) for at, s in zip(done, sequences, strict=True)):
        ids, positions, starts, lookback, gone, expected = [], [], [0], [], [], []
        for r, sequence in enumerate(sequences):
            begin = done[r]
            count = draw.randrange(0, 4) if begin < len(sequence) else 0
            stop = min(begin + count, len(sequence))
            before = [begin - 1 - i for i in range(WIDTH)]
            # What lies before the start is ignored, so anything may stand there.
            lookback.append([(-1 if dead[r][p] else sequence[p]) if p >= 0 else draw.randrange(-3, 99) for p in before])
            ids += sequence[begin:stop]
            gone += dead[r][begin:stop]
            positions += range(begin, stop)
            starts.append(len(ids))
            expected.append(whole[r][begin:stop])
            done[r] = stop
        padding = draw.randrange(0, 3)
        batch = TokenBatch(
            torch.tensor(ids + [3] * padding, dtype=torch.int32),
            torch.tensor(positions + [5] * padding, dtype=torch.int32),
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor(lookback, dtype=torch.int32),
            torch.tensor(gone + [False] * padding, dtype=torch.bool),
        )
        found = hasher(batch)
        assert torch.equal(found[: len(ids)], torch.cat(expected))
        assert bool((found[len(ids) :] == -1).all())


def test_empty_batches(hasher: NgramHasher) -> None:
    assert hasher(TokenBatch.single(torch.empty(0, dtype=torch.int64))).shape == (0, 2, 4)
    nobody = TokenBatch(torch.tensor([5]), torch.tensor([0]), torch.tensor([0]), torch.empty(0, 2, dtype=torch.int64))
    assert hasher(nobody).tolist() == [[[-1] * 4] * 2]


def test_int64_ids_for_huge_tables(backend: EngramBackend) -> None:
    config = tiny_config(vocab_size=2**30)
    found = NgramHasher(config, TokenMap.identity(64, 2), backend)(TokenBatch.single(torch.arange(9)))
    assert found.dtype == torch.int64
    assert int(found.max()) >= 2**31


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("input_ids", torch.zeros(3)),
        ("input_ids", torch.zeros(3, 1, dtype=torch.int64)),
        ("input_ids", [1, 2, 3]),
        ("positions", torch.zeros(2, dtype=torch.int64)),
        ("query_start", torch.zeros(0, dtype=torch.int64)),
        ("query_start", torch.zeros(2, dtype=torch.int16)),
        ("lookback", torch.zeros(2, 2, dtype=torch.int64)),
        ("dead", torch.zeros(3)),
        ("dead", torch.zeros(2, dtype=torch.bool)),
        ("host", 5),
    ],
)
def test_bad_batches_are_refused_by_name(name: str, value: object) -> None:
    fields: dict[str, object] = {
        "input_ids": torch.zeros(3, dtype=torch.int64),
        "positions": torch.arange(3),
        "query_start": torch.tensor([0, 3]),
        "lookback": torch.zeros(1, 2, dtype=torch.int64),
        "dead": torch.zeros(3, dtype=torch.bool),
    }
    with pytest.raises(InvalidArgumentError, match=f"^{name}: got .*; need "):
        TokenBatch(**{**fields, name: value})  # type: ignore[arg-type]


def test_a_lookback_of_another_width_is_refused(hasher: NgramHasher) -> None:
    batch = TokenBatch(torch.tensor([1]), torch.tensor([5]), torch.tensor([0, 1]), torch.tensor([[1, 2, 3]]))
    with pytest.raises(InvalidArgumentError, match=r"^lookback: got \[1, 3\].*need \[1, 2\]"):
        hasher(batch)
