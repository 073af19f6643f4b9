"""All cases, as data."""

from engram_conformance.cases import hash as _hash
from engram_conformance.cases import rows as _rows
from engram_conformance.cases import wkv as _wkv
from engram_conformance.cases.model import Case, Size, Tolerance, unique

ALL: tuple[Case, ...] = unique((*_hash.CASES, *_rows.CASES, *_wkv.CASES))

__all__ = ["ALL", "Case", "Size", "Tolerance"]
