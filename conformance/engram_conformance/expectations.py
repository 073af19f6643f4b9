"""A backend's known failures: ``expectations.toml`` beside its plugin module. Strict, and never for a core case.

::

    version = 1

    [[expected_failure]]
    case = "rows-head-dim-96"
    reason = "look-ups read 16 bytes at a time; https://example.org/issues/7"
    interpreted = true        # optional: only in Triton's interpreter
    device_type = "cuda"      # optional: only on this type of device
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engram_conformance.cases.model import Case

FILE = "expectations.toml"
_KEYS = {"case", "reason", "interpreted", "device_type"}


class ExpectationsError(ValueError):
    """The file is malformed, or names what can't be expected to fail."""


def find(name: str) -> Path | None:
    """The backend's file, beside the module that its entry point names; None where it has none."""
    for entry in entry_points(group="engram_core.backends", name=name):
        spec = find_spec(entry.module)
        if spec is not None and spec.origin is not None:
            path = Path(spec.origin).parent / FILE
            return path if path.is_file() else None
    return None


def read(path: Path | None, cases: Mapping[str, Case], *, interpreted: bool, device_type: str) -> dict[str, str]:
    """Case id to reason, of the failures expected in this run. Raises :class:`ExpectationsError`."""
    if path is None:
        return {}
    try:
        loaded = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ExpectationsError(f"{path}: {error}") from None
    if loaded.get("version") != 1 or set(loaded) - {"version", "expected_failure"}:
        raise ExpectationsError(f"{path}: has {sorted(loaded)}; version = 1 and [[expected_failure]] tables are needed")
    expected: dict[str, str] = {}
    for number, entry in enumerate(loaded.get("expected_failure", []), 1):
        case_id = _checked(f"{path}: expected_failure {number}", entry, cases)
        if (
            entry.get("interpreted", interpreted) == interpreted
            and entry.get("device_type", device_type) == device_type
        ):
            expected[case_id] = entry["reason"]
    return expected


def _checked(where: str, entry: Any, cases: Mapping[str, Case]) -> str:
    if not isinstance(entry, dict) or set(entry) - _KEYS:
        raise ExpectationsError(f"{where}: {entry!r}; a table with the keys {sorted(_KEYS)} is needed")
    for key, kind in (("case", str), ("reason", str)):
        if not isinstance(entry.get(key), kind) or not entry[key].strip():
            raise ExpectationsError(f"{where}: {key} is {entry.get(key)!r}; a text is needed")
    case = cases.get(entry["case"])
    if case is None:
        raise ExpectationsError(f"{where}: no case is named {entry['case']!r}; ids are exact, wildcards are none")
    if case.core:
        raise ExpectationsError(f"{where}: {case.id} is a core case; it can't be expected to fail")
    return case.id
