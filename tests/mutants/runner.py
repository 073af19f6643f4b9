"""Runs the conformance suite on mutants: one process, one collection, the suite's own hooks and verdicts.

Cases that start processes of their own are left out: a fault lives in this process only.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol
from engram_conformance.cases import ALL

from mutants.model import Mutant, applied

OWN_PROCESSES = ("parallel-processes*", "lifecycle-after-fork")
CONTROL = "(none)"
# One case is there for what the reference does not declare: it must verify the refusal.
_RIGHT = ("passed", "refused")


@dataclass
class Outcome:
    """What the suite said of one backend: verdict of every case that ran. ``note``: what befell the process."""

    mutant: str
    verdicts: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def caught(self) -> list[str]:
        """The cases that failed."""
        return [case for case, verdict in self.verdicts.items() if verdict == "failed"]


@dataclass
class Run:
    """Outcomes, the control's among them, and ``facts`` of where they fell: device, versions, date."""

    facts: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Run:
        """What :meth:`write` wrote."""
        found = json.loads(path.read_text(encoding="utf-8"))
        return cls(found["facts"], [Outcome(**outcome) for outcome in found["outcomes"]])

    def write(self, path: Path) -> None:
        """As JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    def add(self, other: Run) -> None:
        """Take another process's outcomes; of the controls a failure outweighs the rest."""
        self.facts |= other.facts
        for outcome in other.outcomes:
            held = next((o for o in self.outcomes if o.mutant == outcome.mutant == CONTROL), None)
            if held is None:
                self.outcomes.append(outcome)
                continue
            for case, verdict in outcome.verdicts.items():
                if held.verdicts.get(case) in (None, *_RIGHT):
                    held.verdicts[case] = verdict
            held.note = held.note or outcome.note

    def faults(self, mutants: Sequence[Mutant]) -> list[str]:
        """All that is not as it should be: the control passes, and each mutant fails all the cases that it names."""
        found = {outcome.mutant: outcome for outcome in self.outcomes}
        control = found.get(CONTROL, Outcome(CONTROL, note="did not run"))
        named = {case for mutant in mutants for case in mutant.cases}
        said = [f"without a fault: {control.note}"] if control.note else []
        for case in sorted(named | control.verdicts.keys()):
            verdict = control.verdicts.get(case, "not run")
            if verdict == "failed" or (case in named and verdict not in _RIGHT):
                said.append(f"without a fault: {case} {verdict}")
        for mutant in mutants:
            verdicts = found.get(mutant.name, Outcome(mutant.name)).verdicts
            if missed := [case for case in mutant.cases if verdicts.get(case) != "failed"]:
                said.append(f"{mutant.name} passes {', '.join(missed)}")
        return said


def named_cases(mutant: Mutant) -> frozenset[str]:
    """Those that the table names for a mutant."""
    return frozenset(mutant.cases)


def whole_areas(mutant: Mutant) -> frozenset[str]:
    """All cases of the mutant's area, and of those where the table names a case."""
    areas = {mutant.area} | {case.area for case in ALL if case.id in mutant.cases}
    return frozenset(case.id for case in ALL if case.area in areas)


def runs_here(case: str) -> bool:
    """Whether a case stays in one process."""
    return not any(fnmatch.fnmatchcase(case, pattern) for pattern in OWN_PROCESSES)


def run(
    mutants: Iterable[Mutant],
    cases: Callable[[Mutant], frozenset[str]] = named_cases,
    told: Callable[[Outcome], None] = lambda outcome: None,
    backend: str = "reference",
    device: str = "cpu",
    again: bool = False,
) -> list[Outcome]:
    """The control, on all cases that some mutant is given, then each mutant on its ``cases``.

    For a process of its own: pytest is started in it. ``told`` hears of each outcome as it falls. ``again``: after each
    mutant its cases are run without it; where they fail then, this process ends there, and the outcome says so.
    """
    chosen = list(mutants)
    referee = _Referee(chosen, cases, told, again)
    options = ["--pyargs", "engram_conformance", f"--engram-backend={backend}", f"--engram-device={device}"]
    options.append("--engram-size=small")
    if not any(entry.name == "engram_conformance" for entry in entry_points(group="pytest11")):
        options += ["-p", "engram_conformance.plugin"]
    with tempfile.TemporaryDirectory() as folder:
        apart = ["-c", os.devnull, "--rootdir", folder, "--basetemp", f"{folder}/tmp", "-p", "no:cacheprovider", "-q"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            pytest.main([*options, *apart], plugins=[referee])
    if len(referee.outcomes) != len(chosen) + 1 and not (referee.outcomes and referee.outcomes[-1].note):
        raise AssertionError(f"the suite did not run:\n{said.getvalue()[-3000:]}")
    return referee.outcomes


class _Referee:
    """Takes the place of pytest's loop: the same items, once for each mutant."""

    def __init__(
        self,
        mutants: list[Mutant],
        cases: Callable[[Mutant], frozenset[str]],
        told: Callable[[Outcome], None],
        again: bool,
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._told = told
        self._again = again
        given = [(mutant, cases(mutant)) for mutant in mutants]
        self._plan: list[tuple[Mutant | None, frozenset[str]]] = [(None, frozenset().union(*(c for _, c in given)))]
        self._plan += given

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {_case_id(item): item for item in session.items}
        for mutant, wanted in self._plan:
            chosen = [item for case, item in items.items() if case in wanted and runs_here(case)]
            outcome = Outcome(CONTROL if mutant is None else mutant.name)
            with applied(mutant):
                _judge(chosen, outcome)
            if self._again and mutant is not None:
                after = Outcome(CONTROL)
                _judge(chosen, after)
                if wrong := [case for case, verdict in after.verdicts.items() if verdict not in _RIGHT]:
                    outcome.note = f"left a process in which {', '.join(wrong)} failed without it"
            self.outcomes.append(outcome)
            self._told(outcome)
            if outcome.note:
                break
        return True


def _case_id(item: pytest.Item) -> str:
    call: Any = getattr(item, "callspec", None)
    return "" if call is None or "case" not in call.params else str(call.params["case"].id)


def _judge(items: Sequence[pytest.Item], outcome: Outcome) -> None:
    for item, following in zip(items, [*items[1:], None], strict=True):
        for report in runtestprotocol(item, log=False, nextitem=following):
            for name, found in report.user_properties:
                if name == "engram-conformance" and outcome.verdicts.get(found["id"]) != "failed":
                    outcome.verdicts[found["id"]] = found["verdict"]
        _settle()


def _settle() -> None:
    """What a failed case left on its way may write into memory that it gave back: the next case waits for that."""
    with contextlib.suppress(RuntimeError):  # where the fault left a device that answers no more, the next case tells
        if torch.cuda.is_available():
            torch.cuda.synchronize()
