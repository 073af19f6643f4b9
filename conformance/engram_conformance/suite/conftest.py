"""Says what is missing when the suite is collected without a backend to judge."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config) -> None:
    if config.getoption("engram_backend", None) is None:
        raise pytest.UsageError("the suite needs --engram-backend=NAME (engram-core backends lists the names)")
