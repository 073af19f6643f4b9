"""Rows of a table in host memory, beside vLLM and SGLang in one process: captured, with host ids, with hot rows.

    python benchmarks/host.py [--peers .peers/x] [--json FILE] [--markdown FILE] [--tune]
                              [--text TOKENS.npy --token-map FILE --hot FILE [--hot-more IDS.npy]]

One layer's table at full size (``--vocab-size`` scales it down), random finite rows. Times are of look-ups to bf16:

* captured: one graph of several look-ups, the median over replays. "new": every look-up has ids of its own, as in a
  model; "again": the same ids time after time, whose address translations the bus may still hold.
* eager: one call until its rows are there, by the wall clock, the ids in device memory alone or in CPU memory too.
* text: ids of consecutive tokens of real text (``--text``, as benchmarks/hot_rows.py saves them), without hot rows and
  with them in a cache. ``--hot-more``: further cached rows, for a second, larger cache.

Every way of reading is first compared, bit for bit, with rows gathered on the CPU; ends with 1 where they differ.
``--tune``: the figures from which the backend's ``Tuning`` was chosen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _peers import Peers

from engram_core import EngramConfig, HashLayout, HotRows, Parallel, TableSpec, TokenBatch, TokenMap, get_backend
from engram_core.formats import rows_to_bf16
from engram_core.gpu.hot import HotCache
from engram_core.hashing import NgramHasher, TorchHasher, with_lookback

CUDA = torch.device("cuda", 0)
COLUMNS, WIDTH = 24, 264
TOKENS = (1, 16, 64, 256, 1024, 4096)
SETS = {1: 64, 16: 64, 64: 64, 256: 32, 1024: 12, 4096: 6}
CAPTURED = {1: 3.2, 16: 6.0, 64: 13.0, 256: 48.0, 1024: 420.0, 4096: 2100.0}
EAGER = {1024: 300.0, 4096: 900.0}
_BLOCK = 2**16


class Bench:
    """The table and what is measured on it; ``lines`` collects every figure."""

    def __init__(self, vocab_size: int, peers: Peers) -> None:
        self.config = EngramConfig.deepseek_v41(vocab_size=vocab_size)
        self.layout, self.backend, self.peers = HashLayout.from_config(self.config), get_backend(None, CUDA), peers
        self.lines: list[dict[str, Any]] = []
        sizes = self.layout.head_sizes(0)
        self.rows = self.config.num_embeddings[0]
        start = time.perf_counter()
        self.table: Any = self.backend.create_table(TableSpec(self.rows, 256, sizes, "host", Parallel.single()))
        made = time.perf_counter()
        block = torch.randint(0, 126, (_BLOCK, WIDTH), dtype=torch.uint8)  # finite codes
        block[:, 256:] = torch.randint(117, 123, (_BLOCK, 8), dtype=torch.uint8)
        for begin in range(0, self.rows, _BLOCK):
            part = self.table.packed[begin : begin + _BLOCK]
            part.copy_(block[: part.shape[0]])
            part[:, :8] = torch.arange(begin, begin + part.shape[0]).view(torch.uint8).view(-1, 8)  # no two alike
        done = time.perf_counter()
        print(f"{self.rows:,} rows, {self.rows * WIDTH / 1e9:.1f} GB: made and registered in {made - start:.1f} s,"
              f" filled in {done - made:.1f} s", flush=True)  # fmt: skip
        self.first = torch.tensor([0, *np.cumsum(sizes)[:-1]], device=CUDA)
        self.size = torch.tensor(sizes, device=CUDA)

    def uniform(self, sets: int, tokens: int) -> torch.Tensor:
        draw = torch.rand(sets, tokens, COLUMNS, device=CUDA, dtype=torch.float64)
        return ((draw * self.size).long() + self.first).to(torch.int32)

    def wrong(self, ids: torch.Tensor, **options: Any) -> None:
        """End where a look-up differs from rows gathered on the CPU."""
        want, got = rows_to_bf16(self.table.packed[ids.cpu().long()]), self.table.lookup(ids, **options).cpu()
        same = (got.view(torch.int16) == want.view(torch.int16)) | (got.isnan() & want.isnan())
        if not bool(same.all()):
            sys.exit(f"FAILED: {ids.shape[0]} tokens, {sorted(options)}: rows differ from those in memory")

    def captured(self, call: Callable[[torch.Tensor], Callable[[], object]], ids: torch.Tensor,
                 renew: Callable[[], torch.Tensor] | None) -> float:  # fmt: skip
        """Microseconds a look-up: ``call(ids[i])`` for every ``i`` in one graph, ids renewed before each replay."""
        calls = [call(part) for part in ids]
        calls[0]()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for each in calls:
                each()
        times = []
        for _ in range(9):
            if renew is not None:
                ids.copy_(renew())
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / len(calls))
        return statistics.median(times)

    def ours(self, tokens: int, background: bool = False) -> Callable[[torch.Tensor], Callable[[], object]]:
        out = torch.empty(tokens, COLUMNS, 256, dtype=torch.bfloat16, device=CUDA)
        return lambda ids: lambda: self.table.lookup(ids, out=out, background=background)

    def eager(self, tokens: int, host: bool) -> float:
        """Microseconds from the call until the rows are there."""
        out = torch.empty(tokens, COLUMNS, 256, dtype=torch.bfloat16, device=CUDA)
        times = []
        for _ in range(9):
            ids = self.uniform(1, tokens)[0]
            given = ids.cpu() if host else None
            torch.cuda.synchronize()
            start = time.perf_counter()
            self.table.lookup(ids, out=out, host_ids=given)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
        return statistics.median(times)

    def line(self, part: str, tokens: int, **figures: Any) -> None:
        self.lines.append({"part": part, "T": tokens, **figures})
        print(f"{part:22} T={tokens:<5}", *(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}"
              for k, v in figures.items()), flush=True)  # fmt: skip

    def placements(self) -> None:
        """Captured, uniform ids, beside the peers; then eager."""
        for tokens in TOKENS:
            self.wrong(self.uniform(1, tokens)[0])
            ids = self.uniform(SETS[tokens], tokens)
            names = list(self.peers.lookups(self.table._readable, self.rows, ids[0]))
            ways: dict[str, Callable[[torch.Tensor], Callable[[], object]]] = {"ours": self.ours(tokens)}
            for name in names:
                ways[name] = lambda x, name=name: self.peers.lookups(self.table._readable, self.rows, x)[name]
            new = {n: self.captured(w, ids, lambda t=tokens: self.uniform(SETS[t], t)) for n, w in ways.items()}
            new["ours, beside other work"] = self.captured(
                self.ours(tokens, background=True), ids, lambda t=tokens: self.uniform(SETS[t], t))  # fmt: skip
            same = ids[:1].expand(SETS[tokens], -1, -1)
            again = {f"{name} again": self.captured(way, same, None) for name, way in ways.items()}
            self.line("captured", tokens, **new, **again, target=CAPTURED[tokens])
        for tokens in (256, *EAGER):
            ids = self.uniform(1, tokens)[0]
            self.wrong(ids, host_ids=ids.cpu())
            figures = {"device ids": self.eager(tokens, False), "host ids": self.eager(tokens, True)}
            self.line("eager", tokens, **figures, target=EAGER.get(tokens, "-"))
        identity = TokenMap.identity(self.config.compressed_vocab_size, self.config.pad_token_id)
        hasher = TorchHasher(self.layout, identity, torch.device("cpu"))
        for tokens in (1024, 4096):
            batch = with_lookback(TokenBatch.single(torch.randint(0, 90_000, (tokens,))), 3)
            times = []
            for _ in range(9):
                start = time.perf_counter()
                hasher(batch)
                times.append((time.perf_counter() - start) * 1e6)
            self.line("hash on the CPU", tokens, both_layers=statistics.median(times))

    def text(self, tokens_file: Path, map_file: Path, hot_file: Path, more: Path | None) -> None:
        """Real text: without a cache, with hot rows, and with more of them."""
        token_map, hot = TokenMap.load(map_file), HotRows.load(hot_file)
        hot.check(self.layout, token_map)
        read = torch.from_numpy(np.load(tokens_file).astype(np.int64))
        batch = TokenBatch.single(read).to(CUDA)
        stream = NgramHasher(self.config, token_map, self.backend)(batch)[:, 0]
        best = hot.most(self.config.layer_ids[0], self.rows).long()
        caches = [("no cache", None, 0.0), ("0.6 GB", best[: int(0.6e9) // WIDTH], 0.6e9)]
        if more is not None:
            known = torch.from_numpy(np.load(more)).long()
            room = int(6e9) // WIDTH
            # Whichever rows of the learnt 6 GB this text never asks for are as good as any others.
            others = torch.randperm(self.rows)[: room - len(known)]
            caches.append(("6 GB", torch.cat([known, others[~torch.isin(others, stream.flatten().cpu())]]), 6e9))
        for name, rows, nbytes in caches:
            if rows is not None:
                # In the table's own place: there is no memory for a second table of this size.
                index = -(-self.rows // 64) * 12
                self.table._hot = HotCache(self.table.packed, int(nbytes) + index, CUDA)
                start = time.perf_counter()
                kept = self.table.store_cache(rows)
                print(f"{name}: {kept:,} rows cached in {time.perf_counter() - start:.1f} s, index {index:,} bytes")
            for tokens in TOKENS:
                self._text(name, tokens, stream, rows is not None)
        self.table._hot = None

    def _text(self, name: str, tokens: int, stream: torch.Tensor, cached: bool) -> None:
        sets, draw = SETS[tokens], torch.Generator().manual_seed(tokens)

        def chunks() -> torch.Tensor:
            begin = torch.randint(0, len(stream) - tokens, (sets,), generator=draw).tolist()
            return torch.stack([stream[b : b + tokens] for b in begin])

        ids = chunks()
        self.wrong(ids[0])
        if cached:
            self.table.read_hits()
        spent = self.captured(self.ours(tokens), ids, chunks)
        served, asked = self.table.read_hits() if cached else (0, 1)
        plain = self.captured(self.ours(tokens), ids, lambda: self.uniform(sets, tokens))
        self.line(f"text, {name}", tokens, us=spent, hits=f"{served / asked:.1%}", uniform_us=plain)

    def tune(self) -> None:
        """What the backend's Tuning was chosen from."""
        plain = self.table._tuning
        for tokens in (16, 64, 128, 256, 1024, 4096):
            sets = SETS.get(tokens, 64)
            for ordered in (0, 2**40):
                for in_flight in (64, 128, 256, 512):
                    self.table._tuning = replace(plain, ordered=ordered, in_flight=in_flight, in_order=in_flight)
                    spent = self.captured(self.ours(tokens, True), self.uniform(sets, tokens),
                                          lambda t=tokens, n=sets: self.uniform(n, t))  # fmt: skip
                    self.line("tune: order", tokens, ordered=not ordered, in_flight=in_flight, us=spent)
        import engram_core.gpu.gather as gather

        piece = gather._PIECE_ROWS
        for tokens in (256, 512, 1024, 2048, 4096):
            self.table._tuning = plain
            self.line("tune: no host ids", tokens, us=self.eager(tokens, False))
            for rows in (6144, 12288, 24576, 49152, 98304):
                for share in (0.0, 0.2, 0.3, 0.4):
                    gather._PIECE_ROWS = rows
                    self.table._tuning = replace(plain, device_share=share, cpu_tokens=0)
                    self.table.host_ids_from = 0
                    self.line("tune: host ids", tokens, piece=rows, share=share, us=self.eager(tokens, True))
        gather._PIECE_ROWS, self.table._tuning, self.table.host_ids_from = piece, plain, plain.cpu_tokens


def markdown(lines: list[dict[str, Any]]) -> Iterator[str]:
    """The figures as tables, one for each set of columns."""
    for part in dict.fromkeys(tuple(k for k in line if k != "part") for line in lines):
        yield "| | " + " | ".join(part) + " |\n|---|" + "---|" * len(part)
        for line in lines:
            if tuple(k for k in line if k != "part") == part:
                cells = (f"{line[k]:.4g}" if isinstance(line[k], float) else str(line[k]) for k in part)
                yield f"| {line['part']} | " + " | ".join(cells) + " |"
        yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, default=Path(".peers/x"), help="the peers' wheels, unpacked")
    parser.add_argument("--vocab-size", type=int, default=16_000_000)
    for name in ("json", "markdown", "text", "token-map", "hot", "hot-more"):
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    peers = Peers(options.peers)
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "without:", peers.missing or "nothing", flush=True)
    bench = Bench(options.vocab_size, peers)
    try:
        bench.placements()
        if options.tune:
            bench.tune()
        if options.text is not None:
            bench.text(options.text, options.token_map, options.hot, options.hot_more)
    finally:
        if options.json is not None:
            options.json.write_text(json.dumps(bench.lines, indent=1), encoding="utf-8")
        if options.markdown is not None:
            options.markdown.write_text("\n".join(markdown(bench.lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
