"""One family of exceptions: every error that this package raises on purpose is an :class:`EngramError`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engram_core.info import Reason
    from engram_core.registry import Report


class EngramError(Exception):
    """Base of the family."""


class InvalidArgumentError(EngramError, ValueError):
    """A value from the caller is wrong; says which argument, what came and what is needed.

    Raised before anything is launched or written.
    """

    def __init__(self, argument: str, got: object, need: str) -> None:
        super().__init__(f"{argument}: got {got}; need {need}")
        self.argument = argument
        self.got = got
        self.need = need

    def __reduce__(self) -> tuple[object, ...]:
        # Workers send exceptions to their parent; what came may be something that can't be sent.
        return type(self), (self.argument, str(self.got), self.need)


class ConfigError(EngramError, ValueError):
    """A model's configuration lacks a key, or holds a value of the wrong type or range."""


class TokenMapError(EngramError, ValueError):
    """A token map does not fit the configuration, or its file is damaged."""


class TableError(EngramError, ValueError):
    """A table's size, file or placement does not fit what was asked for."""


class CheckpointError(EngramError, ValueError):
    """A checkpoint's file is missing or damaged, or holds other tensors than its configuration asks for."""


class StepError(EngramError, RuntimeError):
    """A step is used out of order: not started, finished, or overtaken by a later one."""


class CollectiveError(EngramError, RuntimeError):
    """Ranks disagree, or a process group is not what it was at construction."""


class EngramWarning(UserWarning):
    """Something in the surroundings is likely a mistake, and the work goes on: a misspelt ``ENGRAM_*`` variable."""


class BackendError(EngramError, RuntimeError):
    """Base of everything that finding and choosing a backend raises; ``report`` holds every backend's decision."""

    def __init__(self, message: str, report: Report | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.report: Report | None = None
        if report is not None:
            self.attach(report)

    def __reduce__(self) -> tuple[object, ...]:
        # Workers send exceptions to their parent; the text goes, the report with its tracebacks stays.
        return type(self), (str(self),)

    def attach(self, report: Report) -> None:
        """Add the table of decisions: a factory that refuses does not know the other backends, the registry does."""
        self.report = report
        self.args = (f"{self.args[0]}\n{report.table()}",)


class UnknownBackendError(BackendError):
    """No backend of that name is installed."""


class BackendUnavailableError(BackendError):
    """The backend exists, and this machine can't run it; ``reasons`` says all that stands against it.

    A factory may raise it too, where a device shows its limits only once it is opened.
    """

    def __init__(self, message: str, report: Report | None = None, reasons: tuple[Reason, ...] = ()) -> None:
        self.reasons = reasons
        super().__init__(message, report)


class BackendLoadError(BackendError):
    """The backend's own code failed; the cause is chained."""


class BackendIncompatibleError(BackendError):
    """The backend was written for another version of the interface."""


class BackendConflictError(BackendError):
    """Two distributions claim one name, or two backends of equal priority fit."""


class UnsupportedConfigError(BackendError):
    """The backend runs here, and not this problem; ``reasons`` says all that stands against it."""

    def __init__(self, message: str, reasons: tuple[Reason, ...] = (), report: Report | None = None) -> None:
        lines = "".join(f"\n  {reason.code}: {reason}" for reason in reasons)
        super().__init__(message + lines, report)
        self.reasons = reasons
