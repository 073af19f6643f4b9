"""The measurement of a decode step, tried on a tiny model, so that one command does it on a card."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parent.parent.parent / "benchmarks"
QUICK = ("--device", "cpu", "--rounds", "2", "--tokens", "2")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("step")


def test_every_decoder_alone_in_line_and_ahead(tmp_path: Path) -> None:
    report, text = tmp_path / "step.json", tmp_path / "step.md"
    options = [*QUICK, "--ranks", "1,4", "--variants", "ahead,deferred,last"]
    options += ["--json", str(report), "--markdown", str(text)]
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FOLDER / "step.py"), *options],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert found["failures"] == []
    cases = {(step["ranks"], step["decoder"], step["variant"]) for step in found["steps"]}
    assert len(cases) == len(found["steps"]) == 2 * 3 * 4
    assert [part["ranks"] for part in found["parts"]] == [1, 4]
    # N = 1280 and K = 512 of two layers; rank 0 of four holds a quarter.
    assert found["parts"][0]["wkv_bytes"] == 4 * found["parts"][1]["wkv_bytes"] == 2 * 1280 * 512 * (1 + 1 / 1024)
    assert text.read_text() == done.stdout.removesuffix("\n")
    assert "the same bits in line and in every variant" in done.stdout


def test_a_variant_that_gives_other_bits_is_a_failure(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = script.Bench._step

    def wrong(self: Any, memory: Any, *rest: Any) -> torch.Tensor:
        out = right(self, memory, *rest)
        if memory is not None and memory.prefetch is not None:
            out.view(torch.int16).view(-1)[-1] += 1
        return out

    monkeypatch.setattr(script.Bench, "_step", wrong)
    collecting = script.gc.isenabled()
    assert script.main([*QUICK, "--ranks", "1", "--decoders", "weights"]) == 1
    assert script.gc.isenabled() is collecting
    assert "ahead differs from in line" in capsys.readouterr().err


def test_the_bound_and_the_hidden_share_are_judged_where_they_apply(script: ModuleType) -> None:
    report = importlib.import_module("_report")
    step = {"variant": "ahead", "bound_us": 20.0, "added_us": 20.0, "idle": True, "possible": 1.0, "hidden": 0.95}
    assert (report.within(step), report.hides(step)) == (True, True)
    assert report.within({**step, "added_us": 20.1}) is False
    assert report.hides({**step, "hidden": 0.949}) is False
    assert report.hides({**step, "possible": 0.9, "hidden": 0.5}) is None
    assert report.hides({**step, "idle": False}) is None
    for other in ({"variant": "inline"}, {"bound_us": None}):
        assert (report.within(step | other), report.hides(step | other)) == (None, None)


def test_refused_options(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    for options, word in (
        (("--variants", "fast"), "fast"),
        (("--modes", "graph"), "a CPU has only sync"),
        (("--tokens", "0"), "positive numbers"),
        (("--rounds", "1"), "at least 2"),
    ):
        with pytest.raises(SystemExit) as stopped:
            script.main(["--device", "cpu", *options])
        assert stopped.value.code == 2
        assert word in capsys.readouterr().err
