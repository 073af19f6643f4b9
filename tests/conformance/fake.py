"""Backends with faults, as distributions of their own on ``PYTHONPATH``; the suite is run on them as by a stranger."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engram_conformance
import engram_reference

import engram_core

_PLUGIN = """
from dataclasses import replace
from engram_core.hookspecs import hookimpl
from engram_core.info import Capability
from engram_reference.plugin import INFO as BASE
INFO = replace(BASE, name="fake", factory="fake_engram.backend:FakeBackend", {info})
@hookimpl
def engram_backend():
    return INFO
"""

_BACKEND = """
import torch
from engram_core.backend import *
from engram_core.errors import *
from engram_core.info import Reason
from engram_reference.backend import ReferenceBackend
from fake_engram.plugin import INFO
class FakeBackend(ReferenceBackend):
    info = INFO
{body}
"""


@dataclass(frozen=True)
class Run:
    """What a run of the suite left."""

    code: int
    output: str
    report: dict[str, Any] | None

    @property
    def verdicts(self) -> dict[str, str]:
        """Case id to verdict."""
        assert self.report is not None, self.output
        return {case["id"]: case["verdict"] for case in self.report["cases"]}

    def reason(self, case_id: str) -> str:
        """Of one case."""
        assert self.report is not None, self.output
        return str(next(case["reason"] for case in self.report["cases"] if case["id"] == case_id))

    @property
    def summary(self) -> str:
        """The suite's last line."""
        return next(line for line in self.output.splitlines() if line.startswith("engram conformance "))


def install(folder: Path, body: str = "", info: str = "", expectations: str = "") -> Path:
    """Put a backend named ``fake`` into ``folder``: the reference with ``body`` in its class."""
    package, metadata = folder / "fake_engram", folder / "fake_engram-0.3.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(_PLUGIN.format(info=info), encoding="utf-8")
    lines = "\n".join(f"    {line}" for line in (body or "pass").splitlines())
    (package / "backend.py").write_text(_BACKEND.format(body=lines), encoding="utf-8")
    if expectations:
        (package / "expectations.toml").write_text(expectations, encoding="utf-8")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-engram\nVersion: 0.3\n", encoding="utf-8")
    entry = "[engram_core.backends]\nfake = fake_engram.plugin\n"
    (metadata / "entry_points.txt").write_text(entry, encoding="utf-8")
    return folder


def environment(*folders: Path) -> dict[str, str]:
    """Of a child that finds the project wherever it lies (checkout or wheel), and ``folders``."""
    homes = [
        Path(module.__file__ or "").parent.parent for module in (engram_core, engram_reference, engram_conformance)
    ]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ENGRAM_", "PYTEST_"))}
    paths = [*map(str, folders), *map(str, homes), os.environ.get("PYTHONPATH", "")]
    return kept | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "OMP_NUM_THREADS": "1"}


def plugin_option() -> list[str]:
    """By its entry point where the distribution is installed; else as a module."""
    from engram_conformance.runner import _plugin

    return _plugin()


def run(cwd: Path, *options: str, folder: Path | None = None, plugin: bool = True) -> Run:
    """``pytest --pyargs engram_conformance`` in ``cwd``."""
    cwd.mkdir(parents=True, exist_ok=True)
    path = cwd.parent / f"{cwd.name}.json"
    command = [sys.executable, "-m", "pytest", "--pyargs", "engram_conformance", "-q", "-p", "no:cacheprovider"]
    command += [*(plugin_option() if plugin else []), f"--engram-report={path}", *options]
    folders = [folder] if folder is not None else []
    done = subprocess.run(
        command, cwd=cwd, env=environment(*folders), capture_output=True, text=True, timeout=280, check=False
    )
    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    return Run(done.returncode, done.stdout + done.stderr, report)
