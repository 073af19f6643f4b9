"""A decode step of synthetic decoder layers with and without Engram: time added, and the share that is hidden.

    python benchmarks/step.py [--decoders weights,latency,compute] [--tokens 1,4,16,64] [--ranks 1,4,8]
        [--modes graph,eager,sync] [--variants ahead] [--json FILE] [--markdown FILE]

Layers 0 to 13 of ``_decoder.py`` run around Engram layers 1 and 14 of DeepSeek-V4.1-Flash's geometry: one layer before
the first gate, 13 before the second, where the step ends. In one process, in turn: the decoder alone, with Engram in
line (``prefetch_rows=0``), and with each of ``--variants``; every step has new token ids, put into static buffers
before it is timed, and a cold L2. Modes: ``graph``, one captured graph a step; ``eager``, operation by operation behind
a spin kernel long enough for the host to launch all of it (a host that keeps ahead of its device); ``sync``, operation
by operation on an idle device, so that the host's own time counts (no target).

Target (shared/PERFORMANCE.md, "Step"): added <= gates + max(0, (decoder's + WKV's weight bytes) / 4.3 TB/s - decoder
alone) + 3 % of the decoder alone; and where the decoder leaves bandwidth idle, hidden >= 95 %, where hidden =
1 - (added - gates - hash) / (look-ups + WKVs), each part measured by itself. Added is the median over the rounds of
(step with - step without), of one round each. "possible": the share that can be hidden at all, since the first layer's
chain has one decoder layer to hide behind. Ends with 1 if any variant's hidden states are not the in-line ones, bit for
bit. On a CPU a tiny model is run, by the wall clock, to try the script.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from _arms import VARIANTS, Arms, Inputs, checkpoint, config, parallel
from _decoder import KINDS, TINY, Decoder
from _options import arguments
from _report import markdown
from _timing import Clock, Run, added, in_turn

from engram_core import EngramConfig, EngramMemory

BYTES_A_US = 4.3e6
ALONE = "decoder"
STARTED = time.perf_counter()
Memories = dict[str, tuple[EngramMemory, torch.cuda.Stream | None]]


class Bench:
    """One geometry on one device: parts, checks and steps; ``failures``: whatever came out wrong."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        self.clock = Clock(device)
        self.config: EngramConfig = config(options.vocab_size, device.type == "cpu", options.placement == "host")
        kinds = TINY if device.type == "cpu" else KINDS
        self.layers = max(self.config.layer_ids)
        dim = self.config.hidden_size
        self.decoders = {
            name: Decoder(kinds[name], self.layers, dim, device, lambda: self.clock.spin(options.spin_us))
            for name in options.decoders
        }
        self.weights = checkpoint(self.config)
        # One for the decoder alone and one for parts: cuBLAS keeps a workspace for each stream it has seen.
        self.alone, self.apart = self._stream(), self._stream()
        self.parts: list[dict[str, Any]] = []
        self.steps: list[dict[str, Any]] = []
        self.failures: list[str] = []
        self.table_bytes = 0

    def run(self, ranks: int) -> None:
        """All parts and steps of rank 0 of ``ranks``."""
        options = self.options
        group = parallel(ranks, lambda: self.clock.spin(options.gather_us))
        most = max(64, *options.tokens)
        arms = Arms(self.config, self.weights, options.backend, self.device, options.placement, group, most)
        memories: Memories = {}
        for name in dict.fromkeys(["inline", *options.variants]):
            memory = arms.memory(VARIANTS[name])
            # Made right after the memory's own: torch deals streams from a pool of 32, and these must differ.
            memories[name] = memory, self._stream(VARIANTS[name].decoder)
            memory.warmup(options.tokens)
            self.clock.settle()
        self.table_bytes = max(self.table_bytes, arms.table_bytes)
        self._say(f"{ranks} ranks: {arms.table_bytes / 1e9:.1f} GB of tables, {len(memories)} memories")
        for tokens in options.tokens:
            inputs = Inputs(tokens, self.config, self.device)
            parts = self._parts(memories[options.variants[0]][0], inputs, ranks)
            self.parts.append(parts)
            for kind, decoder in self.decoders.items():
                for mode in options.modes:
                    self.steps += self._steps(memories, decoder, inputs, parts, {"decoder": kind, "mode": mode})
        self._say(f"{ranks} ranks: done")

    def save(self) -> str:
        """Write the files that were asked for, and return the markdown."""
        options = self.options
        facts = {
            "device": torch.cuda.get_device_name(self.device) if self.clock.cuda else "CPU, a tiny model",
            "torch": torch.__version__,
            "date": f"{datetime.now(UTC):%Y-%m-%d, %H:%M} UTC",
            "vocab_size": self.config.vocab_size,
            "table_bytes": self.table_bytes,
            "seconds": round(time.perf_counter() - STARTED, 1),
            **{name: getattr(options, name) for name in ("backend", "placement", "rounds", "spin_us", "gather_us")},
            "decoders": {name: decoder.kind.what for name, decoder in self.decoders.items()},
            "variants": {name: VARIANTS[name].what for name in dict.fromkeys(["inline", *options.variants])},
            "parts": self.parts,
            "steps": self.steps,
            "failures": self.failures,
        }
        text = markdown(facts)
        if options.json is not None:
            options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        if options.markdown is not None:
            options.markdown.write_text(text, encoding="utf-8")
        return text

    def _stream(self, priority: int = 0) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device, priority=priority) if self.clock.cuda else None

    def _say(self, what: str) -> None:
        print(f"[{time.perf_counter() - STARTED:5.1f} s] {what}", file=sys.stderr, flush=True)

    def _parts(self, memory: EngramMemory, inputs: Inputs, ranks: int) -> dict[str, Any]:
        """Both layers' hash, look-ups, WKVs and gates, each by itself after one tiny kernel that is subtracted."""
        tokens, layers, batch = len(inputs.batch), list(memory.layers.values()), inputs.batch
        ids = memory.hasher(batch).clone()
        shape = (tokens, self.config.columns, self.config.head_dim)
        rows = [torch.randn(shape, dtype=torch.bfloat16, device=self.device) for _ in layers]
        kv = [layer.project(each) for layer, each in zip(layers, rows, strict=True)]
        packed = [layer.wkv.accepts_packed for layer in layers]
        got = [layer.table.lookup(ids[:, i], packed=packed[i]) for i, layer in enumerate(layers)]
        tick = torch.zeros(1, device=self.device)
        backend = memory.backend

        def lookups() -> None:
            for i, layer in enumerate(layers):
                layer.table.lookup(ids[:, i], out=got[i], background=True, packed=packed[i])

        def products() -> None:
            for layer, given, to in zip(layers, rows, kv, strict=True):
                layer.project(given, to)

        def gates() -> None:
            for layer, each in zip(layers, kv, strict=True):
                backend.post_wkv(inputs.hidden, each, layer.gate, wkv=layer.wkv)

        def renew() -> None:
            inputs.renew()
            ids.copy_(memory.hasher(batch))

        work: dict[str, Callable[[], object]] = {
            "base": lambda: None, "hash": lambda: memory.hasher(batch), "lookup": lookups, "wkv": products,
            "gate": gates,
        }  # fmt: skip
        runs = {name: self._part(tick, call) for name, call in work.items()}
        times, _ = in_turn(runs, renew, self.clock, self.options.rounds, 200.0)
        base = times.pop("base")
        k, n = self.config.wkv_in_features, self.config.wkv_out_features // ranks
        share = len(layers) * n * k * (1 + 1 / 1024)  # codes, and a scale for each 32 x 32 of them
        return {"ranks": ranks, "T": tokens, "wkv_bytes": share} | {
            f"{name}_us": added(each, base)[1] for name, each in times.items()
        }

    def _part(self, tick: torch.Tensor, call: Callable[[], object]) -> Run:
        def both() -> torch.Tensor:
            tick.add_(1)
            call()
            return tick

        run = Run(both, self.apart)
        with run.on():
            both()
        self.clock.settle()
        return run.captured() if self.clock.cuda else run

    def _steps(
        self,
        memories: Memories,
        decoder: Decoder,
        inputs: Inputs,
        parts: dict[str, Any],
        case: dict[str, Any],
    ) -> Iterator[dict[str, Any]]:
        runs = {ALONE: Run(lambda: self._step(None, decoder, inputs), self.alone)}
        for name, (memory, stream) in memories.items():
            call = partial(self._step, memory, decoder, inputs, VARIANTS[name].deferred)
            runs[name] = Run(call, stream)
        for run in runs.values():
            with run.on():
                run.call()
            self.clock.settle()
        if case["mode"] == "graph":
            runs = {name: run.captured() for name, run in runs.items()}
        self._check(runs, inputs, f"{parts['ranks']} ranks, {case['decoder']}, {case['mode']}, T={parts['T']}")
        lead = {"graph": 300.0, "eager": None, "sync": 0.0}[case["mode"]]
        times, host = in_turn(runs, inputs.renew, self.clock, self.options.rounds, lead)
        alone = statistics.median(times[ALONE])
        chains = parts["lookup_us"] + parts["wkv_us"]
        room = alone / self.layers * min(self.config.layer_ids)
        moved = (decoder.bytes + parts["wkv_bytes"]) / BYTES_A_US
        bound = parts["gate_us"] + max(0.0, moved - alone) + 0.03 * alone
        for name in memories:
            low, middle, high = added(times[name], times[ALONE])
            yield {
                "ranks": parts["ranks"], "T": parts["T"], **case, "variant": name, "alone_us": alone,
                "added_us": middle, "added_low_us": low, "added_high_us": high,
                "bound_us": None if case["mode"] == "sync" else bound,
                "hidden": 1 - max(0.0, middle - parts["gate_us"] - parts["hash_us"]) / chains,
                "possible": 1 - max(0.0, chains / 2 - room) / chains, "idle": decoder.kind.idle,
                "idle_bandwidth": 1 - decoder.bytes / BYTES_A_US / alone,
                "host_us": host[name], "host_alone_us": host[ALONE],
            }  # fmt: skip

    def _step(
        self, memory: EngramMemory | None, decoder: Decoder, inputs: Inputs, deferred: str | None = None
    ) -> torch.Tensor:
        hidden = inputs.hidden
        if memory is None:
            for layer in range(self.layers):
                hidden = decoder(layer, hidden)
            return hidden
        with memory.step(inputs.batch, defer_chains=deferred is not None) as step:
            for layer in range(self.layers):
                hidden = decoder(layer, step.inject(layer, hidden), step.start_chain, deferred == "last")
            return step.inject(self.layers, hidden)

    def _check(self, runs: dict[str, Run], inputs: Inputs, where: str) -> None:
        """In line and ahead give the same bits, finite, not the decoder's own, and others for other tokens."""
        seen: list[torch.Tensor] = []
        for _ in range(2):
            inputs.renew()
            self.clock.settle()
            out: dict[str, torch.Tensor] = {}
            for name, run in runs.items():
                with run.on():
                    out[name] = run.call().clone()
                self.clock.settle()
            wanted = out["inline"]
            seen.append(wanted)
            if not bool(wanted.isfinite().all()):
                self.failures.append(f"{where}: hidden states that are not finite")
            if float((wanted != out[ALONE]).float().mean()) < 0.5:
                self.failures.append(f"{where}: the hidden states are nearly those of the decoder alone")
            for name, each in out.items():
                if name != ALONE and not torch.equal(each.view(torch.int16), wanted.view(torch.int16)):
                    self.failures.append(f"{where}: {name} differs from in line")
        if torch.equal(*seen):
            self.failures.append(f"{where}: other tokens gave the same hidden states")


@torch.inference_mode()
def main(given: Sequence[str] | None = None) -> int:
    """Measure, print the tables, write the files; 1 if results differ."""
    options = arguments(given, __doc__)
    device = torch.device(options.device)
    if device.type != "cpu":
        device = torch.device(device.type, device.index or 0)
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    bench = Bench(options, device)
    gc.freeze()  # what stands is not looked at again: a capture collects garbage first
    collecting = gc.isenabled()
    gc.disable()  # no collection falls into a time
    try:
        for ranks in options.ranks:
            bench.run(ranks)
            gc.collect()  # the memories' tables
            text = bench.save()  # each time: a run that is cut short leaves what it has
    finally:
        gc.unfreeze()
        if collecting:
            gc.enable()
    print(text)
    for failure in bench.failures:
        print(f"FAILED: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
