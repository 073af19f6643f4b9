"""The conformance suite catches every mutant of the reference, with the cases that the table names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engram_conformance.cases import ALL as CASES

from engram_core import get_backend
from mutants.catalogue import ALL, AREAS
from mutants.model import Mutant, StaleMutant, applied
from mutants.runner import CONTROL, runs_here

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "mutants.md"
_LEAST = 40


def _judged(area: str, folder: Path) -> dict[str, dict[str, str]]:
    """Verdicts of one area's mutants, from a process of its own: pytest inside pytest would share its state."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("ENGRAM_", "PYTEST_"))}
    # After this checkout's own folders, where they are on the path: a worktree has no installation of its own.
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "mutants", "--area", area, "--json", str(folder / "verdicts.json")]
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-1000:]}{done.stderr[-3000:]}"
    loaded = json.loads((folder / "verdicts.json").read_text(encoding="utf-8"))
    return {outcome["mutant"]: outcome["verdicts"] for outcome in loaded}


@pytest.mark.slow
@pytest.mark.parametrize("area", AREAS)
def test_every_mutant_is_caught(area: str, tmp_path: Path) -> None:
    verdicts = _judged(area, tmp_path)
    control = verdicts.pop(CONTROL)
    # One case is there for what the reference does not declare: it must verify the refusal.
    assert set(control.values()) <= {"passed", "refused"}, control
    mutants = {mutant.name: mutant for mutant in ALL if mutant.area == area}
    assert verdicts.keys() == mutants.keys()
    missed = {
        name: [case for case in mutants[name].cases if found.get(case) != "failed"] for name, found in verdicts.items()
    }
    assert not {name: cases for name, cases in missed.items() if cases}
    assert {case for mutant in mutants.values() for case in mutant.cases} == set(control)


def test_the_table_is_sound() -> None:
    known = {case.id: case.area for case in CASES}
    assert len({mutant.name for mutant in ALL}) == len(ALL) >= _LEAST
    for mutant in ALL:
        assert mutant.cases, f"{mutant.name} names no case"
        assert set(mutant.cases) <= known.keys(), f"{mutant.name}: {set(mutant.cases) - known.keys()} are no cases"
        assert all(map(runs_here, mutant.cases)), f"{mutant.name}: one of {mutant.cases} starts processes"
        assert mutant.says
        assert not mutant.says.endswith(".")
    assert {mutant.area for mutant in ALL} >= {area for area in known.values() if area != "graphs"}


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_is_taken_back(mutant: Mutant) -> None:
    before = mutant.target().__code__
    with applied(mutant):
        assert mutant.target().__code__ is not before
        assert mutant.target().__code__.co_name == before.co_name
    assert mutant.target().__code__ is before


def test_a_stale_mutant_is_said_to_be_one() -> None:
    function = "engram_core.formats:packed_width"
    gone = Mutant("gone", "rows", function, "", "head_dim * 7", "0", ())
    same = Mutant("same", "rows", function, "", "head_dim + head", "head_dim  +  head", ())
    lost = Mutant("lost", "rows", "engram_core.formats:no_such", "", "a", "b", ())
    with pytest.raises(StaleMutant, match="gone: 'head_dim \\* 7' is in 0 places"):
        gone.code()
    with pytest.raises(StaleMutant, match="does anyway"):
        same.code()
    with pytest.raises(StaleMutant, match="0 definitions of no_such"):
        lost.code()


def test_what_a_mutant_leaves_on_its_function_goes_with_it() -> None:
    mutant = next(mutant for mutant in ALL if mutant.name == "lifecycle-layers-kept")
    with applied(mutant):
        get_backend("reference", "cpu").prefetch([], 4)
        assert mutant.target().__dict__
    assert not mutant.target().__dict__


def test_the_document_lists_every_mutant() -> None:
    """After a change of the table: ``cd tests && python -m mutants --write ../docs/mutants.md``."""
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([^`]+)` \| .* \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == {mutant.name for mutant in ALL}
    for mutant in ALL:
        assert f"| `{mutant.name}` | {mutant.says} |" in text, f"{mutant.name}: another fault in the document"
        absent = [case for case in mutant.cases if f"`{case}`" not in rows[mutant.name]]
        assert not absent, f"{mutant.name}: the document does not say that {absent} catch it"
    assert f"{len(ALL)} single-fault mutants" in text
