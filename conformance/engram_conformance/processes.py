"""Runs ranks as real processes over ``torch.distributed``, each with a device of its own (or all on the CPU)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engram_conformance.subject import Subject

_TIMEOUT = 180.0


def cannot_run(device: torch.device, ranks: int) -> str:
    """Why so many processes can't run on this type of device; empty where they can."""
    import torch.distributed as dist

    if not dist.is_available():
        return "this torch is built without torch.distributed"
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if count < ranks:
            return f"{ranks} processes need a device each; {count} {device.type} devices are here"
    return ""


def run(subject: Subject, geometry: str, kind: str, seed: int, counts: list[int], folder: Path) -> list[dict[str, Any]]:
    """One process a rank; returns each one's results: layer id to bf16 bits (as int16)."""
    # Only what the run needs: the backend by name, so that the children find it as any program would.
    job = {
        "backend": subject.backend.info.name,
        "device_type": subject.device.type,
        "placement": subject.placement,
        "geometry": geometry,
        "kind": kind,
        "seed": seed,
        "counts": counts,
        "store": str(folder / "store"),
        "folder": str(folder),
    }
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    children = []
    for rank in range(len(counts)):
        with (folder / f"{rank}.log").open("wb") as log:
            command = [sys.executable, "-m", "engram_conformance.worker", str(folder / "job.json"), str(rank)]
            children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
    try:
        _wait(children, folder)
    finally:
        for child in children:
            child.kill()
            child.wait()
    results = []
    for rank in range(len(counts)):
        with np.load(folder / f"{rank}.npz") as loaded:
            results.append({name: loaded[name] for name in loaded.files})
    return results


def _wait(children: list[subprocess.Popen[bytes]], folder: Path) -> None:
    deadline = time.monotonic() + _TIMEOUT
    while any(child.poll() is None for child in children):
        failed = [rank for rank, child in enumerate(children) if child.poll() not in (None, 0)]
        if failed or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    for rank, child in enumerate(children):
        if child.poll() not in (None, 0):
            tail = (folder / f"{rank}.log").read_text(encoding="utf-8", errors="replace")[-2000:]
            raise AssertionError(f"process {rank} ended with {child.returncode}:\n{tail}")
    waiting = [rank for rank, child in enumerate(children) if child.poll() is None]
    assert not waiting, f"processes {waiting} did not end within {_TIMEOUT:g} s: an exchange hangs"
