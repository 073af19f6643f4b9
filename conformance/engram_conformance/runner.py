"""Runs the suite in a process of its own and tells of each verdict as it falls; for ``engram-core conformance``.

A process of its own, because a backend may crash the one it runs in, and because ``TRITON_INTERPRET`` and the like are
read when kernels are defined.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from engram_conformance import report as reports

OK, CHECK_FAILED, USAGE, UNAVAILABLE = 0, 1, 2, 3
# pytest's codes: 0 passed, 1 failed, 2 interrupted, 3 internal (here: unavailable), 4 usage, 5 nothing collected.
_CODES = {0: OK, 1: CHECK_FAILED, 3: UNAVAILABLE, 4: USAGE, 5: USAGE}


@dataclass(frozen=True)
class Outcome:
    """``code``: 0 done, 1 a check failed, 2 bad usage, 3 the backend can't run here. ``output``: what pytest wrote."""

    code: int
    report: reports.Report | None
    output: str
    last_case: str = ""


def run(
    backend: str,
    *,
    device: str | None = None,
    keyword: str | None = None,
    size: str | None = None,
    on_event: Callable[[dict[str, Any]], None] | None = None,
) -> Outcome:
    """Judge ``backend``. ``on_event`` gets ``{"total": n}`` once, then each case's verdict as a mapping."""
    with tempfile.TemporaryDirectory(prefix="engram-conformance-") as folder:
        events, path, log = (Path(folder) / name for name in ("events", "report.json", "log"))
        events.touch()
        # Neither the settings of the folder it is called from, nor plugins that only change the output.
        command = [
            sys.executable,
            "-m",
            "pytest",
            "--pyargs",
            "engram_conformance",
            "-c",
            os.devnull,
            "--rootdir",
            folder,
        ]
        command += ["-q", "--tb=short", "-p", "no:cacheprovider", *_plugin()]
        command += [f"--engram-backend={backend}", f"--engram-report={path}", f"--engram-events={events}"]
        command += [f"--engram-device={device}"] if device else []
        command += [f"--engram-size={size}"] if size else []
        command += ["-k", keyword] if keyword else []
        last = ""
        with log.open("wb") as sink, events.open(encoding="utf-8") as lines:
            child = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder
            )
            try:
                ended, part = False, ""
                while not ended:
                    ended = _wait(child)
                    part += lines.read()
                    *whole, part = part.split("\n")
                    for line in whole:
                        event = json.loads(line)
                        last = event.get("id", last)
                        if on_event is not None:
                            on_event(event)
            finally:
                child.kill()
                child.wait()
        output = log.read_text(encoding="utf-8", errors="replace")
        found = reports.read(path) if path.exists() else None
        code = _CODES.get(child.returncode, CHECK_FAILED)
        return Outcome(code, found, output, "" if found is not None else last)


def _wait(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(0.1)
    except subprocess.TimeoutExpired:
        return False
    return True


def _plugin() -> list[str]:
    """The plugin by its entry point, which also works where plugins are not loaded by themselves; else as a module."""
    installed = any(entry.name == "engram_conformance" for entry in entry_points(group="pytest11"))
    return ["-p", "engram_conformance" if installed else "engram_conformance.plugin"]
