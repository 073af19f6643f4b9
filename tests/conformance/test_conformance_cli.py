"""``engram-core conformance``: verdicts, files and exit codes, in the process that a shell would start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake
from engram_conformance import report


def cli(*arguments: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engram_core", "conformance", *arguments],
        env=fake.environment(*([folder] if folder else [])),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_done(tmp_path: Path) -> None:
    json_path, html_path = tmp_path / "r.json", tmp_path / "r.html"
    done = cli(
        "reference", "-k", "hash-golden", "--report", str(json_path), "--html", str(html_path), "--device", "cpu"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "engram conformance 1.0: reference 7 passed"
    assert len(report.read(json_path).cases) == 7
    assert "<!doctype html>" in html_path.read_text()
    merged = tmp_path / "m.html"
    again = cli("--merge", str(json_path), str(json_path), "--html", str(merged))
    assert again.returncode == 0, again.stderr
    assert "Compatibility" in merged.read_text()
    assert again.stdout.count("reference 7 passed") == 2


def test_a_check_failed(tmp_path: Path) -> None:
    body = "def create_hasher(self, layout, token_map):\n    inner = super().create_hasher(layout, token_map)\n"
    folder = fake.install(tmp_path, body + "    return lambda batch: inner(batch) + 1")
    done = cli("fake", "-k", "hash-golden", folder=folder)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed hash-golden-tiny: golden hash_ids[0, 0, 0] is 11, reference 10" in " ".join(done.stderr.split())
    assert "fake 0 passed, 7 failed" in done.stdout


def test_a_crash_is_told(tmp_path: Path) -> None:
    body = "def create_hasher(self, layout, token_map):\n    import os\n    os._exit(11)"
    done = cli("fake", "-k", "hash-golden or lifecycle-same", folder=fake.install(tmp_path, body))
    assert done.returncode == 1
    assert "the suite ended without a report" in done.stderr


def test_the_backend_cannot_run_here(tmp_path: Path) -> None:
    done = cli("fake", folder=fake.install(tmp_path, info='device_types=("npu",)'))
    assert done.returncode == 3
    assert "backend 'fake' cannot run here" in done.stderr
    assert "available" in done.stderr


def test_bad_usage(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.json"
    wrong.write_text("{}")
    for arguments, says in (
        (("refrence",), "did you mean 'reference'?"),
        (("reference", "nvidia"), "one backend is judged at a time"),
        (("reference", "--size", "huge"), "small, real or full"),
        (("reference", "--html", "/no/such/folder/x.html"), "/no/such/folder"),
        (("reference", "--device", "cuda:99"), "cuda:99"),
        (("--merge", str(wrong)), "wrong.json"),
        (("--merge", str(wrong), "-k", "x"), "--merge takes"),
        (("reference", "-k", "no-such-case"), "no case matches"),
    ):
        done = cli(*arguments)
        assert done.returncode == 2, f"{arguments}: {done.returncode}\n{done.stderr}"
        assert says in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
