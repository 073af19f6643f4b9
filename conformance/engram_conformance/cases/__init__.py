"""All cases, as data."""

from engram_conformance.cases import ahead, gate, graphs, lifecycle, parallel, refusals, rows, step, streams, wkv
from engram_conformance.cases import hash as hashing
from engram_conformance.cases.model import Case, Size, Tolerance, unique

_AREAS = (hashing, rows, wkv, gate, step, ahead, graphs, streams, refusals, parallel, lifecycle)

ALL: tuple[Case, ...] = unique(case for area in _AREAS for case in area.CASES)
"""Every case, by area."""

__all__ = ["ALL", "Case", "Size", "Tolerance"]
