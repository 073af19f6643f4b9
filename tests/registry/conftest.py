"""Fake distributions: a ``dist-info`` folder and modules on a path, found by the very code that finds real ones."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engram_core import _devices, _discovery, _environ, registry

PLUGIN = """
from engram_core.hookspecs import hookimpl
from engram_core.info import BackendInfo, Reason

INFO = BackendInfo(
    name={name!r}, api_version={api!r}, summary="a fake", vendor="Fake", device_types={types!r}, priority={priority!r},
    probe={probe!r}, factory={factory!r}, interpretable={interpretable!r},
)

@hookimpl
def engram_backend():
    return INFO

def probe():
    return ()
"""

BACKEND = """
from engram_core.backend import EngramBackend
from {module} import INFO

class Backend(EngramBackend):
    info = INFO
    def create_wkv(self, spec): raise NotImplementedError
    def post_wkv(self, hidden_states, kv, gate, **others): raise NotImplementedError
    def prefetch(self, layers, max_rows): raise NotImplementedError
"""


class Site:
    """A folder of the path in which distributions are installed, apart from all that this machine has."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = [root]

    def dist(self, name: str, version: str, entries: str, folder: str = "") -> Path:
        """Install metadata alone; ``folder``: another one of the path."""
        root = self.root / folder if folder else self.root
        if root not in self.paths:
            self.paths.append(root)
            sys.path.insert(0, str(root))
        info = root / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[engram_core.backends]\n{entries}\n")
        importlib.invalidate_caches()
        return info

    def module(self, name: str, source: str) -> None:
        (self.root / f"{name}.py").write_text(source)
        importlib.invalidate_caches()

    def backend(
        self,
        name: str,
        *,
        dist: str = "",
        version: str = "0.2",
        entry: str = "",
        plugin: str = "",
        extra: str = "",
        backend: str = "",
        body: str = "",
        api: object = (1, 0),
        types: object = ("cpu",),
        priority: object = 0,
        probe: str = "",
        factory: str = "",
        interpretable: bool = False,
        info_name: str = "",
    ) -> str:
        """Install a backend whose every part can be replaced (``body``: a line of its class); returns its module."""
        module = f"fake_{name.replace('-', '_')}"
        source = plugin or PLUGIN.format(
            name=info_name or name,
            api=api,
            types=types,
            priority=priority,
            probe=probe or f"{module}:probe",
            factory=factory or f"{module}_backend:Backend",
            interpretable=interpretable,
        )
        self.module(module, source + extra)
        self.module(f"{module}_backend", (backend or BACKEND + f"    {body}\n").replace("{module}", module))
        self.dist(dist or f"{name}-engram", version, f"{entry or name} = {module}")
        return module

    def core(self) -> None:
        """The project's own three backends, as its wheel declares them."""
        names = ("reference", "nvidia", "rocm")
        self.dist("engram-core", "0.1.0", "\n".join(f"{name} = engram_{name}.plugin" for name in names))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    root = tmp_path / "site"
    root.mkdir()
    site = Site(root)
    monkeypatch.setattr(sys, "path", [str(root), *sys.path])
    before = set(sys.modules)
    monkeypatch.setattr(
        _discovery, "distributions", lambda: importlib.metadata.distributions(path=[str(p) for p in site.paths])
    )
    yield site
    for name in [name for name in sys.modules if name not in before and name.startswith("fake_")]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def plain_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings, no device nodes and no accelerator, whatever the machine that runs the tests has."""
    for name in list(os.environ):
        if name.upper().startswith("ENGRAM_") or name.endswith("_VISIBLE_DEVICES") or name == "TRITON_INTERPRET":
            monkeypatch.delenv(name)
    monkeypatch.setattr(_environ, "_warned", set())
    monkeypatch.setattr(registry, "_created", {})
    dev = tmp_path / "dev"
    dev.mkdir()
    monkeypatch.setattr(_devices, "DEV", dev)
    monkeypatch.setattr(_devices, "KFD_TOPOLOGY", tmp_path / "kfd")
    monkeypatch.setattr(_devices, "accelerator", lambda: None)
    monkeypatch.setattr(_devices, "cuda_count", lambda: 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices that torch calls "cuda"."""
    import torch

    monkeypatch.setattr(_devices, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(_devices, "cuda_count", lambda: 2)
    (_devices.DEV / "nvidiactl").touch()
