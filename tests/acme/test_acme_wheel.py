"""acme as a stranger would have it: its wheel and ours in a fresh environment, and the suite's verdict there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fresh import ACME, ROOT, environment, install, run, wheel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

_WHERE = """
import importlib.metadata, json, engram_core, acme_engram
from engram_core import get_backend, list_backends
entries = importlib.metadata.entry_points(group="engram_core.backends")
print(json.dumps({
    "entries": sorted(f"{entry.name} {entry.dist.name}" for entry in entries),
    "files": [engram_core.__file__, acme_engram.__file__],
    "states": {status.name: str(status.state) for status in list_backends()},
    "auto": get_backend(device="cpu").info.name,
    "requires": importlib.metadata.requires("acme-engram"),
}))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a fresh environment with both wheels."""
    root = tmp_path_factory.mktemp("fresh")
    found = environment(root / "env")
    for number, project in enumerate((ROOT, ACME)):
        folder = root / f"wheel{number}"
        folder.mkdir()
        install(found, wheel(project, folder))
    return found


def test_both_distributions_are_found_and_neither_is_the_checkout(python: Path) -> None:
    found = json.loads(run(python, "-W", "error", "-c", _WHERE, cwd=python.parent).stdout)
    ours = [f"{name} engram-core" for name in ("nvidia", "reference", "rocm")]
    assert found["entries"] == ["acme acme-engram", *ours]
    assert all(python.parents[1] in Path(file).parents for file in found["files"])
    assert found["states"]["acme"] == found["states"]["reference"] == "available"
    assert found["auto"] == "acme"  # of higher priority than the reference
    assert not [need for need in found["requires"] if need.startswith("engram")]  # that name is another project's


def test_the_suite_passes_acme_and_verifies_its_refusals(python: Path, tmp_path: Path) -> None:
    done = run(
        *(python, "-W", "error", "-m", "pytest", "--pyargs", "engram_conformance", "-p", "no:cacheprovider", "-q"),
        *("--engram-backend=acme", "--engram-report=acme.json"),
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "acme.json").read_text(encoding="utf-8"))
    verdicts: dict[str, list[str]] = {}
    for case in report["cases"]:
        verdicts.setdefault(case["verdict"], []).append(case["id"])
    assert (report["backend"], report["distribution"]) == ("acme", "acme-engram")
    assert set(verdicts) <= {"passed", "refused", "not-run"}, {v: verdicts[v] for v in verdicts if v != "passed"}
    core = {case["verdict"] for case in report["cases"] if case["core"]}
    assert core <= {"passed", "not-run"}
    assert len(verdicts["passed"]) > 100
    assert len(verdicts["refused"]) >= 4  # shared tables, three kinds of ranks, hot rows
    assert f"{len(verdicts['refused'])} refusals verified" in done.stdout
