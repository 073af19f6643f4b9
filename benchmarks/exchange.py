"""Rows and projections between GPUs: correctness against one rank, capture with collectives, and time.

    python benchmarks/exchange.py [--ranks 2] [--json FILE]

Starts one process a GPU over NCCL. Checks first: every way of sharing gives what one rank gives, and a captured step
replayed with new tokens gives the new tokens' result. Then times, by device events and the median of 9, the exchange of
packed rows (264 bytes a row) beside that of bf16 rows (512), and a whole captured step. Uses small tables of the real
geometry: an exchange moves the same bytes whatever the table holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from engram_core import EngramConfig, EngramMemory, Parallel, TokenBatch, TokenMap, TorchCollectives
from engram_core.synthetic import Synthetic

CONFIG = EngramConfig.deepseek_v41(vocab_size=2000)
TOKENS = (1, 16, 64, 256, 1024)
STEP_TOKENS = (1, 16, 64)


def median_us(run: Callable[[], object], repeats: int = 9, inner: int = 20) -> float:
    """Median time of one ``run`` in microseconds, by device events around ``inner`` of them."""
    for _ in range(5):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(inner):
            run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / inner)
    return statistics.median(times)


def batch(tokens: int, seed: int, device: torch.device) -> tuple[TokenBatch, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 90_000, (tokens,), generator=generator)
    hidden = torch.randn(tokens, CONFIG.hc_mult, CONFIG.hidden_size, generator=generator).to(torch.bfloat16)
    return TokenBatch.single(ids.to(device)), hidden.to(device)


def memory(parallel: Parallel | None, device: torch.device, placement: str = "device") -> EngramMemory:
    token_map = TokenMap.identity(CONFIG.compressed_vocab_size, CONFIG.pad_token_id)
    made = EngramMemory(
        CONFIG, token_map, "nvidia", placement, parallel=parallel, device=device, max_tokens=max(TOKENS)
    )
    Synthetic(CONFIG).load(made)
    return made


def run_step(of: EngramMemory, given: TokenBatch, hidden: torch.Tensor, slot: int | None = None) -> torch.Tensor:
    with of.step(given, slot_tokens=slot) as step:
        for layer_id in CONFIG.layer_ids:
            hidden = step.inject(layer_id, hidden)
    return hidden


def check(found: torch.Tensor, expected: torch.Tensor, what: str) -> float:
    """Largest difference relative to the largest magnitude; several bf16 steps over two layers at most."""
    worst = float((found.float() - expected.float()).abs().max() / expected.float().abs().max()) if len(found) else 0.0
    assert worst < 2**-6, f"{what}: {worst}"
    return worst


def captured(of: EngramMemory, whole: EngramMemory, tokens: int, device: torch.device) -> tuple[float, float]:
    """Capture a step with its collectives, replay it with other tokens; the worst difference and the time."""
    given, hidden = batch(tokens, 1, device)
    run_step(of, given, hidden)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_step(of, given, hidden)
    worst = 0.0
    for seed in (2, 3):
        new, new_hidden = batch(tokens, seed, device)
        given.input_ids.copy_(new.input_ids)
        hidden.copy_(new_hidden)
        graph.replay()
        worst = max(worst, check(out, run_step(whole, new, new_hidden), f"replay of {tokens} tokens"))
    return worst, median_us(graph.replay)


def rank_main(rank: int, size: int, store: str, path: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    world, ahead = TorchCollectives(), TorchCollectives(dist.new_group())
    whole = memory(None, device)
    alone = Parallel.single().tensor
    ways = {
        "tensor": Parallel(world),
        "tensor, WKV ahead": Parallel(world, ahead=ahead),
        "sequence": Parallel(world, sequence=True),
        "data": Parallel(alone, data=world),
        # One copy of the tables in host memory, which every rank's device reads.
        "tensor, shared tables": Parallel(world),
        "data, shared tables": Parallel(alone, data=world),
    }
    result: dict[str, Any] = {"ranks": size, "device": torch.cuda.get_device_name(device), "worst": {}, "us": {}}
    for name, parallel in ways.items():
        shared = memory(parallel, device, "shared" if "shared" in name else "device")
        for tokens in (0, 1, 7, 16, 200):
            own = tokens + (rank if parallel.data is not None else 0)
            given, hidden = batch(own, 10 * tokens + (rank if parallel.data is not None else 0), device)
            expected = run_step(whole, given, hidden)
            if parallel.sequence:
                slot = -(-own // size)
                mine = slice(min(rank * slot, own), min((rank + 1) * slot, own))
                hidden, expected = hidden[mine], expected[mine]
            found = run_step(shared, given, hidden, tokens + size - 1 if parallel.data is not None else None)
            result["worst"][f"{name}, {tokens} tokens"] = check(found, expected, name)
        if name.startswith("tensor"):  # captured with shared tables too: read by the device
            for tokens in STEP_TOKENS:
                worst, time = captured(shared, whole, tokens, device)
                result["worst"][f"{name}, captured {tokens}"] = worst
                result["us"][f"{name}, captured step of {tokens}"] = time
    for tokens in TOKENS:
        for form, width, dtype in (("packed", 264, torch.uint8), ("bf16", 256, torch.bfloat16)):
            rows = torch.zeros(tokens, CONFIG.columns // size, width, dtype=dtype, device=device)
            result["us"][f"gather of {form} rows, {tokens} tokens"] = median_us(
                lambda rows=rows: world.all_gather(rows, 1)
            )
    if rank == 0:
        Path(path).write_text(json.dumps(result, indent=1), encoding="utf-8")
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if torch.cuda.device_count() < given.ranks:
        print(f"{given.ranks} GPUs are needed; {torch.cuda.device_count()} are visible", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as folder:
        path = given.json or Path(folder) / "result.json"
        mp.start_processes(
            rank_main, (given.ranks, str(Path(folder) / "store"), str(path)), nprocs=given.ranks, start_method="spawn"
        )
        result = json.loads(path.read_text(encoding="utf-8"))
    print(f"{result['ranks']} x {result['device']}")
    for name, worst in result["worst"].items():
        print(f"{name:45} worst {worst:.2e}")
    for name, time in result["us"].items():
        print(f"{name:45} {time:9.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
