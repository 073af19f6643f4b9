"""All mutants, by area, and the backend and device on which an area's run."""

from __future__ import annotations

from mutants import gate, hashing, hot, ranks, refusals, rows, steps, streams, wkv
from mutants.model import Mutant

REFERENCE: tuple[Mutant, ...] = tuple(
    mutant for table in (hashing, rows, wkv, gate, steps, ranks, refusals) for mutant in table.MUTANTS
)
INTERPRETED: tuple[Mutant, ...] = hot.MUTANTS
ON_A_GPU: tuple[Mutant, ...] = streams.MUTANTS
ALL: tuple[Mutant, ...] = REFERENCE + INTERPRETED + ON_A_GPU
AREAS: tuple[str, ...] = tuple(dict.fromkeys(mutant.area for mutant in ALL))
"""The last two are run by :func:`backend_of` that area alone."""


def backend_of(area: str | None) -> tuple[str, str]:
    """Name and device of the backend whose faults an area's are."""
    return {"hot": ("nvidia", "cpu"), "graphs": ("nvidia", "cuda")}.get(area or "", ("reference", "cpu"))
