"""Mutants on a GPU, in processes of their own: a fault can leave one in which nothing that follows can be trusted.

Most share a process, one after another, and after each its cases are run again without the fault: where they fail then,
a new process takes the rest. Those that are to be run apart have a process each, all of them side by side, at the end:
their faults do not depend on time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutants.checkout import TESTS, search_path
from mutants.model import Mutant
from mutants.runner import CONTROL, Outcome, Run

_TIMEOUT = 400


def run(mutants: Sequence[Mutant], area: str, backend: str, device: str) -> Run:
    """The control on all their cases and every mutant; what falls is told by the processes as it falls."""
    with tempfile.TemporaryDirectory() as folder:
        start = _Starter(Path(folder), ["--area", area, "--backend", backend, "--device", device])
        whole = Run()
        pending = [mutant for mutant in mutants if not mutant.apart]
        while pending:
            found = start(pending).result()
            whole.add(found)
            if not any(outcome.mutant == CONTROL and not outcome.note for outcome in found.outcomes):
                break  # no process comes through the control: none of what follows would mean anything
            told = {outcome.mutant for outcome in found.outcomes}
            left = [mutant for mutant in pending if mutant.name not in told]
            if len(left) == len(pending):  # the process ended before the first of them did
                whole.outcomes.append(Outcome(left.pop(0).name, note="its process ended"))
            pending = left
        for child in [start([mutant]) for mutant in mutants if mutant.apart]:
            found = child.result()
            whole.add(found)
            if not any(outcome.mutant == child.mutants[0].name for outcome in found.outcomes):
                whole.outcomes.append(Outcome(child.mutants[0].name, note="its process ended"))
        return whole


class _Starter:
    def __init__(self, folder: Path, options: list[str]) -> None:
        self._folder = folder
        self._options = options
        # Streams that share a queue of the hardware wait for each other, and hide what they do not wait for by right.
        self._environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} | os.environ | {"PYTHONPATH": search_path(folder)}
        self._count = 0

    def __call__(self, mutants: Sequence[Mutant]) -> _Child:
        self._count += 1
        path = self._folder / f"{self._count}.json"
        names = ",".join(mutant.name for mutant in mutants)
        command = [sys.executable, "-m", "mutants", *self._options, "--only", names, "--json", str(path), "--here"]
        return _Child(mutants, path, subprocess.Popen(command, env=self._environment, cwd=TESTS))


class _Child:
    def __init__(self, mutants: Sequence[Mutant], path: Path, process: subprocess.Popen[Any]) -> None:
        self.mutants = mutants
        self._path = path
        self._process = process

    def result(self) -> Run:
        """What it wrote until it ended."""
        try:
            self._process.wait(_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._path.exists():
            return Run.read(self._path)
        return Run(outcomes=[Outcome(CONTROL, note="its process ended")])
