"""This checkout as an installed one, where it is not: its packages and entry points, found as real ones are."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
_PACKAGES = (ROOT, *(ROOT / "backends" / name for name in ("reference", "nvidia", "rocm")), ROOT / "conformance")


def importable() -> None:
    """Put the packages on this process's path, where the project is not installed."""
    if find_spec("engram_core") is None:
        sys.path[:0] = map(str, _PACKAGES)


def search_path(folder: Path) -> str:
    """``PYTHONPATH`` of a process that finds the packages and, in ``folder``, the backends' entry points."""
    added: list[str] = []
    if not any(entry.name == "reference" for entry in entry_points(group="engram_core.backends")):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        lines = [f"{name} = {value}" for name, value in project["entry-points"]["engram_core.backends"].items()]
        info = folder / "engram_core-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engram-core\nVersion: 0\n")
        (info / "entry_points.txt").write_text("\n".join(["[engram_core.backends]", *lines, ""]))
        added = [str(folder), *map(str, _PACKAGES)]
    return os.pathsep.join([str(TESTS), *added, *filter(None, [os.environ.get("PYTHONPATH")])])
