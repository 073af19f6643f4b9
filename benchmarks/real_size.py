"""Tables of the real size: 384,006,168 rows, 94.4 GiB, made on the machine.

    python benchmarks/real_size.py [device host file checkpoint] [--backend NAME] [--json FILE] [--limit-gib N]

Each stage runs in a process of its own, so that the memory of one is free for the next. ``device``, ``host``, ``file``:
one layer's table in that placement, as many rows as fit (device memory, host memory less 12 GiB, free disk less 8 GiB):
seconds to fill and to open, memory taken, look-ups at the first, the middle, the last and random rows compared byte for
byte, then microseconds a look-up (median of 9; a captured graph where the table allows it) beside the targets of one
H200. ``checkpoint``: a checkpoint of 8 GiB is written in the real format, packed, and loaded through
``EngramMemory.from_pretrained``: rates and peak memory. On a CPU device fewer rows are compared and timed.

Ends with 1 if a row was wrong. ``--limit-gib``: smaller tables, to try the script.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from engram_core import EngramConfig, EngramMemory, HashLayout, Parallel, TableSpec, TokenMap, get_backend
from engram_core.backend import EngramBackend
from engram_core.checkpoint import Checkpoint, pack_table, write_checkpoint
from engram_core.formats import rows_to_bf16
from engram_core.shared import available_memory

GIB = 2**30
WIDTH = 264
REAL = 16_000_000
STAGES = ("device", "host", "file", "checkpoint")
TOKENS = (1, 16, 64, 256, 1024, 4096)
CPU_TOKENS = (1, 16)
# Microseconds on one H200, bf16 rows out (PERFORMANCE, "Row look-up").
TARGETS = {"device": {1: 1.5, 64: 2.1, 256: 4, 1024: 12, 4096: 42}, "host": {1: 3.2, 16: 6, 64: 13, 256: 48, 1024: 420}}
_BLOCK = 2**16


class Pattern:
    """Row i is row ``i % 65536`` of a random block, its first 8 bytes i itself: quick to make, and no two are alike."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self._block = torch.randint(0, 126, (_BLOCK, WIDTH), dtype=torch.uint8, generator=draw)  # finite codes
        self._block[:, 256:] = torch.randint(117, 123, (_BLOCK, 8), dtype=torch.uint8, generator=draw)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The packed rows ``[n, 264]`` of ``ids`` ``[n]`` int64 on the CPU."""
        made = self._block[ids % _BLOCK]
        made[:, :8] = ids.contiguous().view(torch.uint8).view(-1, 8)
        return made

    def fill(self, table: torch.Tensor) -> None:
        """Write every row of ``table`` ``[rows, 264]``, wherever it lies."""
        block = self._block.to(table.device)
        for start in range(0, table.shape[0], _BLOCK):
            part = table[start : start + _BLOCK]
            part.copy_(block[: part.shape[0]])
            ids = torch.arange(start, start + part.shape[0], device=table.device)
            part[:, :8] = ids.view(torch.uint8).view(-1, 8)


def config_within(limit: float) -> EngramConfig:
    """The real geometry with the largest table of layer 1 within ``limit`` bytes, at most the published one."""
    base = min(REAL, int(limit / WIDTH / 24))
    while base > 2:
        config = EngramConfig.deepseek_v41(vocab_size=base)
        if config.num_embeddings[0] * WIDTH <= limit:
            return config
        base = base * 999 // 1000 - 1
    raise SystemExit(f"real_size: {limit:.0f} bytes are too few for any table")


def table_stage(placement: str, backend: EngramBackend, limit: float) -> dict[str, Any]:
    """Make, fill and open one table; compare rows; time look-ups."""
    folder = tempfile.mkdtemp(prefix="engram-real-size-")
    try:
        room = {
            "device": _device_free(backend) - 4 * GIB,
            "host": available_memory() - 12 * GIB,
            "file": shutil.disk_usage(folder).free - 8 * GIB,
        }[placement]
        config = config_within(min(room, limit))
        layout = HashLayout.from_config(config)
        rows = config.num_embeddings[0]
        path = Path(folder) / "engram-layer-1.rows" if placement == "file" else None
        pattern, before = Pattern(), _resident()
        begin = time.perf_counter()
        if path is not None:
            _write(path, rows, pattern)
        filled = time.perf_counter()
        table = backend.create_table(TableSpec(rows, 256, layout.head_sizes(0), placement, Parallel.single(), path))
        opened = time.perf_counter()
        if path is None:
            pattern.fill(table.packed)
        _settle(backend)
        done = time.perf_counter()
        facts: dict[str, Any] = {
            "rows": rows,
            "bytes": rows * WIDTH,
            "full_size": config.vocab_size == REAL,
            "seconds_to_make": round(filled - begin, 2),
            "seconds_to_open": round(opened - filled, 3),
            "seconds_to_fill": round(done - opened, 2),
            "resident_bytes": _resident() - before,
            "device_bytes": _device_used(backend),
            "graph_safe": table.graph_safe,
        }
        facts["wrong_rows"] = _wrong(table, pattern, backend)
        facts["lookup_us"] = {
            str(count): {"us": round(_time(table, count, backend), 2), "target": TARGETS.get(placement, {}).get(count)}
            for count in (TOKENS if backend.device.type != "cpu" else CPU_TOKENS)
        }
        return facts
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, rows: int, pattern: Pattern) -> None:
    with open(path, "wb") as file:
        for start in range(0, rows, _BLOCK):
            file.write(pattern.rows(torch.arange(start, min(start + _BLOCK, rows))).numpy().data)


def _wrong(table: Any, pattern: Pattern, backend: EngramBackend) -> int:
    """Rows that are not what was written: the ends, the middle, their neighbours, 200,000 random ones, and outside."""
    rows = table.spec.rows
    ends = torch.tensor([0, 1, rows // 2 - 1, rows // 2, rows // 2 + 1, rows - 2, rows - 1])
    count = 200_000 if backend.device.type != "cpu" else 1000
    ids = torch.cat([ends, torch.randint(0, rows, (count - len(ends),), generator=torch.Generator().manual_seed(1))])
    wrong = 0
    for part in ids.view(-1, 500):
        asked = torch.full((500, 24), -1, dtype=torch.int32)
        asked[:, 0] = part.int()
        given = asked.to(table.ids_device)
        wanted = pattern.rows(part)
        packed = table.lookup(given, packed=True).cpu()
        values = table.lookup(given).cpu()
        wrong += int((packed[:, 0] != wanted).any(1).sum()) + int((packed[:, 1:] != 0).flatten(1).any(1).sum())
        same = values[:, 0].view(torch.int16) == rows_to_bf16(wanted).view(torch.int16)
        wrong += int((~(same | (values[:, 0].isnan() & rows_to_bf16(wanted).isnan()))).any(1).sum())
    return wrong


def _time(table: Any, tokens: int, backend: EngramBackend) -> float:
    """Median microseconds of a look-up of ``tokens`` x 24 rows to bf16, of 9 runs of 64 of them, each of new rows.

    New ids each time: rows that were just read would come from the cache.
    """
    draw = torch.Generator().manual_seed(tokens)
    count = 64 if backend.device.type == "cuda" else 4
    inputs = torch.zeros(count, tokens, 24, dtype=torch.int32, device=table.ids_device)
    out = torch.empty(tokens, 24, 256, dtype=torch.bfloat16, device=backend.device)

    sizes = torch.tensor(table.spec.head_sizes)
    firsts = sizes.cumsum(0) - sizes

    def new_ids() -> None:  # each column's in its own part of the table, as hashes are
        inputs.copy_((torch.rand(inputs.shape, dtype=torch.float64, generator=draw) * sizes).long() + firsts)

    def all_of_them() -> None:
        for ids in inputs:
            table.lookup(ids, out=out)

    all_of_them()
    _settle(backend)
    times: list[float] = []
    if backend.device.type == "cuda" and table.graph_safe:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_of_them()
        for _ in range(9):
            new_ids()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            _settle(backend)
            times.append(begin.elapsed_time(end) * 1000 / count)
    else:
        for _ in range(9):
            new_ids()
            _settle(backend)
            start = time.perf_counter()
            all_of_them()
            _settle(backend)
            times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def checkpoint_stage(backend: EngramBackend, limit: float) -> dict[str, Any]:
    """Write, pack and load a checkpoint, both layers; the reference's own memory for weights is in the peak too."""
    folder = Path(tempfile.mkdtemp(prefix="engram-real-size-"))
    try:
        config = config_within(min(4 * GIB, limit / 4, shutil.disk_usage(folder).free / 6))
        table = sum(config.num_embeddings) * WIDTH
        begin = time.perf_counter()
        write_checkpoint(folder / "model", config, progress=False)
        written = time.perf_counter()
        for tensors in Checkpoint.open(folder / "model").layers().values():
            pack_table(tensors, folder / "packed", progress=False)
        packed = time.perf_counter()
        token_map = TokenMap.identity(config.compressed_vocab_size, config.pad_token_id)
        before, start = _resident(), time.perf_counter()
        memory = EngramMemory.from_pretrained(
            folder / "model", token_map, backend=backend, placement="host", max_tokens=256, progress=False
        )
        loaded = time.perf_counter()
        peak = _status("VmHWM") - before - table
        mapped = EngramMemory.from_pretrained(
            folder / "model", token_map, backend=backend, placement="file", table_path=folder / "packed",
            max_tokens=256, progress=False,
        )  # fmt: skip
        wrong = 0
        for layer_id, layer in memory.layers.items():
            other = mapped.layers[layer_id].table.packed
            for begin_row in range(0, other.shape[0], 2**20):
                rows = slice(begin_row, begin_row + 2**20)
                wrong += int((layer.table.packed[rows] != other[rows]).any(1).sum())
        return {
            "bytes": table,
            "seconds_to_write": round(written - begin, 2),
            "seconds_to_pack": round(packed - written, 2),
            "pack_gib_per_second": round(table / GIB / (packed - written), 3),
            "seconds_to_load": round(loaded - start, 2),
            "load_gib_per_second": round(table / GIB / (loaded - start), 3),
            "peak_beyond_tables_bytes": peak,
            "wrong_rows": wrong,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _settle(backend: EngramBackend) -> None:
    if backend.device.type != "cpu":
        torch.accelerator.synchronize(backend.device)


def _status(key: str) -> int:
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    return int(found[1]) * 1024 if found else 0


def _resident() -> int:
    return _status("VmRSS")


def _device_free(backend: EngramBackend) -> float:
    return float(torch.cuda.mem_get_info(backend.device)[0] if backend.device.type == "cuda" else available_memory())


def _device_used(backend: EngramBackend) -> int:
    return int(torch.cuda.memory_allocated(backend.device)) if backend.device.type == "cuda" else 0


def main() -> int:
    """Run the stages that were asked for, each in its own process; print and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"default: {' '.join(STAGES)}")
    parser.add_argument("--backend")
    parser.add_argument("--device")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--limit-gib", type=float, default=1e6)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.stages) - set(STAGES):
        parser.error(f"{sorted(unknown)}: stages are {' '.join(STAGES)}")
    if options.here:
        backend, limit = get_backend(options.backend, options.device), options.limit_gib * GIB
        (stage,) = options.stages
        facts = checkpoint_stage(backend, limit) if stage == "checkpoint" else table_stage(stage, backend, limit)
        print(json.dumps({"backend": backend.info.name, "device": str(backend.device), **facts}))
        return 0
    found: dict[str, Any] = {}
    for stage in options.stages or STAGES:
        arguments = [stage, "--here", "--limit-gib", str(options.limit_gib)]
        arguments += [f"--{key}={value}" for key in ("backend", "device") if (value := getattr(options, key))]
        done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=False)
        found[stage] = json.loads(done.stdout) if done.returncode == 0 else {"failed": done.returncode}
        print(f"{stage}: {json.dumps(found[stage], indent=1)}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0 if all(facts.get("wrong_rows") == 0 for facts in found.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
