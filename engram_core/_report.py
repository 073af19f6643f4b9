"""What discovery found, as frozen data, and the one table in which every error and the command line show it."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from engram_core.info import BackendInfo, Reason

WIDTH: Final = 120
_LEAST_MESSAGE = 40


class State(StrEnum):
    """What became of one backend."""

    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    BROKEN = "broken"
    INCOMPATIBLE = "incompatible"
    CONFLICT = "conflict"
    BLOCKED = "blocked"
    NOT_LOADED = "not-loaded"


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """The decision about one installed backend.

    ``info`` is ``None`` where the plugin could not be asked. ``interpreted``: it would run in Triton's interpreter.
    ``chosen``: the one that the present settings choose. ``error``: what its code raised, where ``state`` is broken.
    """

    name: str
    state: State
    distribution: str
    version: str
    reasons: tuple[Reason, ...] = ()
    info: BackendInfo | None = None
    chosen: bool = False
    interpreted: bool = False
    error: BaseException | None = field(default=None, repr=False, compare=False)

    @property
    def origin(self) -> str:
        return f"{self.distribution} {self.version}".rstrip()

    def to_json(self) -> dict[str, Any]:
        info = self.info
        return {
            "name": self.name,
            "state": str(self.state),
            "distribution": self.distribution,
            "version": self.version,
            "chosen": self.chosen,
            "interpreted": self.interpreted,
            "reasons": [{"code": r.code, "message": r.message, "fix": r.fix} for r in self.reasons],
            "info": None
            if info is None
            else {
                "summary": info.summary,
                "vendor": info.vendor,
                "api_version": list(info.api_version),
                "device_types": list(info.device_types),
                "priority": info.priority,
                "capabilities": sorted(str(c) for c in info.capabilities),
            },
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Every installed backend's decision, and what follows from them.

    ``chosen`` and ``why``: the backend that the present settings choose and the reason, or ``None`` and what stands
    against every choice. ``hint``: the last line of the table in an error.
    """

    decisions: tuple[BackendStatus, ...]
    chosen: str | None = None
    why: str = ""
    hint: str = ""

    def table(self, width: int = WIDTH) -> str:
        """One row a backend: name, state, distribution, and all reasons with their fixes, wrapped to ``width``."""
        rows = [(f"{'* ' if d.chosen else '  '}{d.name}", str(d.state), d.origin) for d in self.decisions]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        indent = sum(widths) + 6
        room = max(width - indent, _LEAST_MESSAGE)
        lines = []
        for row, decision in zip(rows, self.decisions, strict=True):
            head = "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
            notes = _notes(decision, room) or [""]
            lines.append(f"{head}  {notes[0]}".rstrip())
            lines.extend(f"{'':{indent}}{note}" for note in notes[1:])
        if not rows:
            lines.append("  (no backend is installed)")
        return "\n".join([*lines, self.hint] if self.hint else lines)

    def to_json(self) -> dict[str, Any]:
        return {"chosen": self.chosen, "why": self.why, "backends": [d.to_json() for d in self.decisions]}


def _notes(decision: BackendStatus, room: int) -> list[str]:
    lines: list[str] = []
    if decision.interpreted:
        lines += _wrap("interpreted (TRITON_INTERPRET is set): by name only, also on a CPU", room)
    for reason in decision.reasons:
        lines += _wrap(reason.message, room)
        if reason.fix:
            lines += _wrap(f"fix: {reason.fix}", room, hang=5)
    return lines


def _wrap(text: str, room: int, hang: int = 0) -> list[str]:
    # Commands and paths are there to be copied: they are never broken inside a word.
    return textwrap.wrap(
        " ".join(text.split()), room, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False
    )
