"""The conformance suite catches every mutant of the reference, with the cases that the table names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from engram_conformance.cases import ALL as CASES

from engram_core import get_backend
from mutants import document
from mutants.catalogue import ALL, AREAS, ON_A_GPU, REFERENCE
from mutants.model import Mutant, StaleMutant, applied
from mutants.order import CHECKED
from mutants.runner import CONTROL, Outcome, Run, runs_here

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
    return {outcome.mutant: outcome.verdicts for outcome in Run.read(folder / "verdicts.json").outcomes}


@pytest.mark.slow
@pytest.mark.parametrize("area", [area for area in AREAS if area != ON_A_GPU[0].area])
def test_every_mutant_is_caught(area: str, tmp_path: Path) -> None:
    if area == "hot":
        pytest.importorskip("triton", reason="Triton is not installed")
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
    assert {mutant.area for mutant in ALL} >= set(known.values()) - {"streams"}
    assert {known[case] for mutant in ON_A_GPU for case in mutant.cases} == {"graphs", "streams"}


EVERY = [*ALL, *(mutant for mutant, _ in CHECKED)]


@pytest.mark.parametrize("mutant", EVERY, ids=lambda mutant: mutant.name)
def test_a_mutant_applies_and_is_taken_back(mutant: Mutant) -> None:
    if mutant.function.startswith("engram_core.gpu."):
        pytest.importorskip("triton", reason="Triton is not installed")
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
    rows = dict(re.findall(r"^\| `([^`]+)` \| [^|]* \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == {mutant.name for mutant in EVERY}
    for mutant in ALL:
        assert f"| `{mutant.name}` | {mutant.says} |" in text, f"{mutant.name}: another fault in the document"
        absent = [case for case in mutant.cases if f"`{case}`" not in rows[mutant.name]]
        assert not absent, f"{mutant.name}: the document does not say that {absent} catch it"
    assert f"{len(REFERENCE)} single-fault mutants" in text
    assert f"{len(ON_A_GPU)} faults of the streams" in text


def test_the_document_takes_a_run_on_a_gpu(tmp_path: Path) -> None:
    heading, text = document.PARTS["graphs"], DOCUMENT.read_text(encoding="utf-8")
    control = Outcome(CONTROL, {case: "passed" for mutant in ON_A_GPU for case in mutant.cases})
    caught = [Outcome(mutant.name, dict.fromkeys(mutant.cases, "failed")) for mutant in ON_A_GPU]
    facts = {"device": "NVIDIA H1", "torch": "2.0", "date": "2026-12-01"}
    Run(facts, [control, *caught]).write(tmp_path / "run")
    written = document.put(text, heading, ON_A_GPU, Run.read(tmp_path / "run"))
    assert "Last run on 2026-12-01, on NVIDIA H1 with torch 2.0" in written
    assert "every mutant fails all of its own" in written
    assert "not run yet" not in written
    assert written.partition(heading)[0] == text.partition(heading)[0]
    assert document.put(written, heading, ON_A_GPU, None) == document.put(text, heading, ON_A_GPU, None)
    control.verdicts[ON_A_GPU[0].cases[0]] = "not-run"
    caught[1].verdicts[ON_A_GPU[1].cases[0]] = "passed"
    faults = Run({}, [control, *caught]).faults(ON_A_GPU)
    assert faults == [
        f"without a fault: {ON_A_GPU[0].cases[0]} not-run",
        f"{ON_A_GPU[1].name} passes {ON_A_GPU[1].cases[0]}",
    ]
    faulty = document.put(text, heading, ON_A_GPU, Run(facts, [control, *caught]))
    assert f"not as it should be: {'; '.join(faults)}" in faulty


@pytest.mark.parametrize(("mutant", "check"), CHECKED, ids=lambda value: getattr(value, "name", ""))
def test_a_wait_that_no_case_can_miss_is_missed_by_its_check(mutant: Mutant, check: Callable[[], None]) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    check()
    with applied(mutant), pytest.raises(AssertionError):
        check()
