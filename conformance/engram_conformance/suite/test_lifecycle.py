"""Objects that come and go."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import Counter
from dataclasses import replace

import torch

from engram_conformance.cases import Case
from engram_conformance.data import model
from engram_conformance.driver import Work, same
from engram_conformance.subject import Subject
from engram_core.registry import get_backend


def _work(case: Case, seed: int = 0, geometry: str | None = None) -> Work:
    return Work.make(model(geometry or case.geometry), case.seed + seed, 5)


def test_ten_times(case: Case, subject: Subject) -> None:
    work, first = _work(case), None
    dropped: list[weakref.ref[object]] = []
    for _ in range(10):
        memory = subject.memory(work.model)
        results = {layer_id: out.clone() for layer_id, out in work.run(subject, memory).items()}
        kept = [memory, *memory.layers.values(), *(layer.table for layer in memory.layers.values())]
        dropped += map(weakref.ref, kept)
        del memory, kept
        first = first or results
        same(subject, results, first)
    gc.collect()
    alive = Counter(type(held).__name__ for ref in dropped if (held := ref()) is not None)
    assert not alive, f"of 10 dropped memories are still alive: {dict(alive)}; something keeps them"


def test_side_by_side(case: Case, subject: Subject) -> None:
    works = [_work(case), _work(case, geometry="three")]
    memories = [subject.memory(work.model) for work in works]
    for seed in range(2):
        for name, memory in zip((case.geometry, "three"), memories, strict=True):
            work = _work(case, seed, name)
            work.judge(subject, work.run(subject, memory))


def test_own_object(case: Case, subject: Subject) -> None:
    work = _work(case)
    other = replace(subject, backend=type(subject.backend)(subject.device))
    want = work.run(subject, subject.memory(work.model))
    same(subject, work.run(other, other.memory(work.model)), want)


def test_same_object(case: Case, subject: Subject) -> None:
    name = subject.backend.info.name
    assert get_backend(name, subject.device) is subject.backend, "a second get_backend made another object"
    device = subject.backend.device
    assert device.type == "cpu" or device.index is not None, f"the device {device} has no index"
    subject.record.add(0.0, None)


def test_other_thread(case: Case, subject: Subject) -> None:
    work, memory = _work(case), subject.memory(model(case.geometry))
    want, found = work.run(subject, memory), {}

    def act() -> None:
        if subject.device.type != "cpu":
            torch.accelerator.set_device_index(subject.device.index or 0)
        found.update(work.run(subject, memory))
        subject.synchronize()

    thread = threading.Thread(target=act)
    thread.start()
    thread.join(120)
    assert found, "the step did not end in the other thread"
    same(subject, found, want)


def test_two_devices(case: Case, subject: Subject) -> None:
    kind = subject.device.type
    count = torch.accelerator.device_count() if kind != "cpu" else 1
    if count < 2:
        subject.not_run(f"two devices are needed; {count} {kind} device is here")
    name = subject.backend.info.name
    subjects = [replace(subject, backend=get_backend(name, f"{kind}:{index}")) for index in range(2)]
    memories = [each.memory(model(case.geometry)) for each in subjects]
    for seed in range(2):
        for each, memory in zip(subjects, memories, strict=True):
            work = _work(case, seed)
            work.judge(each, work.run(each, memory))


_FORK = """
import os, sys
from engram_core.registry import list_backends
assert any(status.name == sys.argv[1] for status in list_backends())
child = os.fork()
if child == 0:
    try:
        from engram_conformance.cases import ALL
        from engram_conformance.data import model
        from engram_conformance.driver import Work
        from engram_conformance.subject import Subject
        from engram_conformance.verdicts import Record
        from engram_core.registry import get_backend
        subject = Subject(get_backend(sys.argv[1], sys.argv[2]), False, ALL[0], Record())
        work = Work.make(model("one"), 1, 5)
        work.judge(subject, work.run(subject, subject.memory(work.model)))
        print("worst", subject.record.worst, flush=True)
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_after_fork(case: Case, subject: Subject) -> None:
    if not hasattr(os, "fork"):
        subject.not_run("this system has no fork")
    command = [sys.executable, "-W", "ignore", "-c", _FORK, subject.backend.info.name, str(subject.device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, f"the forked child failed:\n{done.stdout[-500:]}{done.stderr[-1500:]}"
    subject.record.add(float(done.stdout.split()[-1]), None)
