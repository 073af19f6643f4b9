"""Engram inside decoders: tokens do not depend on how the work is cut, and a wrong lookback would be noticed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "examples" / "decoder"


def run(script: str, *change: str) -> subprocess.CompletedProcess[str]:
    """The example in a process of its own, after ``change``, statements that spoil something."""
    code = ["import sys", f"sys.path.insert(0, {str(FOLDER)!r})", *change, f"import {script}"]
    return subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            "\n".join([*code, f"sys.exit({script}.main(['--backend', 'reference']))"]),
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},  # beside other tests, more threads wait for each other
    )


@pytest.mark.slow
def test_every_way_of_batching_gives_the_same_tokens() -> None:
    done = run("generate")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same tokens") == 7
    assert "58 tokens reused, 36 drafts kept, 27 taken back" in done.stdout


NO_LOOKBACK = """
import engram_core
class Batch(engram_core.TokenBatch):
    def __post_init__(self):
        super().__post_init__()
        self.lookback.fill_(-1)
engram_core.TokenBatch = Batch
"""


@pytest.mark.slow
def test_a_lookback_that_is_forgotten_is_noticed() -> None:
    done = run("generate", NO_LOOKBACK)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("OTHER TOKENS") == 7


LOOKBACK_OF_WHAT_RAN = """
import engine
usual = engine.Engine._batch
def batch(self, requests, parts):
    made = usual(self, requests, parts)
    for row, (request, part) in enumerate(zip(requests, parts)):
        ran = getattr(request, "ran", [])
        for s in range(min(len(ran), made.lookback.shape[1])):
            made.lookback[row, s] = ran[-1 - s]
        request.ran = ran + list(part)
    return made
engine.Engine._batch = batch
"""


@pytest.mark.slow
def test_a_lookback_with_drafts_that_were_taken_back_is_noticed() -> None:
    done = run("generate", LOOKBACK_OF_WHAT_RAN)
    assert done.returncode == 1, done.stderr
    assert re.findall(r"^  (.*?) +OTHER TOKENS", done.stdout, re.M) == ["speculation", "all together"]


@pytest.mark.slow
def test_inside_deepseek_v4_of_transformers() -> None:
    pytest.importorskip("transformers", minversion="5.24")
    done = run("deepseek_v4")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "recomputed without it: same tokens" in done.stdout
    spoilt = run("deepseek_v4", NO_LOOKBACK)
    assert spoilt.returncode == 1, spoilt.stderr
    assert "OTHER TOKENS" in spoilt.stdout


def test_hooks_take_padding_on_the_left() -> None:
    pytest.importorskip("transformers", minversion="5.24")
    code = """
import torch, deepseek_v4
from generate import make_memory, small_config
from torch import nn
memory = make_memory("reference", "cpu", small_config())
model = nn.Module()
model.layers = nn.ModuleList(nn.Identity() for _ in range(4))
model.forward = lambda input_ids, cache=None: None
hooks = deepseek_v4.EngramHooks(memory, model, model.layers, 0)
found = []
class Cache:
    seen = 0
    def get_seq_length(self): return self.seen
def ids(*chunks):
    cache, rows = Cache(), []
    for chunk in chunks:
        tokens = torch.tensor(chunk)
        hooks._begin(model, (), {"input_ids": tokens, "cache": cache})
        rows.append(hooks._step.hash_ids[1].view(*tokens.shape, -1))
        hooks._end()
        cache.seen += tokens.shape[1]
    return torch.cat(rows, 1)
alone = ids([[5, 6, 7, 8, 9]])
padded = ids([[11, 12, 13, 14, 15, 16], [0, 0, 0, 5, 6, 7]], [[17], [8]], [[18], [9]])
assert torch.equal(padded[1, 3:], alone[0])
assert not torch.equal(padded[0, 3:], alone[0])
cache = Cache(); cache.seen = 3
try:
    hooks._begin(model, (), {"input_ids": torch.tensor([[5]]), "cache": cache})
except RuntimeError as error:
    assert "the cache holds 3 tokens" in str(error)
else:
    raise AssertionError
"""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(FOLDER)!r})\n{code}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
