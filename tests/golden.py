"""The golden vectors that the conformance suite ships (computed by other engines' code)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any


def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((files("engram_conformance") / "golden" / name).read_text(encoding="utf-8"))
    return loaded


TINY = _load("hash_tiny.json")
REAL = _load("hash_deepseek_v41.json")
