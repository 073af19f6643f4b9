"""The pytest plugin: four options, and nothing else until ``--engram-backend`` is given.

pytest loads it in every project of an environment where engram-core is installed, so only the standard library is
imported here, and without the option no hook but these two runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SIZES = ("small", "real", "full")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engram", "engram-core conformance suite (pytest --pyargs engram_conformance)")
    group.addoption("--engram-backend", metavar="NAME", help="the backend to judge; required by the suite")
    group.addoption(
        "--engram-device", metavar="DEVICE", help="torch device to judge it on (default: the backend's own)"
    )
    group.addoption("--engram-report", metavar="FILE.json", help="write the report as JSON")
    group.addoption("--engram-html", metavar="FILE.html", help="write the report as one HTML page")
    group.addoption(
        "--engram-size",
        choices=SIZES,
        help="largest cases to run: small (minutes in Triton's interpreter), real geometry, or full (default; small "
        "where kernels are interpreted)",
    )
    group.addoption("--engram-events", metavar="FILE", help="append one JSON line for each verdict, as it falls")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("engram_backend") is not None:
        from engram_conformance.session import ConformanceSession

        config.pluginmanager.register(ConformanceSession.start(config), "engram-conformance-session")
