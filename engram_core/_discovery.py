"""Find the installed backends and judge each one, so that one bad plugin can neither hide nor stop another.

pluggy's own ``load_setuptools_entrypoints`` stops at the first plugin that fails to import, and drops the second of two
plugins with one name without a word. Here every entry point ends as a :class:`BackendStatus`, with a state and reasons.
Each plugin is registered with a manager of its own: a misspelt hook, or one that raises, is that plugin's affair alone.

Nothing is cached: plugin modules live in ``sys.modules`` anyway, and a plugin mended in a running session is seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

import pluggy

from engram_core import _environ, hookspecs
from engram_core._report import BackendStatus, State
from engram_core.hookspecs import ENTRY_POINT_GROUP, PROJECT
from engram_core.info import API_VERSION, BackendInfo, Reason

FALLBACK = "reference"
HOOK = "engram_backend"

# A plugin that calls sys.exit() must not end the program that lists backends; Ctrl-C must.
CAUGHT = (Exception, SystemExit)


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    distribution: str
    version: str
    entry: EntryPoint | None
    fault: BaseException | None = None

    def status(self, state: State, *reasons: Reason, **fields: Any) -> BackendStatus:
        return BackendStatus(self.name, state, self.distribution, self.version, reasons, **fields)

    def broken(self, code: str, message: str, error: BaseException | None = None, **fields: Any) -> BackendStatus:
        fix = f"repair or upgrade {self.distribution}; to go on without it: {_environ.DISABLE}={self.name}"
        return self.status(State.BROKEN, Reason(code, message, fix), error=error, **fields)


def discover(only: str | None = None) -> tuple[BackendStatus, ...]:
    """Every installed backend's decision, by name, the reference last.

    ``only``: a folded name; no other backend's code is imported. Blocked backends' code never is.
    """
    blocked = _environ.blocked()
    groups: dict[str, list[_Found]] = {}
    for found in _entry_points():
        groups.setdefault(found.name, []).append(found)
    _environ.warn_unknown(groups)
    decisions: list[BackendStatus] = []
    for name in sorted(groups, key=lambda name: (name == FALLBACK, name)):
        claims = sorted(groups[name], key=lambda found: (found.distribution, found.version))
        if name in blocked:
            fix = f"take {name!r} out of {_environ.DISABLE}"
            reason = Reason("blocked", f"blocked by {_environ.DISABLE}={','.join(sorted(blocked))}", fix)
            decisions += [found.status(State.BLOCKED, reason) for found in claims]
        elif len(claims) > 1:
            decisions += [found.status(State.CONFLICT, _clash(name, claims)) for found in claims]
        elif only not in (None, name):
            decisions.append(claims[0].status(State.NOT_LOADED))
        else:
            decisions.append(_judge(claims[0]))
    return tuple(decisions)


def load_target(target: str) -> Any:
    """The object that ``"module:name"`` names."""
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _entry_points() -> Iterator[_Found]:
    # importlib.metadata.entry_points() fails as a whole on one malformed file, so each distribution is read by itself.
    seen: set[tuple[str, str, str]] = set()
    for dist in distributions():
        text = dist.read_text("entry_points.txt")
        if not text or ENTRY_POINT_GROUP not in text:
            continue
        name, version = _origin(dist)
        try:
            entries = tuple(dist.entry_points.select(group=ENTRY_POINT_GROUP))
        except CAUGHT as exc:
            yield _Found(_environ.fold(name), name, version, None, exc)
            continue
        for entry in entries:
            # The same distribution is found twice where a checkout and an editable install are both on the path.
            key = (re.sub(r"[-_.]+", "-", name).lower(), _environ.fold(entry.name), "".join(entry.value.split()))
            if key not in seen:
                seen.add(key)
                yield _Found(_environ.fold(entry.name), name, version, entry)


def _origin(dist: Distribution) -> tuple[str, str]:
    """Name and version; a folder without METADATA is told by its place."""
    try:
        name, version = str(dist.metadata["Name"] or ""), str(dist.metadata["Version"] or "")
    except CAUGHT:
        name = version = ""
    return name or f"unnamed distribution in {dist.locate_file('')}", version


def _clash(name: str, claims: list[_Found]) -> Reason:
    owners = " and ".join(f"{found.distribution} {found.version}".rstrip() for found in claims)
    uninstall = " or ".join(f"pip uninstall {found.distribution}" for found in claims)
    return Reason("name-conflict", f"the name {name!r} is claimed by {owners}", f"remove one: {uninstall}")


def _judge(found: _Found) -> BackendStatus:
    """Import, register, ask and probe one plugin."""
    if found.entry is None:
        assert found.fault is not None
        message = f"{cause(found.fault)} (reading entry_points.txt of {found.distribution})"
        return found.broken("bad-entry-point", message, found.fault)
    try:
        plugin = found.entry.load()
    except CAUGHT as exc:
        return found.broken("import-failed", f"{cause(exc)} (importing {found.entry.value})", exc)
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name=found.name)
        manager.check_pending()
    except CAUGHT as exc:
        return found.broken("bad-hook", f"{cause(exc)}; the one hook is {HOOK}()", exc)
    if not manager.hook.engram_backend.get_hookimpls():
        return found.broken("no-hook", f"{found.entry.value} has no {HOOK}() marked with engram_core.hookimpl")
    try:
        answers = manager.hook.engram_backend()
    except CAUGHT as exc:
        return found.broken("hook-failed", f"{cause(exc)} (calling {HOOK}() of {found.entry.value})", exc)
    info = answers[0] if answers else None
    if not isinstance(info, BackendInfo):
        return found.broken("bad-info", f"{HOOK}() of {found.entry.value} returned {info!r}; a BackendInfo is needed")
    if info.name != found.name:
        message = (
            f"BackendInfo.name is {info.name!r}, and the entry point is named {found.entry.name!r}; they must agree"
        )
        return found.broken("name-mismatch", message, info=info)
    return _probe(found, info)


def _probe(found: _Found, info: BackendInfo) -> BackendStatus:
    interpreted = info.interpretable and _environ.interpreting()
    reason = _version_reason(found, info)
    if reason is not None:
        return found.status(State.INCOMPATIBLE, reason, info=info)
    try:
        reasons = load_target(info.probe)()
    except CAUGHT as exc:
        return found.broken("probe-failed", f"{cause(exc)} (calling the probe {info.probe})", exc, info=info)
    if not isinstance(reasons, tuple) or not all(isinstance(reason, Reason) for reason in reasons):
        message = f"the probe {info.probe} returned {reasons!r}; a tuple of Reason is needed"
        return found.broken("bad-probe", message, info=info)
    status = found.status(State.AVAILABLE, info=info, interpreted=interpreted)
    return status if not reasons else replace(status, state=State.UNAVAILABLE, reasons=reasons, interpreted=False)


def _version_reason(found: _Found, info: BackendInfo) -> Reason | None:
    major, minor = info.api_version
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return None
    newer = info.api_version > API_VERSION
    theirs, ours = f"{major}.{minor}", ".".join(map(str, API_VERSION))
    return Reason(
        "api-version",
        f"{found.distribution} is written for interface {theirs}; this engram-core has interface {ours}",
        f"upgrade engram-core to a release with interface {theirs}, or install a {found.distribution} for {ours}"
        if newer
        else f"upgrade {found.distribution} to a release for interface {ours}",
    )
