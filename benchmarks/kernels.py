"""Kernels of the NVIDIA backend beside those of vLLM and SGLang, in one process: hash, look-up, WKV, gate.

    python benchmarks/kernels.py [--peers .peers/x] [--json FILE]

Geometry of DeepSeek-V4.1-Flash, one rank, random inputs, CUDA graph replay, median, inputs rotated beyond L2. The table
has its full size (384,006,168 rows, 101 GB) and its last row is checked. Every time stands beside its floor (the bytes
or operations that can't be avoided, at 4.3 TB/s and 805 TFLOP/s) and its target. Needs an NVIDIA GPU with 139 GB.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _peers import Peers
from _timing import replay, sets_beyond_l2
from engram_nvidia.arch import detect
from engram_nvidia.wkv_w8a16 import W8A16Wkv, copy_tokens

from engram_core import formats
from engram_core.hashing import TokenBatch, TorchHasher
from engram_core.kernels.gate import gate
from engram_core.kernels.hash import HashConstants, hash_ids
from engram_core.kernels.lookup import lookup_rows
from engram_core.layout import HashLayout
from engram_core.parallel import Parallel
from engram_core.specs import GateWeights, WkvSpec
from engram_core.tokens import TokenMap

GB_S, TFLOP_S = 4300.0, 805.0
DIM, COPIES, COLUMNS, K = 5120, 4, 24, 6144
ROWS = 384_006_168
TARGETS: dict[tuple[str, int], float] = {
    ("gate", 1): 2.3, ("gate", 16): 2.5, ("gate", 128): 5.2, ("gate", 1024): 34, ("gate", 4096): 131,
    ("gate", 16384): 519, ("look-up", 1): 1.5, ("look-up", 64): 2.1, ("look-up", 256): 4.0, ("look-up", 1024): 12,
    ("look-up", 4096): 42, ("WKV", 1): 44, ("WKV", 16): 47, ("WKV", 64): 60, ("WKV", 256): 230, ("WKV", 1024): 520,
    ("WKV", 4096): 1720, ("WKV, bf16 copy", 256): 120, ("WKV, bf16 copy", 1024): 415, ("WKV, bf16 copy", 4096): 1630,
}  # fmt: skip
CUDA = torch.device("cuda")


def median(calls: Sequence[Callable[[], object]], launches: int) -> float:
    """Of ``launches`` launches in a graph, ``calls`` in turn."""
    return replay([calls[i % len(calls)] for i in range(launches)])


def peers_medians(calls: Sequence[dict[str, Callable[[], object]]], launches: int) -> dict[str, float]:
    """The same for each peer."""
    return {name: median([each[name] for each in calls], launches) for name in calls[0]}


def bench_gate(peers: Peers) -> Iterator[dict[str, Any]]:
    weights = GateWeights(*(torch.randn(COPIES, DIM, device=CUDA).bfloat16() for _ in range(2)), 1e-20)
    for tokens in (1, 16, 64, 128, 256, 1024, 4096, 16384):
        nbytes = tokens * 2 * DIM * (2 * COPIES + COPIES + 1)
        sets = sets_beyond_l2(nbytes)
        hidden = [torch.randn(tokens, COPIES, DIM, device=CUDA).bfloat16() for _ in range(sets)]
        kv = [torch.randn(tokens, (COPIES + 1) * DIM, device=CUDA).bfloat16() for _ in range(sets)]
        out = [torch.empty_like(hidden[0]) for _ in range(sets)]
        launches = 24 if tokens < 4096 else 8
        ours = median([partial(gate, hidden[i], kv[i], weights, out=out[i]) for i in range(sets)], launches)
        theirs = peers_medians([peers.gates(hidden[i], kv[i], weights) for i in range(sets)], launches)
        yield row("gate", tokens, ours, theirs, nbytes / GB_S / 1e3)


def bench_lookup(peers: Peers) -> Iterator[dict[str, Any]]:
    table = torch.empty(ROWS, 264, dtype=torch.uint8, device=CUDA)
    flat, block = table.view(-1), torch.randint(0, 256, (2**30,), dtype=torch.uint8, device=CUDA)
    for begin in range(0, flat.numel(), block.numel()):
        part = flat[begin : begin + block.numel()]
        part.copy_(block[: part.numel()])
    edge = torch.tensor([[ROWS - 1, 0, ROWS, -1]], device=CUDA)
    got = lookup_rows(table, edge, torch.empty(1, 4, 256, dtype=torch.bfloat16, device=CUDA))[0]
    want = formats.rows_to_bf16(table[[ROWS - 1, 0]].cpu()).to(CUDA)
    same = (got[:2].view(torch.int16) == want.view(torch.int16)) | (got[:2].isnan() & want.isnan())
    assert bool(same.all()), "the last or the first row of the table came out wrong"
    assert not bool(got[2:].view(torch.int16).any()), "an id outside the table gave something"
    print(f"last row {ROWS - 1} of {table.numel()} bytes, first row and ids outside: right", flush=True)
    per = ROWS // COLUMNS
    for tokens in (1, 16, 64, 256, 1024, 4096):
        sets = 12
        base = torch.arange(COLUMNS, device=CUDA) * per
        ids = [(torch.randint(0, per, (tokens, COLUMNS), device=CUDA) + base).int() for _ in range(sets)]
        outs = [torch.empty(tokens, COLUMNS, 256, dtype=torch.bfloat16, device=CUDA) for _ in range(3)]
        raw = [torch.empty(tokens, COLUMNS, 264, dtype=torch.uint8, device=CUDA) for _ in range(3)]
        ours = median([partial(lookup_rows, table, ids[i], outs[i % 3]) for i in range(sets)], 24)
        packed = median([partial(lookup_rows, table, ids[i], raw[i % 3]) for i in range(sets)], 24)
        theirs = peers_medians([peers.lookups(table, ROWS, ids[i]) for i in range(sets)], 24)
        count = tokens * COLUMNS
        yield row("look-up", tokens, ours, theirs, count * (264 + 512) / GB_S / 1e3)
        yield row("look-up, left packed", tokens, packed, {}, count * 2 * 264 / GB_S / 1e3)


def bench_hash(peers: Peers) -> Iterator[dict[str, Any]]:
    config: Any = SimpleNamespace(  # the configuration proper needs pydantic
        vocab_size=16_000_000,
        layer_ids=(1, 14),
        max_ngram_size=4,
        n_heads=8,
        compressed_vocab_size=99_092,
        num_embeddings=(384_006_168, 384_016_682),
    )
    layout = HashLayout.from_config(config)
    ids = torch.randint(0, 99_092, (129_280,), dtype=torch.int32)
    ids[0] = 99_091
    token_map = TokenMap(ids, 2)
    constants, definition = HashConstants.of(layout, token_map, CUDA), TorchHasher(layout, token_map, CUDA)
    for tokens in (1, 16, 256, 1024):
        batch = TokenBatch(
            torch.randint(0, 129_280, (tokens,), device=CUDA),
            torch.randint(0, 9, (tokens,), device=CUDA),
            torch.arange(tokens + 1, dtype=torch.int32, device=CUDA),
            torch.randint(0, 129_280, (tokens, 3), device=CUDA),
        )
        out = hash_ids(batch, constants)
        assert torch.equal(out, definition(batch)), "hash ids differ from their definition"
        ours = replay([lambda batch=batch, out=out: hash_ids(batch, constants, out)] * 24)
        theirs = {name: replay([call] * 24) for name, call in peers.hashes(batch, constants).items()}
        yield row("hash (decode)", tokens, ours, theirs, 0.0)


def bench_wkv(n: int) -> Iterator[dict[str, Any]]:
    codes = (torch.randn(n, K, device=CUDA) * 0.5).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.randint(118, 124, (n // 32, K // 32), dtype=torch.uint8, device=CUDA)
    whole = formats.dequantize_weight(codes, scale).bfloat16()
    copies = max(2, 3 * 25_600 // n)
    device = torch.device("cuda", 0)
    chip = detect(device)
    assert chip is not None
    # A tensor-parallel shard is a projection of fewer outputs: only their number matters here.
    plain = [W8A16Wkv(WkvSpec(K, n // 2, 1, Parallel.single()), device, chip) for _ in range(copies)]
    kept = [
        W8A16Wkv(WkvSpec(K, n // 2, 1, Parallel.single(), keep_bf16=True), device, chip) for _ in plain[::2] + plain[:1]
    ]
    for wkv in plain + kept:
        wkv.load(codes, scale)
    name = "WKV" if n == 25_600 else f"WKV, N={n}"
    for tokens in (1, 16, 64, 128, 256, 1024, 4096) if n == 25_600 else (1, 16, 32, 64, 256):
        rows = [torch.randn(tokens, COLUMNS, K // COLUMNS, device=CUDA).bfloat16() for _ in range(2)]
        out = torch.empty(tokens, n, dtype=torch.bfloat16, device=CUDA)
        launches = 24 if tokens <= 256 else 6
        ours = median([partial(w.forward, rows[i % 2], out=out) for i, w in enumerate(plain)], launches)
        copy = median([partial(w.forward, rows[i % 2], out=out) for i, w in enumerate(kept)], launches)
        dense = [whole.clone() for _ in range(len(kept))]
        flat = [x.flatten(1) for x in rows]
        blas = median([partial(torch.mm, flat[i % 2], w.T, out=out) for i, w in enumerate(dense)], launches)
        del dense
        reference = (flat[0][:256].double() @ whole[:2048].double().T).float().bfloat16()
        got = plain[0].forward(rows[0])[:256, :2048]
        equal = float((got == reference).float().mean())
        assert equal >= 0.99, f"WKV of {tokens} tokens: {equal:.4f} equal to the float64 result"
        moved = max(n * K / GB_S / 1e3, 2 * tokens * n * K / TFLOP_S / 1e6)
        yield row(name, tokens, ours, {"cuBLAS bf16": blas}, moved)
        moved = max((1 if tokens <= copy_tokens(n) else 2) * n * K / GB_S / 1e3, moved)
        yield row(f"{name}, bf16 copy", tokens, copy, {"cuBLAS bf16": blas}, moved)


def row(part: str, tokens: int, ours: float, theirs: dict[str, float], floor: float) -> dict[str, Any]:
    """One line of the table, printed as it is made."""
    target = TARGETS.get((part, tokens))
    others = ", ".join(f"{name} {time:.2f} ({time / ours:.2f}x)" for name, time in theirs.items())
    verdict = "" if target is None else f"  target {target} {'met' if ours <= target else 'MISSED'}"
    print(f"{part:24} T={tokens:<6} {ours:9.2f} us  floor {floor:8.2f}{verdict}  {others}", flush=True)
    return {"part": part, "T": tokens, "ours": ours, "theirs": theirs, "floor": floor, "target": target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers/x"), help="the peers' wheels, unpacked")
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()
    torch.manual_seed(0)
    peers = Peers(options.peers)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "without:", peers.missing or "nothing", flush=True)
    lines = [line for n in (25_600, 12_800, 6_400, 3_200) for line in bench_wkv(n)]
    lines += [*bench_gate(peers), *bench_hash(peers), *bench_lookup(peers)]
    if options.json is not None:
        options.json.write_text(json.dumps(lines, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
