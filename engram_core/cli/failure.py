"""Failures that a person can mend: bad usage and bad input, in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engram_core.errors import BackendError, EngramError


class CliError(Exception):
    """Ends the command with ``code`` and this line; it names the file, the key and the value."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


@contextmanager
def bad_input(where: str = "") -> Iterator[None]:
    """What the package refuses inside comes from the user's input; ``where``: the file or option to name."""
    try:
        yield
    except BackendError:
        raise
    except EngramError as error:
        raise CliError(f"{where}: {error}" if where else str(error)) from error
