"""acme is not installed where the project's own tests run: its tricks are tested from its folder."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
import torch
from fresh import ACME
from models import filled

from engram_core import EngramConfig, EngramMemory, TokenMap
from engram_core.backend import EngramBackend

if TYPE_CHECKING:
    from acme_engram.backend import AcmeBackend

sys.path.insert(0, str(ACME))


@pytest.fixture
def acme() -> AcmeBackend:
    from acme_engram.backend import AcmeBackend

    return AcmeBackend(torch.device("cpu"))


@pytest.fixture
def memory(config: EngramConfig, token_map: TokenMap, acme: EngramBackend) -> EngramMemory:
    return filled(EngramMemory(config, token_map, acme, max_tokens=64))
