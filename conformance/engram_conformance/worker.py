"""One rank of a run by :mod:`engram_conformance.processes`: ``python -m engram_conformance.worker JOB.json RANK``."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from engram_conformance import bridge
from engram_conformance.cases import ALL
from engram_conformance.data import model
from engram_conformance.driver import Work
from engram_conformance.subject import Subject
from engram_conformance.verdicts import Record
from engram_core.parallel import Parallel, TorchCollectives
from engram_core.registry import get_backend


def main(job_path: str, rank: int) -> None:
    """Run a step and leave the results in ``RANK.npz``."""
    job = json.loads(Path(job_path).read_text(encoding="utf-8"))
    counts, kind = job["counts"], job["kind"]
    device = torch.device(job["device_type"] if job["device_type"] == "cpu" else f"{job['device_type']}:{rank}")
    if device.type != "cpu":
        torch.accelerator.set_device_index(rank)
    transport = dist.get_default_backend_for_device(device)
    dist.init_process_group(
        transport,
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=len(counts),
        timeout=timedelta(seconds=120),
    )
    everyone = TorchCollectives()
    if kind == "data":
        alone = [dist.new_group([i]) for i in range(len(counts))][rank]
        parallel = Parallel(TorchCollectives(alone), data=everyone)
    else:
        parallel = Parallel(everyone, sequence=kind == "sequence")
    subject = Subject(get_backend(job["backend"], device), False, ALL[0], Record())
    memory = subject.memory(model(job["geometry"]), parallel, placement=job["placement"])
    work = Work.make(model(job["geometry"]), job["seed"] + (rank if kind == "data" else 0), counts[rank])
    slot = -(-counts[rank] // len(counts))
    window = slice(rank * slot, min((rank + 1) * slot, counts[rank])) if kind == "sequence" else slice(None)
    results = work.run(subject, memory, window=window, slot_tokens=max(counts) if kind == "data" else None)
    arrays: dict[str, Any] = {str(layer_id): bridge.bits(out).view(np.int16) for layer_id, out in results.items()}
    np.savez(Path(job["folder"]) / f"{rank}.npz", **arrays)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
