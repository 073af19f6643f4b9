"""Choose a backend, and say why; or refuse, and say what every installed backend had against it.

A backend asked for by name runs or raises: nothing else is ever put in its place. Settings are read on each call, and
a change takes effect on the next: the argument, else ``with use_backend``, else ``ENGRAM_BACKEND``, else auto.
Probes run on each call too (milliseconds, once torch is imported); only the backends themselves are kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Final

from engram_core import _devices, _environ
from engram_core._choice import Decision, Request, error_report
from engram_core._choice import choose as choose_from
from engram_core._discovery import CAUGHT, cause, discover, load_target
from engram_core._report import BackendStatus, Report, State
from engram_core.errors import (
    BackendError,
    BackendLoadError,
    InvalidArgumentError,
)
from engram_core.info import Reason

if TYPE_CHECKING:
    import torch

    from engram_core.backend import EngramBackend

__all__ = [
    "BackendStatus",
    "Decision",
    "Report",
    "State",
    "backend_facts",
    "choose",
    "get_backend",
    "list_backends",
    "survey",
    "use_backend",
]

AUTO: Final = "auto"

_preferred: ContextVar[str] = ContextVar("engram_preferred_backend", default="")

# Keyed on the process too: a device opened by a parent is of no use in its forked child.
_created: dict[tuple[type, str, torch.device, bool, int], EngramBackend] = {}
_creating = threading.RLock()


def _renew_lock() -> None:
    # Another thread of the parent may have held it at the fork, and does not exist in the child.
    global _creating
    _creating = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


def get_backend(name: str | None = None, device: torch.device | str | int | None = None) -> EngramBackend:
    """The backend to run: ``name``, or what ``use_backend``, ``ENGRAM_BACKEND`` or auto choose.

    ``device``: ``None`` is this process's accelerator where the backend runs on it, else the CPU. The same backend and
    device give the same object within a process.

    Raises a :class:`~engram_core.errors.BackendError` whose message holds the table of all backends and their reasons,
    and :class:`~engram_core.errors.InvalidArgumentError` for a name or device that is none.
    """
    request = _request(name)
    return _create(request, choose_from(request, _devices.parse(device), discover(only=request.name)))


def choose(name: str | None = None, device: torch.device | str | int | None = None) -> Decision:
    """What :func:`get_backend` would create, and why, without creating it; raises as it does."""
    request = _request(name)
    return choose_from(request, _devices.parse(device), discover(only=request.name))


def list_backends() -> list[BackendStatus]:
    """Every installed backend's state on this machine, with all reasons; ``chosen`` marks what would run now."""
    return list(survey().decisions)


def survey(name: str | None = None, device: torch.device | str | int | None = None) -> Report:
    """All backends' decisions and what follows from them, as data; raises for malformed arguments only."""
    request = _request(name)
    decisions = discover()
    try:
        decision = choose_from(request, _devices.parse(device), decisions)
    except BackendError as exc:
        return Report(decisions, why=exc.message)
    return decision.report


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Inside, ``get_backend()`` without a name takes this one; ``"auto"`` overrides ENGRAM_BACKEND.

    Nests, and is seen neither by other threads nor by other tasks.
    """
    if not isinstance(name, str):
        raise InvalidArgumentError("name", repr(name), "a backend's name, or 'auto'")
    token = _preferred.set(name)
    try:
        yield
    finally:
        _preferred.reset(token)


def backend_facts(status: BackendStatus) -> dict[str, str]:
    """What a backend's probe module tells about this machine, through its optional ``facts()``; for the doctor."""
    if status.info is None:
        return {}
    try:
        facts = getattr(import_module(status.info.probe.partition(":")[0]), "facts", None)
        return {} if facts is None else {str(key): str(value) for key, value in facts().items()}
    except CAUGHT as exc:
        return {"facts": f"failed: {cause(exc)}"}


def _request(name: str | None) -> Request:
    if name is not None and not isinstance(name, str):
        raise InvalidArgumentError("name", repr(name), "a backend's name, 'auto' or None")
    levels = (
        ("argument", name or "", "backend {!r}"),
        ("use_backend", _preferred.get(), "use_backend({!r})"),
        (_environ.BACKEND, _environ.requested(), _environ.BACKEND + "={}"),
    )
    for source, value, said in levels:
        folded = _environ.fold(value)
        if folded == AUTO:
            return Request(None, AUTO, AUTO)
        if folded:
            return Request(folded, source, said.format(folded))
    return Request(None, AUTO, AUTO)


def _create(request: Request, decision: Decision) -> EngramBackend:
    from engram_core.backend import EngramBackend

    info, status = decision.info, decision.status
    said = request.said if request.name else f"auto chose {decision.name!r}, which"

    def failed(code: str, message: str, error: BaseException | None = None) -> BackendLoadError:
        fix = f"repair or upgrade {status.distribution}"
        bad = replace(status, state=State.BROKEN, reasons=(Reason(code, message, fix),), chosen=False, error=error)
        return BackendLoadError(f"{said} is broken: {message}", error_report(request, decision.report.decisions, bad))

    try:
        factory = load_target(info.factory)
    except CAUGHT as exc:
        raise failed("factory-missing", f"{cause(exc)} (loading the factory {info.factory})", exc) from exc
    if not (isinstance(factory, type) and issubclass(factory, EngramBackend)):
        raise failed("bad-factory", f"{info.factory} is {factory!r}; a subclass of engram_core.EngramBackend is needed")
    if getattr(factory, "info", None) != info:
        raise failed("bad-factory", f"{info.factory}.info is not the BackendInfo that the plugin's hook returned")
    key = (factory, decision.name, decision.device, decision.interpreted, os.getpid())
    with _creating:
        backend = _created.get(key)
        if backend is None:
            try:
                backend = factory(decision.device)
            except BackendError as exc:
                own = getattr(exc, "reasons", ()) or (Reason("factory-refused", exc.message),)
                refused = replace(status, state=State.UNAVAILABLE, reasons=tuple(own), chosen=False, interpreted=False)
                if exc.report is None:
                    exc.attach(error_report(request, decision.report.decisions, refused))
                raise
            except CAUGHT as exc:
                raise failed(
                    "factory-failed", f"{cause(exc)} (creating {info.factory} on {decision.device})", exc
                ) from exc
            _created[key] = backend
    return backend
