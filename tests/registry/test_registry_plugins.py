"""The project's own three: what pyproject.toml declares, what each plugin says, and which factory it names."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from engram_core._discovery import load_target
from engram_core.backend import EngramBackend
from engram_core.hookspecs import ENTRY_POINT_GROUP
from engram_core.info import API_VERSION, Capability

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
DECLARED = tomllib.loads(PYPROJECT.read_text())["project"]["entry-points"][ENTRY_POINT_GROUP]


@pytest.mark.parametrize("name", ["reference", "nvidia", "rocm"])
def test_a_plugin_describes_the_backend_that_its_factory_makes(name):
    info = import_module(DECLARED[name]).engram_backend()
    assert info.name == name
    assert info.api_version == API_VERSION
    assert callable(load_target(info.probe))
    factory = load_target(info.factory)
    assert issubclass(factory, EngramBackend)
    assert factory.info is info


def test_the_reference_claims_neither_graphs_nor_a_cache():
    info = import_module(DECLARED["reference"]).INFO
    assert set(Capability) - info.capabilities == {Capability.GRAPH_CAPTURE, Capability.HOT_ROWS}
    assert (
        info.priority < import_module(DECLARED["nvidia"]).INFO.priority == import_module(DECLARED["rocm"]).INFO.priority
    )
