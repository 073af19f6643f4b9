"""The five verdicts, and what one case left behind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What became of a case."""

    PASSED = "passed"
    FAILED = "failed"
    REFUSED = "refused"  # as declared, and verified: a reason, an error of the family, no numbers
    EXPECTED_FAILURE = "expected-failure"
    NOT_RUN = "not-run"


@dataclass
class Record:
    """Filled while a case runs. ``worst``: largest error over its tolerance; ``equal``: least share of equal bits."""

    worst: float | None = None
    equal: float | None = None
    checks: int = 0
    refusal: str = ""

    def add(self, worst: float, equal: float | None) -> None:
        """One more comparison."""
        self.checks += 1
        self.worst = worst if self.worst is None else max(self.worst, worst)
        if equal is not None:
            self.equal = equal if self.equal is None else min(self.equal, equal)


class RefusedAsDeclared(Exception):  # noqa: N818 (an outcome, not an error)
    """Ends a case whose problem the backend refuses, as it says it does; carries the reasons."""


def number_to_json(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return None if value is None else (float(value) if math.isfinite(value) else "inf")
