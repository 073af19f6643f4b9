"""The environment variables of this package: the one list of them, and every read of them.

They are read when a backend is chosen, never at import, so that a program can still set them after importing us.
"""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Iterable
from typing import Final

from engram_core.errors import EngramWarning

BACKEND: Final = "ENGRAM_BACKEND"
DISABLE: Final = "ENGRAM_DISABLE_BACKENDS"

VARIABLES: Final[dict[str, str]] = {
    BACKEND: "The backend to run: a name, or 'auto'. Empty: unset.",
    DISABLE: "Names of backends, separated by commas, that are neither imported nor chosen.",
}
"""Every variable that starts with ENGRAM_ and means something; any other one is warned about as a likely typo."""

_PREFIX: Final = "ENGRAM_"
INTERPRET: Final = "TRITON_INTERPRET"

_warned: set[str] = set()


def requested() -> str:
    """The value of ENGRAM_BACKEND, as it stands; empty where unset."""
    return os.environ.get(BACKEND, "")


def blocked() -> frozenset[str]:
    """The names in ENGRAM_DISABLE_BACKENDS, stripped and case-folded."""
    names = (fold(name) for name in os.environ.get(DISABLE, "").split(","))
    return frozenset(name for name in names if name)


def interpreting() -> bool:
    """Whether Triton's interpreter is on, by the words that Triton itself accepts."""
    return os.environ.get(INTERPRET, "").strip().lower() in ("1", "true", "yes", "on", "y")


def fold(name: str) -> str:
    return name.strip().casefold()


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """``"; did you mean 'x'?"``, or nothing where no name is close."""
    close = difflib.get_close_matches(word, list(names), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def warn_unknown(backends: Iterable[str]) -> None:
    """Warn once for each ENGRAM_* variable that nobody reads, and each blocked name that no installed backend has."""
    for variable in sorted(os.environ):
        if variable.upper().startswith(_PREFIX) and variable not in VARIABLES:
            # Compared without the prefix, which they all share and which would make every two of them alike.
            close = difflib.get_close_matches(
                variable.upper()[len(_PREFIX) :], [v[len(_PREFIX) :] for v in VARIABLES], n=1
            )
            hint = f"; did you mean {_PREFIX + close[0]!r}?" if close else f"; known are {', '.join(VARIABLES)}"
            _warn_once(f"{variable} is not a variable of engram-core and has no effect{hint}")
    installed = sorted(set(backends))
    for name in sorted(blocked().difference(installed)):
        hint = did_you_mean(name, installed) or f"; installed are {', '.join(installed) or 'none'}"
        _warn_once(f"{DISABLE} blocks {name!r}, and no backend of that name is installed{hint}")


def _warn_once(message: str) -> None:
    if message not in _warned:
        warnings.warn(message, EngramWarning, stacklevel=4)
        # Only now: where warnings are errors, every call must fail alike.
        _warned.add(message)
