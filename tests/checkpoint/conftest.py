"""A small checkpoint in the real format, and what it must load as."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from models import tiny_config

from engram_core import EngramConfig, EngramMemory, TokenMap
from engram_core.backend import EngramBackend
from engram_core.checkpoint import Checkpoint, LayerTensors, write_checkpoint
from engram_core.synthetic import Synthetic

SEED = 5


@pytest.fixture(scope="session")
def small() -> EngramConfig:
    """Four columns; tables of about 2,000 rows."""
    return tiny_config(head_dim=64, vocab_size=500)


@pytest.fixture
def token_map(small: EngramConfig) -> TokenMap:
    return TokenMap.identity(small.compressed_vocab_size, small.pad_token_id)


@pytest.fixture(scope="session")
def _written(small: EngramConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint") / "model", small, SEED)


@pytest.fixture
def folder(_written: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(_written, tmp_path / "model"))


@pytest.fixture
def expected(small: EngramConfig, token_map: TokenMap, backend: EngramBackend) -> EngramMemory:
    memory = EngramMemory(small, token_map, backend, max_tokens=32)
    Synthetic(small, SEED).load(memory)
    return memory


@pytest.fixture
def load(token_map: TokenMap, backend: EngramBackend) -> Callable[..., EngramMemory]:
    def call(path: Path, **options: object) -> EngramMemory:
        options = {"backend": backend, "max_tokens": 32, "token_map": token_map, **options}
        return EngramMemory.from_pretrained(path, **options)  # type: ignore[arg-type]

    return call


@pytest.fixture
def source(folder: Path) -> LayerTensors:
    return Checkpoint.open(folder).layers()[1]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "packed"
