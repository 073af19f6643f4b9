"""All mutants, by area."""

from __future__ import annotations

from mutants import gate, hashing, ranks, refusals, rows, steps, wkv
from mutants.model import Mutant

ALL: tuple[Mutant, ...] = tuple(
    mutant for table in (hashing, rows, wkv, gate, steps, ranks, refusals) for mutant in table.MUTANTS
)
AREAS: tuple[str, ...] = tuple(dict.fromkeys(mutant.area for mutant in ALL))
