"""Two ranks on two GPUs over NCCL, started by ``on_cuda.py``: right, and how long, at the published geometry.

Times, us, median of 20 runs of a captured graph's 10 replays: "sliced", what the backend does (its slice of the
projection, pack, one all-gather of w + 4 * H elements a token, finish), and "gathered", what it does instead of (N / P
outputs, an all-gather of the projection, the whole gate). Same products, same communicator, same process, in turn.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton

RANKS = 2
DIM, COPIES, K = 5120, 4, 6144
TOKENS = (1, 16, 64, 256, 1024, 4096)


def right(group: Any, device: torch.device) -> None:
    """The ranks' results against the reference on one rank, on the CPU; all ranks hold the same bits."""
    import ranks
    from models import filled

    from engram_core import EngramMemory, Parallel, TokenMap, get_backend

    single = ranks.build("reference")
    forms = ["rocm-as-gfx942", "rocm-as-gfx942-fp8", "rocm-as-gfx950"]
    if device.type == "cpu" and tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 8):
        forms.pop()  # that interpreter has no tl.dot_scaled
    for form in forms:
        for ahead in (None, type(group)(dist.new_group())):
            parallel = Parallel(group, ahead=ahead)
            memory = EngramMemory(
                single.config, TokenMap.identity(64, 2), get_backend(form, device), parallel=parallel, max_tokens=32
            )
            filled(memory)
            assert memory.layers[1].wkv.kv_layout == "dim_slice"
            memory.warmup([0, 1, 7, 20])
            for tokens in (0, 1, 7, 20):
                hidden, ids, mask = ranks.inputs(tokens, ranks.HIDDEN)
                found = ranks.run(memory, *(x.to(device) for x in (hidden, ids, mask)))
                ranks.close(found.cpu(), ranks.run(single, hidden, ids, mask))
                if tokens:
                    ranks.same_everywhere(group, found)


def times(group: Any, device: torch.device) -> list[dict[str, float]]:
    from engram_rocm.arch import KNOWN
    from engram_rocm.gate import apply_gate
    from engram_rocm.wkv import RocmWkv

    from engram_core import Parallel
    from engram_core.backend import GateWeights, WkvSpec
    from engram_core.kernels.gate import gate

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    weights = GateWeights(draw(COPIES, DIM), draw(COPIES, DIM), 1e-20)
    wkv = RocmWkv(WkvSpec(K, DIM, COPIES, Parallel(group)), device, KNOWN["gfx942"], "bf16")
    wkv.load(torch.randn(5 * DIM, K, dtype=torch.bfloat16) / K**0.5)
    half = draw(5 * DIM // RANKS, K) / K**0.5
    found = []
    for tokens in TOKENS:
        rows, hidden = draw(tokens, 24, 256), draw(tokens, COPIES, DIM)

        def sliced(rows: torch.Tensor = rows, hidden: torch.Tensor = hidden) -> None:
            apply_gate(hidden, wkv(rows), weights, wkv, None, None, None, device)

        def gathered(rows: torch.Tensor = rows, hidden: torch.Tensor = hidden) -> None:
            gate(hidden, group.all_gather(rows.flatten(1) @ half.T, 1), weights)

        pair = {name: _replayed(step) for name, step in (("sliced", sliced), ("gathered", gathered))}
        found.append({"tokens": tokens, **pair, "ratio": pair["gathered"] / pair["sliced"]})
    return found


def _replayed(step: Callable[[], None], replays: int = 10) -> float:
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    measured = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        measured.append(begin.elapsed_time(end) * 1000 / replays)
    return statistics.median(measured)


def play(rank: int, kind: str, store: str, out: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=RANKS)
    try:
        from engram_core import TorchCollectives

        group = TorchCollectives()
        right(group, device)
        if kind == "cuda":
            found = times(group, device)
            if rank == 0:
                card = torch.cuda.get_device_name()
                Path(out).write_text(json.dumps({"card": card, "torch": torch.__version__, "us": found}, indent=1))
                for line in found:
                    print("  ".join(f"{key} {value:.4g}" for key, value in line.items()))
        elif rank == 0:
            print("right; nothing is timed on a CPU")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "cuda" and torch.cuda.device_count() < RANKS:
        print(f"not run: {RANKS} ranks need a GPU each, and {torch.cuda.device_count()} are here")
        sys.exit(0)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(play, args=(sys.argv[1], f"{folder}/store", sys.argv[2]), nprocs=RANKS, start_method="spawn")
