"""acme's tables and bit tricks against the core's definitions, over everything that they can be given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from acme_engram import numbers
from acme_engram.backend import AcmeBackend
from acme_engram.threads import spread

from engram_core import EngramConfig, HashLayout, Parallel, TokenBatch, TokenMap, WkvSpec
from engram_core.backend import TableSpec
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.formats import decode_e4m3fn, decode_e8m0, rows_to_bf16
from engram_core.hashing import TorchHasher
from engram_core.specs import Problem


def same_bits(found: np.ndarray, want: torch.Tensor) -> None:
    """Equal bit for bit; any NaN equals any NaN."""
    got = torch.from_numpy(found.view(np.int16)).view(torch.bfloat16)
    nan = want.isnan()
    assert torch.equal(got.isnan(), nan)
    assert torch.equal(got.view(torch.int16)[~nan], want.view(torch.int16)[~nan])


def test_every_code_with_every_scale_decodes_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(256, 8)
    packed = torch.cat([codes, scales], dim=1)
    found = np.empty((256, 256), np.uint16)
    numbers.decode(packed.numpy(), found)
    same_bits(found, rows_to_bf16(packed))
    assert numbers.ROWS.nbytes == 128 * 1024


def test_the_values_of_codes_and_scales_are_the_cores() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(numbers.CODES, decode_e4m3fn(every).numpy())
    np.testing.assert_array_equal(numbers.SCALES, decode_e8m0(every).numpy())
    assert np.signbit(numbers.CODES[0x80])


def test_rounding_is_torchs_for_every_bf16_and_its_neighbours() -> None:
    high = np.arange(65536, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (high | low).view(np.float32)
    found = np.empty(values.shape, np.uint16)
    with np.errstate(all="ignore"):
        numbers.narrow(values, found)
    same_bits(found, torch.from_numpy(values).to(torch.bfloat16))


def test_widening_is_exact_for_any_strides() -> None:
    every = torch.arange(-32768, 32768, dtype=torch.int16).view(torch.bfloat16).view(256, 256)
    for view in (every, every.T, every[::2], every[:, 3:9]):
        wide = numbers.widen(numbers.words(view))
        assert wide.flags.c_contiguous
        np.testing.assert_array_equal(wide, view.float().numpy())


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_tape_gives_the_ids_of_the_definition(
    config: EngramConfig, acme: AcmeBackend, seed: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = config.model_copy(update={"max_ngram_size": 4, "num_embeddings": (1000, 1000)})
    layout, token_map = HashLayout.from_config(config), TokenMap.identity(64, 2)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=dtype)

    lengths = draw(0, 7, 6)  # some requests are empty
    start = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=dtype)])
    first = draw(0, 5, 6)
    positions = torch.cat([first[r] + torch.arange(int(n), dtype=dtype) for r, n in enumerate(lengths)])
    padding = seed % 3
    positions = torch.cat([positions, positions.new_zeros(padding)])
    tokens = len(positions)
    dead = torch.rand(tokens, generator=generator) < 0.2 if seed % 2 else None
    batch = TokenBatch(draw(-2, 70, tokens), positions, start, draw(-1, 66, 6, 3), dead)
    found = acme.create_hasher(layout, token_map)(batch)
    want = TorchHasher(layout, token_map, torch.device("cpu"))(batch)
    assert found.dtype == want.dtype
    assert torch.equal(found, want)


def test_a_malformed_query_start_reads_nothing_outside(config: EngramConfig, acme: AcmeBackend) -> None:
    hasher = acme.create_hasher(HashLayout.from_config(config), TokenMap.identity(64, 2))
    for start in ([5, -9, 2**40], [-(2**62), 2**62, 3], [3, 2, 1]):
        ids = torch.arange(4)
        found = hasher(TokenBatch(ids, ids, torch.tensor(start), torch.zeros(2, 2, dtype=torch.int64)))
        assert found.shape == (4, 2, 4)


@pytest.mark.parametrize("tokens", [1, 12, 13, 64])
def test_few_and_many_tokens_give_the_same_projection(acme: AcmeBackend, tokens: int) -> None:
    wkv = acme.create_wkv(WkvSpec(256, 64, 4, Parallel.single()))
    generator = torch.Generator().manual_seed(0)
    wkv.load(torch.randn(320, 256, generator=generator).to(torch.bfloat16))
    rows = torch.randn(tokens, 8, 32, generator=generator).to(torch.bfloat16)
    alone = torch.cat([wkv(rows[i : i + 1]) for i in range(tokens)])
    torch.testing.assert_close(wkv(rows), alone, rtol=2**-7, atol=1e-5)


def test_spread_covers_everything_once_and_tells_a_failure() -> None:
    seen = np.zeros(1000, int)

    def mark(here: slice) -> None:
        seen[here] += 1

    for count in (0, 1, 7, 1000):
        seen[:] = 0
        spread(mark, count, 8)
        assert seen[:count].all()
        assert seen.sum() == count

    def fail(here: slice) -> None:
        if here.start:
            raise ValueError("from a thread")

    if len(__import__("os").sched_getaffinity(0)) > 1:
        with pytest.raises(ValueError, match="from a thread"):
            spread(fail, 1000, 8)


def test_limits_are_refused_with_reasons(
    config: EngramConfig, acme: AcmeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    single = Parallel.single()
    assert acme.supports(Problem(config, single)) == ()
    sequence = Parallel(single.tensor, sequence=True)
    assert {r.code for r in acme.supports(Problem(config, sequence, "shared", cache_bytes=1))} == {
        "no-sequence-parallel",
        "no-placement-shared",
        "no-hot-rows",
    }
    with pytest.raises(UnsupportedConfigError, match="one-rank"):
        acme.create_wkv(WkvSpec(256, 64, 4, sequence))
    with pytest.raises(UnsupportedConfigError, match="dtype"):
        acme.create_wkv(WkvSpec(256, 64, 4, single, dtype=torch.float16))
    with pytest.raises(UnsupportedConfigError, match="no-placement-shared"):
        acme.create_table(TableSpec(60, 64, (11, 13), "shared", single))
    monkeypatch.setattr("acme_engram.backend._memory", lambda: 4096)
    assert [r.code for r in acme.supports(Problem(config, single))] == ["memory"]


def test_a_projection_of_another_backend_is_refused(acme: AcmeBackend, backend: object) -> None:
    foreign = backend.create_wkv(WkvSpec(256, 64, 1, Parallel.single()))  # type: ignore[attr-defined]
    weights = torch.ones(1, 64)
    from engram_core import GateWeights

    hidden, kv = torch.zeros(1, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 128, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgumentError, match="^wkv: got"):
        acme.post_wkv(hidden, kv, GateWeights(weights, weights, 1e-20), wkv=foreign)
