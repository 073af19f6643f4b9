"""docs/backend-authors.md: shows every file as it is, and its list of names is the interface and holds."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from fresh import ACME, ROOT
from guide import GUIDE, files, filled, promised, shown
from interface import SNAPSHOT, current, differences

from engram_core.info import API_VERSION

TEXT = GUIDE.read_text(encoding="utf-8")
NAMES = promised(TEXT)
BACKENDS = sorted(path for path in (ROOT / "backends").iterdir() if path.is_dir())

# The project's own backends are released with the core and share its private helpers; nobody else's may.
HOUSE = {"_devices", "_environ", "_toolchain"}


def test_every_file_is_shown_whole() -> None:
    assert shown(TEXT) == files(), "run: python tests/acme/guide.py"
    assert filled(TEXT) == TEXT


def test_every_promised_name_exists() -> None:
    assert len(NAMES) > 10
    for module, names in NAMES.items():
        if module.startswith("engram_core.kernels") and find_spec("triton") is None:
            continue
        loaded = import_module(module)
        assert names, f"{module}: no names"
        assert not [name for name in names if not hasattr(loaded, name)], module
        assert not [name for name in (*module.split("."), *names) if name.startswith("_")], module


@pytest.mark.parametrize("folder", [ACME, *BACKENDS], ids=lambda path: path.name)
def test_backends_import_promised_names_alone(folder: Path) -> None:
    for path in sorted(folder.rglob("*.py")):
        for module, name in imports(path):
            fine = name in NAMES.get(module, ()) or (folder is not ACME and _house(module, name))
            assert fine, (
                f"{path.relative_to(ROOT)} imports {name} of {module}; docs/backend-authors.md does not list it"
            )


def _house(module: str, name: str) -> bool:
    return (module == "engram_core" and name in HOUSE) or (module.startswith("engram_core.kernels.") and name[0] == "_")


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import of engram_core in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "engram_core":
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "engram_core")


def test_the_public_interface_is_what_it_was() -> None:
    before, now = json.loads(SNAPSHOT.read_text(encoding="utf-8")), current()
    if find_spec("triton") is None:
        before["names"] = {name: it for name, it in before["names"].items() if ".kernels." not in name}
    added, broken = differences(before["names"], now["names"])
    major, minor = API_VERSION
    need = f"{major + 1}.0" if broken else f"{major}.{minor + 1}"
    if added or broken:
        lines = "\n".join([*broken, *added])
        pytest.fail(
            f"the interface that backends are written against has changed:\n{lines}\n"
            f"API_VERSION is {major}.{minor}; once released, this change needs {need} (changed or removed: a major; "
            f"only added: a minor).\nSet it in engram_core/info.py, then run: python tests/acme/interface.py"
        )
    assert before["api_version"] == list(API_VERSION), "run: python tests/acme/interface.py"


def test_a_change_is_told_apart_from_an_addition() -> None:
    before = {"m.f": "(a)", "m.C": {"x": ": int", "y": ": int"}}
    assert differences(before, before) == ([], [])
    assert differences(before, {**before, "m.g": "()"}) == (["+ m.g  ()"], [])
    added, broken = differences(before, {"m.f": "(a, b=1)", "m.C": {"x": ": int", "z": ": int"}})
    assert added == ["+ m.C.z  : int"]
    assert broken == ["! m.f  (a)  ->  (a, b=1)", "- m.C.y  : int"]
