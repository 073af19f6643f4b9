"""What a case is: data. The test functions in ``suite/`` execute cases; nothing about a backend is written here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from engram_core.info import Capability


class Tolerance(StrEnum):
    """How a result is judged. It belongs to the case: no backend can widen it."""

    EXACT = "bit-equal"
    WKV = "ulp/2 + 2**-16 * sum|a*w| + K * 2**-126"
    GATE = "the gate's interval"
    LAYER = "the gate's interval over all kv that the WKV's tolerance allows"
    REFUSAL = "an error of the package's family, nothing written"


class Size(StrEnum):
    """What a case costs. Triton's interpreter gets the small ones unless asked; ``full`` is everything."""

    SMALL = "small"
    REAL = "real"
    FULL = "full"

    @property
    def rank(self) -> int:
        """Order: small, real, full."""
        return list(Size).index(self)


@dataclass(frozen=True)
class Case:
    """One thing that a backend must do.

    ``id``: unique, stable, what ``-k``, reports and ``expectations.toml`` name. ``area`` and ``check``: executed by
    ``test_<check>`` of ``suite/test_<area>.py``. ``says``: the rule in a sentence. ``geometry``: a name of
    :mod:`engram_conformance.cases.geometry`. ``params``: the rest of its data. ``needs``: capabilities; where one is
    not declared, the refusal is verified instead. ``since``: version of the interface from which it is asked.
    ``core``: it can be neither declared away nor expected to fail.
    """

    id: str
    area: str
    check: str
    says: str
    geometry: str = "small"
    params: Mapping[str, Any] = field(default_factory=dict)
    tolerance: Tolerance = Tolerance.EXACT
    needs: frozenset[Capability] = frozenset()
    since: tuple[int, int] = (1, 0)
    core: bool = True
    size: Size = Size.SMALL

    def __post_init__(self) -> None:
        object.__setattr__(self, "params", MappingProxyType(dict(self.params)))
        object.__setattr__(self, "needs", frozenset(self.needs))

    @property
    def seed(self) -> int:
        """Of the case's random data: stable, and another one for each case."""
        return zlib.crc32(self.id.encode())

    @property
    def capability(self) -> str:
        """The row of the report's matrix: the capability asked for, else the area."""
        return "+".join(sorted(self.needs)) if self.needs else self.area


def unique(cases: Iterable[Case]) -> tuple[Case, ...]:
    """``cases``, after checking that no id is used twice."""
    result = tuple(cases)
    seen: set[str] = set()
    for case in result:
        if case.id in seen:
            raise ValueError(f"two cases are named {case.id!r}")
        seen.add(case.id)
    return result
