"""The measurement of tables of the real size, tried on small ones, so that one command does it on a card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "real_size.py"


@pytest.mark.slow
def test_tables_and_a_checkpoint(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    options = ("--backend", "reference", "--device", "cpu", "--limit-gib", "0.01", "--json", str(report))
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), "host", "file", "checkpoint", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(report.read_text())
    assert [facts["wrong_rows"] for facts in found.values()] == [0, 0, 0]
    assert found["file"]["seconds_to_open"] < 1
    assert found["host"]["full_size"] is False
