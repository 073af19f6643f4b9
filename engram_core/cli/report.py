"""What the main job found, as data and as text."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from engram_core._version import __version__
from engram_core.cli.judge import GateValues, Verdict
from engram_core.formats import packed_width

if TYPE_CHECKING:
    from engram_core.cli.inputs import Text, Tokens
    from engram_core.config import EngramConfig
    from engram_core.registry import Decision


@dataclass(frozen=True)
class LayerReport:
    """One layer; ``seconds``: hash_all_layers, lookup, wkv, gate, over all steps."""

    layer_id: int
    tokens: int
    table_rows: int
    distinct_rows: int
    seconds: dict[str, float]
    gate: GateValues
    checks: list[Verdict]

    @property
    def worst(self) -> float:
        return max(check.worst for check in self.checks)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


@dataclass(frozen=True)
class RunReport:
    """The whole run. ``seconds``: setup, steps, check, total; ``checked``: tokens whose WKV and gate were compared."""

    decision: Decision
    config: EngramConfig
    text: Text
    tokens: Tokens
    seed: int
    steps: list[tuple[int, int]]
    checked: int
    layers: list[LayerReport]
    seconds: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(layer.passed for layer in self.layers)

    def to_json(self) -> dict[str, Any]:
        """Stable keys; a difference that no tolerance allows is ``null`` in place of JSON's missing infinity."""
        return {
            "engram_core": __version__,
            "passed": self.passed,
            "backend": self.decision.to_json(),
            "config": self.config.model_dump(mode="json"),
            "text": {"source": self.text.source, "characters": len(self.text.content), "tokens": len(self.tokens.ids)},
            "tokenizer": {
                "source": self.tokens.source,
                "ids": len(self.tokens.map),
                "compressed": self.tokens.map.size,
                "fingerprint": self.tokens.map.fingerprint,
            },
            "seed": self.seed,
            "steps": [stop - start for start, stop in self.steps],
            "checked_tokens": self.checked,
            "layers": [
                {
                    "layer_id": layer.layer_id,
                    "tokens": layer.tokens,
                    "table_rows": layer.table_rows,
                    "distinct_rows": layer.distinct_rows,
                    "seconds": layer.seconds,
                    "gate": {**asdict(layer.gate), "source": "oracle"},
                    "checks": [{**asdict(c), "worst": _finite(c.worst)} for c in layer.checks],
                    "worst": _finite(layer.worst),
                    "passed": layer.passed,
                }
                for layer in self.layers
            ],
            "seconds": self.seconds,
            "peak_memory_bytes": peak_memory(),
        }

    def print(self) -> None:
        """The same for people."""
        console = Console(highlight=False, markup=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        for name, value in self._summary().items():
            console.print(f"{name:<10} {value}")
        console.print(self._layer_table())
        console.print(self._check_table())
        for line in self._notes():
            console.print(line)

    def _summary(self) -> dict[str, str]:
        decision, config, tokens = self.decision, self.config, self.tokens
        width = packed_width(config.head_dim)
        rows, size = config.num_embeddings, sum(config.num_embeddings) * width / 2**30
        sizes = config.max_ngram_size - 1
        interpreted = ", in Triton's interpreter" if decision.interpreted else ""
        layers = ", ".join(map(str, config.layer_ids))
        columns = f"{config.columns} columns x {config.head_dim} ({sizes} n-gram sizes x {config.n_heads} heads)"
        drawn = f"{size:.2f} GiB; random weights, seed {self.seed}"
        return {
            "backend": f"{decision.name} on {decision.device}{interpreted}: {decision.why}",
            "model": f"layers {layers}; hidden {config.hidden_size} x {config.hc_mult} copies; {columns}; "
            f"eps {config.rms_norm_eps:g}",
            "tables": f"engram_vocab_size {config.vocab_size:,}: {' + '.join(f'{n:,}' for n in rows)} rows x {width} "
            f"bytes, {drawn}",
            "text": f"{self.text.source}: {len(self.text.content):,} characters, {len(tokens.ids):,} tokens",
            "token map": f"{len(tokens.map):,} ids -> {tokens.map.size:,}, SHA-256 {tokens.map.fingerprint[:16]}...",
            "steps": f"{' + '.join(str(b - a) for a, b in self.steps)} tokens, the last one with its WKV run ahead",
        }

    def _notes(self) -> list[str]:
        s, checked = self.seconds, f"{self.checked:,} of {len(self.tokens.ids):,} tokens"
        times = (
            f"setup {s['setup']:.1f} s, steps {s['steps']:.1f} s, check {s['check']:.1f} s, total {s['total']:.1f} s"
        )
        lines = [
            "hash: one pass for all layers.",
            f"gate mean and spread (standard deviation): by the oracle, over {checked} and all copies.",
            "worst: the largest difference as a multiple of its tolerance; exact comparisons allow none.",
            f"{times}; peak memory {peak_memory() / 2**30:.2f} GiB",
        ]
        for layer in self.layers:
            lines += [f"layer {layer.layer_id}, {c.name}: {c.message}" for c in layer.checks if not c.passed]
        name = self.decision.name
        verdict = f"passed: {name} agrees with" if self.passed else f"FAILED: {name} differs from"
        return [*lines, f"{verdict} the float64 oracle"]

    def _layer_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in (
            "layer",
            "tokens",
            "distinct\nrows",
            "hash",
            "look-up",
            "WKV",
            "gate",
            "gate\nmean",
            "gate\nspread",
        ):
            table.add_column(name, justify="right", no_wrap=True)
        for layer in self.layers:
            s, gate = layer.seconds, layer.gate
            table.add_row(
                str(layer.layer_id),
                f"{layer.tokens:,}",
                f"{layer.distinct_rows:,}",
                *(_duration(s[key]) for key in ("hash_all_layers", "lookup", "wkv", "gate")),
                f"{gate.mean:.4f}",
                f"{gate.std:.4f}",
            )
        return table

    def _check_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("layer", justify="right")
        table.add_column("check")
        table.add_column("compared", justify="right")
        table.add_column("worst", justify="right")
        table.add_column("verdict")
        for layer in self.layers:
            for check in layer.checks:
                exact = check.name not in ("wkv", "gate")
                table.add_row(
                    str(layer.layer_id),
                    check.name,
                    f"{check.tokens:,} of {layer.tokens:,} tokens",
                    f"{check.worst:.3f}" if not exact else ("equal" if check.passed else "differs"),
                    "passed" if check.passed else "FAILED",
                )
        return table


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes (Linux counts it in KiB)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _finite(value: float) -> float | None:
    return value if value < float("inf") else None
