"""Listing, doctoring, and what happens where the backend asked for can't run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from engram_core import __version__
from engram_core.cli import doctor as doctor_module
from engram_core.cli import tiny
from engram_core.info import Reason


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine without one, wherever the tests run."""
    monkeypatch.setattr("engram_nvidia.probe.probe", lambda: (Reason("no-device", "no GPU, says the test", "buy one"),))


def test_version(cli: Callable[..., Any]) -> None:
    assert cli("--version") == (0, f"engram-core {__version__}\n", "")


def test_no_command_shows_the_commands(cli: Callable[..., Any]) -> None:
    done = cli()
    assert done.code == 2
    for command in ("run", "backends", "doctor", "conformance"):
        assert command in done.out


def test_backends(cli: Callable[..., Any], no_gpu: None) -> None:
    done = cli("backends")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert any(line.split()[:2] == ["nvidia", "unavailable"] and "no GPU, says the test" in line for line in lines)
    assert any("fix: buy one" in line for line in lines)
    assert any(line.split()[:3] == ["*", "reference", "available"] for line in lines)
    assert lines[-1] == "chosen: reference on cpu: no accelerator is visible"


def test_backends_as_data(cli: Callable[..., Any], no_gpu: None) -> None:
    data = json.loads(cli("backends", "--json").out)
    assert data["chosen"] == "reference"
    by_name = {entry["name"]: entry for entry in data["backends"]}
    assert {"reference", "nvidia", "rocm"} <= set(by_name)
    assert by_name["reference"]["chosen"]
    reason = {"code": "no-device", "message": "no GPU, says the test", "fix": "buy one"}
    assert by_name["nvidia"]["reasons"] == [reason]
    assert "gate" in by_name["reference"]["info"]["capabilities"]


def test_backends_says_why_none_is_chosen(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_BACKEND", "refrence")
    done = cli("backends")
    assert done.code == 0
    assert done.out.splitlines()[-1].startswith("none chosen: ENGRAM_BACKEND=refrence: no backend of that name")


def test_run_on_a_backend_that_cannot(cli: Callable[..., Any], small: list[str], no_gpu: None) -> None:
    for flags in ([], ["--json"]):
        done = cli(*small, "--backend", "nvidia", *flags)
        assert (done.code, done.out) == (3, "")
        lines = done.err.splitlines()
        assert lines[0] == "engram-core: backend 'nvidia' cannot run here."
        assert lines[1].split()[:2] == ["nvidia", "unavailable"]
        assert "no GPU, says the test" in lines[1]
        assert any(line.split()[:2] == ["reference", "available"] for line in lines)
        assert lines[-1].endswith("Details: engram-core doctor")


def test_run_on_a_backend_from_the_environment_that_cannot(
    cli: Callable[..., Any], small: list[str], no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGRAM_BACKEND", "nvidia")
    done = cli(*small)
    assert (done.code, done.out) == (3, "")
    assert done.err.startswith("engram-core: ENGRAM_BACKEND=nvidia cannot run here.\n")
    # The option is stronger than the variable.
    assert cli(*small, "--backend", "reference").code == 0


def test_run_on_a_backend_with_a_wrong_name(cli: Callable[..., Any], small: list[str]) -> None:
    done = cli(*small, "--backend", "refrence")
    assert (done.code, done.out) == (2, "")
    assert done.err.splitlines()[0].endswith("no backend of that name is installed; did you mean 'reference'?")


def test_run_on_a_model_that_the_backend_refuses(
    cli: Callable[..., Any], small: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = (Reason("too-odd", "this model is too odd", "another model"),)
    monkeypatch.setattr("engram_reference.backend.ReferenceBackend.supports", lambda self, problem: reasons)
    done = cli(*small)
    assert (done.code, done.out) == (3, "")
    assert "too-odd: this model is too odd (fix: another model)" in done.err


def test_misspelt_variable_is_one_line(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    import warnings

    monkeypatch.setattr("engram_core._environ._warned", set())
    monkeypatch.setenv("ENGRAM_BACKED", "reference")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        done = cli("backends")
    assert done.code == 0
    assert done.line.startswith("warning: ENGRAM_BACKED is not a variable of engram-core")
    assert "ENGRAM_BACKEND" in done.line


def test_doctor(cli: Callable[..., Any], no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGRAM_BACKEND", "reference")
    done = cli("doctor")
    assert (done.code, done.err) == (0, "")
    for part in (f"engram-core {__version__}", "python ", "torch ", "triton ", "pluggy ", "device nodes", "buy one"):
        assert part in done.out
    assert "ENGRAM_BACKEND=reference" in done.out
    assert "chosen: reference on cpu: asked for by ENGRAM_BACKEND=reference" in done.out


def test_doctor_as_data(cli: Callable[..., Any], no_gpu: None) -> None:
    data = json.loads(cli("doctor", "--json").out)
    assert list(data) == [
        "engram_core",
        "python",
        "platform",
        "packages",
        "devices",
        "environment",
        "chosen",
        "why",
        "backends",
        "runs",
    ]
    assert set(data["packages"]) == set(doctor_module.PACKAGES)
    assert data["packages"]["flashinfer-python"] is None or data["packages"]["flashinfer-python"][0].isdigit()
    assert {"accelerator", "cuda", "nodes"} <= set(data["devices"])
    assert data["runs"] is None
    assert all("facts" in entry for entry in data["backends"])


def test_doctor_runs_a_tiny_case_apart(cli: Callable[..., Any], no_gpu: None) -> None:
    done = cli("doctor", "--run", "--json")
    assert done.code == 0, done.out
    runs = {entry["name"]: entry for entry in json.loads(done.out)["runs"]}
    assert runs["reference"]["passed"]
    assert "40 tokens, 2 layers on cpu; worst difference" in runs["reference"]["message"]
    assert "nvidia" not in runs


def test_doctor_reports_failures(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiny, "run_apart", lambda name: {"name": name, "passed": False, "message": "killed by SIGSEGV"})
    done = cli("doctor", "--run")
    assert done.code == 1
    assert "FAILED: killed by SIGSEGV" in done.out


def test_doctor_with_nothing_to_run_is_no_success(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    monkeypatch.setenv("ENGRAM_DISABLE_BACKENDS", "reference,nvidia,rocm")
    done = cli("doctor", "--run")
    assert done.code == 3
    assert "(no backend is available)" in done.out


def test_doctor_without_a_working_torch(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("libtorch_cpu.so: cannot open shared object file")

    monkeypatch.setattr("engram_core._devices.accelerator", broken)
    done = cli("doctor")
    assert done.code == 0
    assert "none chosen: OSError: libtorch_cpu.so: cannot open shared object file" in done.out


CRASHES = {
    "a signal": ((-11, "", ""), "killed by SIGSEGV"),
    "a traceback": (
        (1, "", "Traceback (most recent call last):\n  x\nRuntimeError: no kernel\n"),
        "RuntimeError: no kernel",
    ),
    "a refusal": ((1, "", "backend 'x' cannot run here.\n  table\n"), "backend 'x' cannot run here."),
    "silence": ((7, "", ""), "exit code 7"),
    "no answer": ((0, "", ""), "exit code 0"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_a_crash_of_the_tiny_case_is_a_line(name: str) -> None:
    (code, out, err), message = CRASHES[name]
    assert tiny._read(code, out, err) == {"passed": False, "message": message}


def test_the_tiny_case_has_an_end() -> None:
    assert tiny.run_apart("reference", timeout=0.01) == {
        "name": "reference",
        "passed": False,
        "message": "no answer within 0.01 s",
    }


def test_the_tiny_case_reports_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    from engram_reference.wkv import ReferenceWkv

    right = ReferenceWkv.forward
    monkeypatch.setattr(ReferenceWkv, "forward", lambda self, rows, **kw: -right(self, rows, **kw))
    result = tiny.case("reference")
    assert not result["passed"]
    assert result["message"].startswith("layer 1, wkv: kv[")
