"""Runs the conformance suite on mutants: one process, one collection, the suite's own hooks and verdicts.

Cases that start processes of their own are left out: a fault lives in this process only.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from engram_conformance.cases import ALL

from mutants.model import Mutant, applied

OWN_PROCESSES = ("parallel-processes*", "lifecycle-after-fork")
CONTROL = "(none)"


@dataclass
class Outcome:
    """What the suite said of one backend: verdict of every case that ran."""

    mutant: str
    verdicts: dict[str, str] = field(default_factory=dict)

    @property
    def caught(self) -> list[str]:
        """The cases that failed."""
        return [case for case, verdict in self.verdicts.items() if verdict == "failed"]


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
) -> list[Outcome]:
    """The control, on all cases that some mutant is given, then each mutant on its ``cases``.

    For a process of its own: pytest is started in it. ``told`` hears of each outcome as it falls.
    """
    chosen = list(mutants)
    referee = _Referee(chosen, cases, told)
    options = ["--pyargs", "engram_conformance", "--engram-backend=reference", "--engram-size=small"]
    with tempfile.TemporaryDirectory() as folder:
        apart = ["-c", os.devnull, "--rootdir", folder, "--basetemp", f"{folder}/tmp", "-p", "no:cacheprovider", "-q"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            pytest.main([*options, *apart], plugins=[referee])
    if len(referee.outcomes) != len(chosen) + 1:
        raise AssertionError(f"the suite did not run:\n{said.getvalue()[-3000:]}")
    return referee.outcomes


class _Referee:
    """Takes the place of pytest's loop: the same items, once for each mutant."""

    def __init__(
        self,
        mutants: list[Mutant],
        cases: Callable[[Mutant], frozenset[str]],
        told: Callable[[Outcome], None],
    ) -> None:
        self.outcomes: list[Outcome] = []
        self._told = told
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
                for item, following in zip(chosen, [*chosen[1:], None], strict=True):
                    _judge(item, following, outcome)
            self.outcomes.append(outcome)
            self._told(outcome)
        return True


def _case_id(item: pytest.Item) -> str:
    call: Any = getattr(item, "callspec", None)
    return "" if call is None or "case" not in call.params else str(call.params["case"].id)


def _judge(item: pytest.Item, following: pytest.Item | None, outcome: Outcome) -> None:
    for report in runtestprotocol(item, log=False, nextitem=following):
        for name, found in report.user_properties:
            if name == "engram-conformance" and outcome.verdicts.get(found["id"]) != "failed":
                outcome.verdicts[found["id"]] = found["verdict"]
