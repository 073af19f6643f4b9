"""Shared by all tests: the reference backend, a tiny model, and a memory filled with seeded weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from models import filled, tiny_config

from engram_core import EngramConfig, EngramMemory, TokenMap, get_backend
from engram_core.backend import EngramBackend


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's own ENGRAM_* settings must not decide what the tests test."""
    for name in ("ENGRAM_BACKEND", "ENGRAM_DISABLE_BACKENDS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def backend() -> EngramBackend:
    return get_backend("reference", "cpu")


@pytest.fixture
def config() -> EngramConfig:
    return tiny_config()


@pytest.fixture
def token_map(config: EngramConfig) -> TokenMap:
    return TokenMap.identity(config.compressed_vocab_size, config.pad_token_id)


@pytest.fixture
def memory(config: EngramConfig, token_map: TokenMap, backend: EngramBackend) -> EngramMemory:
    return filled(EngramMemory(config, token_map, backend, max_tokens=64))


@pytest.fixture
def hidden(config: EngramConfig) -> Callable[[int], torch.Tensor]:
    def make(tokens: int, seed: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        shape = (tokens, config.hc_mult, config.hidden_size)
        return torch.randn(shape, generator=generator).to(torch.bfloat16)

    return make
