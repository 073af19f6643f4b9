"""The choice among judged backends: from a request, a device and the decisions to one backend, or a refusal.

Apart from :mod:`engram_core.registry`, which knows where requests come from and keeps what was created. A refusal loads
and judges every backend, however few were asked for, because its table must show what else could be run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from engram_core import _devices, _environ
from engram_core._discovery import FALLBACK, discover
from engram_core._report import BackendStatus, Report, State
from engram_core.errors import (
    BackendConflictError,
    BackendIncompatibleError,
    BackendLoadError,
    BackendUnavailableError,
    UnknownBackendError,
)
from engram_core.hookspecs import ENTRY_POINT_GROUP
from engram_core.info import BackendInfo, Reason

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Decision:
    """The backend that was chosen.

    ``source``: who chose it: "argument", "use_backend", "ENGRAM_BACKEND" or "auto". ``why``: the reason, as a sentence.
    ``device``: resolved to an index. ``interpreted``: its kernels will run in Triton's interpreter.
    """

    name: str
    source: str
    why: str
    device: torch.device
    status: BackendStatus
    report: Report

    @property
    def interpreted(self) -> bool:
        return self.status.interpreted

    @property
    def info(self) -> BackendInfo:
        assert self.status.info is not None  # only an available backend is ever chosen
        return self.status.info

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "source": self.source,
            "why": self.why,
            "device": str(self.device),
            "interpreted": self.interpreted,
            "distribution": self.status.distribution,
            "version": self.status.version,
        }


@dataclass(frozen=True, slots=True)
class Request:
    """Who asked for which backend; ``name`` is ``None`` for auto, ``said`` how a message names the request."""

    name: str | None
    source: str
    said: str


def choose(request: Request, device: torch.device | None, decisions: tuple[BackendStatus, ...]) -> Decision:
    """The one to run. Raises ``BackendError`` with the table, or ``InvalidArgumentError`` for a device not here."""
    if request.name is None:
        status, where, why = _auto(request, device, decisions)
    else:
        status, where, why = _named(request, device, decisions)
    resolved = _devices.resolve(where)
    status = replace(status, chosen=True)
    marked = tuple(status if d.name == status.name else d for d in decisions)
    report = Report(marked, chosen=status.name, why=f"{status.name} on {resolved}: {why}")
    return Decision(status.name, request.source, why, resolved, status, report)


def _named(
    request: Request, device: torch.device | None, decisions: tuple[BackendStatus, ...]
) -> tuple[BackendStatus, torch.device, str]:
    status = next((d for d in decisions if d.name == request.name), None)
    if status is None:
        _refuse_unknown(request, decisions)
    if status.state is not State.AVAILABLE:
        _refuse(request, status, decisions)
    info = status.info
    assert info is not None
    where = device if device is not None else _default_device(status, _devices.accelerator())
    if where is None:
        message = f"it runs on {', '.join(info.device_types)}, and torch sees no such device here"
        lacking = Reason("no-device", message, f"install the torch that {status.distribution} needs, and its driver")
        _refuse(request, replace(status, state=State.UNAVAILABLE, reasons=(lacking,)), decisions)
    if not _takes(info, where) and not (status.interpreted and where.type == "cpu"):
        runs_on = ", ".join(info.device_types)
        reason = Reason(
            "device-type", f"it runs on {runs_on}; the device is {where}", f"pass device={info.device_types[0]!r}"
        )
        _refuse(request, replace(status, state=State.UNAVAILABLE, reasons=(reason,)), decisions)
    by = {"argument": "the argument", "use_backend": "use_backend", _environ.BACKEND: request.said}[request.source]
    return status, where, f"asked for by {by}"


def _auto(
    request: Request, device: torch.device | None, decisions: tuple[BackendStatus, ...]
) -> tuple[BackendStatus, torch.device, str]:
    accelerator, seen = _devices.accelerator(), _devices.visible()
    # A forgotten TRITON_INTERPRET must not put a server into the interpreter: that is taken by name only.
    ready = [d for d in decisions if d.state is State.AVAILABLE and not d.interpreted]
    fits: list[tuple[int, BackendStatus, torch.device]] = []
    for status in ready:
        assert status.info is not None
        where = device if device is not None else _default_device(status, accelerator)
        if where is None:
            continue
        # Nobody is put on the CPU without asking where an accelerator can be seen; the fallback never leaves the CPU.
        unasked = device is None and where.type == "cpu" and bool(seen)
        if _takes(status.info, where) and not unasked and (status.name != FALLBACK or where.type == "cpu"):
            fits.append((status.info.priority, status, where))
    if not fits:
        if device is not None:
            message = f"auto: no available backend runs on device {device}."
        elif seen:
            message = f"auto: an accelerator is visible ({seen}), and no available backend can use it."
        else:
            message = "auto: no backend can run here."
        raise BackendUnavailableError(message, error_report(request, decisions))
    top = max(priority for priority, _, _ in fits)
    best = [(status, where) for priority, status, where in fits if priority == top]
    best = [pair for pair in best if pair[0].name != FALLBACK] or best
    if len(best) > 1:
        names = " and ".join(f"{status.name} ({status.origin})" for status, _ in best)
        ways = " or ".join(f"{_environ.BACKEND}={status.name}" for status, _ in best)
        message = f"auto: {names} fit alike, with priority {top}; choose one: {ways}."
        raise BackendConflictError(message, error_report(request, decisions))
    status, where = best[0]
    if status.name == FALLBACK:
        return status, where, "the device is a CPU" if device is not None else "no accelerator is visible"
    return status, where, f"of highest priority ({top}) among the available backends for {where.type}"


def _takes(info: BackendInfo, device: torch.device) -> bool:
    return "*" in info.device_types or device.type in info.device_types


def _default_device(status: BackendStatus, accelerator: torch.device | None) -> torch.device | None:
    import torch

    assert status.info is not None
    types = status.info.device_types
    if status.interpreted:
        return torch.device("cpu")
    if accelerator is not None and _takes(status.info, accelerator):
        return accelerator
    if "cpu" in types or "*" in types:
        return torch.device("cpu")
    # A backend may know a device that torch.accelerator does not: its probe has found one.
    return _devices.first(types[0])


def _refuse_unknown(request: Request, decisions: tuple[BackendStatus, ...]) -> NoReturn:
    names = [d.name for d in decisions]
    if not names:
        message = (
            f"{request.said}: no backend is installed, not even the reference: no distribution has entry points of the "
            f"group {ENTRY_POINT_GROUP}.\nfix: install this project with pip (from a checkout: pip install -e .)"
        )
        raise UnknownBackendError(message)
    message = f"{request.said}: no backend of that name is installed"
    hint = _environ.did_you_mean(request.name or "", names) or f"; installed are {', '.join(names)}."
    raise UnknownBackendError(message + hint, error_report(request, decisions))


def _refuse(request: Request, status: BackendStatus, decisions: tuple[BackendStatus, ...]) -> NoReturn:
    report = error_report(request, decisions, status)
    said, first = request.said, status.reasons[0].message
    if status.state is State.BROKEN:
        raise BackendLoadError(f"{said} is broken: {first}", report) from status.error
    if status.state is State.INCOMPATIBLE:
        raise BackendIncompatibleError(f"{said} does not fit: {first}", report)
    if status.state is State.CONFLICT:
        raise BackendConflictError(f"{said} is ambiguous: {first}", report)
    if status.state is State.BLOCKED:
        raise BackendUnavailableError(f"{said} is {first}.", report, status.reasons)
    raise BackendUnavailableError(f"{said} cannot run here.", report, status.reasons)


def error_report(
    request: Request, decisions: tuple[BackendStatus, ...], changed: BackendStatus | None = None
) -> Report:
    """For an error: every backend loaded and judged, the one asked for first."""
    if any(d.state is State.NOT_LOADED for d in decisions):
        decisions = discover()
    if changed is not None and changed.state is not State.CONFLICT:
        decisions = tuple(changed if d.name == changed.name else d for d in decisions)
    decisions = tuple(sorted(decisions, key=lambda d: d.name != request.name))
    slow = any(d.name == FALLBACK and d.state is State.AVAILABLE and d.name != request.name for d in decisions)
    hint = f"To run the slow reference on purpose: {_environ.BACKEND}={FALLBACK}.   " if slow else ""
    return Report(decisions, hint=f"{hint}Details: engram-core doctor")
