"""A tiny case of the main job on one backend, in a process of its own: a crash of a driver is then a line of a report.

``python -m engram_core.cli.tiny NAME`` prints one JSON object and is what :func:`run_apart` starts.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import Any, Final

TIMEOUT_SECONDS: Final = 300
_TOKENS: Final = 40
_STEP: Final = 16


def run_apart(name: str, timeout: float = TIMEOUT_SECONDS) -> dict[str, Any]:
    """Run the case on backend ``name``: ``{"name", "passed", "message"}``, whatever becomes of the process."""
    command = [sys.executable, "-m", "engram_core.cli.tiny", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"name": name, "passed": False, "message": f"no answer within {timeout:g} s"}
    return {"name": name, **_read(done.returncode, done.stdout, done.stderr)}


def _read(code: int, out: str, err: str) -> dict[str, Any]:
    lines = out.strip().splitlines()
    if code == 0 and lines:
        result: dict[str, Any] = json.loads(lines[-1])
        return result
    if code < 0:
        return {"passed": False, "message": f"killed by {signal.Signals(-code).name}"}
    # A traceback's last line says what; a table of backends begins with it.
    said = err.strip().splitlines() or [f"exit code {code}"]
    return {"passed": False, "message": said[-1] if "Traceback" in err else said[0]}


def case(name: str) -> dict[str, Any]:
    """Run it here; ``message``: the worst comparison, or the failed ones."""
    from engram_core.cli.job import run_steps, spans
    from engram_core.cli.judge import Judge, sample
    from engram_core.config import EngramConfig
    from engram_core.layout import table_rows
    from engram_core.memory import EngramMemory
    from engram_core.registry import get_backend
    from engram_core.synthetic import Synthetic
    from engram_core.tokens import TokenMap

    config = EngramConfig(
        hidden_size=256,
        hc_mult=2,
        layer_ids=(1, 2),
        num_embeddings=table_rows(101, (1, 2), 3, 4),
        vocab_size=101,
        max_ngram_size=3,
        n_heads=4,
        head_dim=64,
        compressed_vocab_size=64,
        pad_token_id=2,
        rms_norm_eps=1e-20,
    )
    tokens = [(7 * i * i + 3) % 64 for i in range(_TOKENS)]
    token_map = TokenMap.identity(64, 2)
    backend = get_backend(name)
    synthetic = Synthetic(config, 0)
    memory = EngramMemory(config, token_map, backend, max_tokens=_STEP, prefetch_rows=_STEP)
    synthetic.load(memory)
    judge = Judge(synthetic, token_map, tokens, sample(_TOKENS, None))
    for layer in memory.layers.values():
        judge.check_layout(layer.wkv)
    run_steps(memory, synthetic, tokens, spans(_TOKENS, _STEP), judge)
    verdicts = [(layer_id, verdict) for layer_id in config.layer_ids for verdict in judge.judge(layer_id)[0]]
    failed = [
        f"layer {layer_id}, {verdict.name}: {verdict.message}" for layer_id, verdict in verdicts if not verdict.passed
    ]
    worst = max(verdict.worst for _, verdict in verdicts)
    fine = f"{_TOKENS} tokens, 2 layers on {backend.device}; worst difference {worst:.2f} of its tolerance"
    return {"passed": not failed, "message": "; ".join(failed) or fine}


if __name__ == "__main__":
    print(json.dumps(case(sys.argv[1])))
