"""The suite from outside: one command in an empty folder, every verdict, every exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fake
import pytest


def test_reference_passes_from_an_empty_folder_and_leaves_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    run = fake.run(folder, "--engram-backend=reference", "-k", "hash-golden or lifecycle-same-object")
    assert run.code == 0, run.output
    assert run.summary == "engram conformance 1.0: reference 8 passed"
    assert not list(folder.iterdir()), "the run left files"
    assert set(run.verdicts.values()) == {"passed"}
    assert run.report is not None
    assert run.report["packages"]["torch"]
    assert run.report["device"] == "cpu"


def test_a_project_with_settings_of_its_own_does_not_disturb(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:logging\nfilterwarnings = error\n")
    (folder / "test_own.py").write_text("def test_own(): assert False\n")
    run = fake.run(folder, "--engram-backend=reference", "-k", "hash-strided", "-W", "ignore::pytest.PytestWarning")
    assert run.code == 0, run.output
    assert list(run.verdicts) == ["hash-strided"]


def test_workers_report_as_one(tmp_path: Path) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    run = fake.run(tmp_path / "a", "--engram-backend=reference", "-n", "2", "-k", "hash-golden")
    assert run.code == 0, run.output
    assert run.summary == "engram conformance 1.0: reference 7 passed"


FAULTS = """
def post_wkv(self, hidden_states, kv, gate, *, wkv=None, token_mask=None, num_kv_tokens=None, out=None):
    given = {"token_mask": token_mask, "num_kv_tokens": num_kv_tokens, "out": out}
    out = super().post_wkv(hidden_states, kv, gate, wkv=wkv, **given)
    return out.add_(1) if gate.dim == 96 else out
def create_wkv(self, spec):
    if spec.hc_mult == 8:
        raise UnsupportedConfigError("no", (Reason("copies", "8 copies; at most 4 are possible"),))
    return super().create_wkv(spec)
def supports(self, problem):
    reasons = super().supports(problem)
    return reasons + ((Reason("copies", "8 copies; at most 4 are possible"),) if problem.config.hc_mult == 8 else ())
"""

EXPECTED = """
version = 1
[[expected_failure]]
case = "gate-random-dim-96-copies-1"
reason = "adds one; https://example.org/1"
[[expected_failure]]
case = "gate-random-dim-48-copies-1"
reason = "passes by now"
"""


def test_every_verdict(tmp_path: Path) -> None:
    missing = ("PLACEMENT_FILE", "WKV_BF16", "SEQUENCE_PARALLEL")
    info = f"capabilities=BASE.capabilities - {{{', '.join(f'Capability.{name}' for name in missing)}}}"
    folder = fake.install(tmp_path / "site", FAULTS, info, EXPECTED)
    keys = "dim-96 or dim-48 or copies-8 or placement-file or bf16-tokens-1 or sequence-9 or two-devices or own-stream"
    run = fake.run(tmp_path / "run", "--engram-backend=fake", "-k", keys, folder=folder)
    verdicts = run.verdicts
    assert run.code == 1, run.output
    assert verdicts["gate-random-dim-48-copies-2"] == "passed"
    assert verdicts["gate-random-dim-96-copies-2"] == "failed"
    assert "interval of CONTRACT 6" in run.reason("gate-random-dim-96-copies-2")
    assert verdicts["gate-random-dim-96-copies-1"] == "expected-failure"
    assert verdicts["gate-random-dim-48-copies-1"] == "failed"  # it passed, and that is not what was written down
    assert "XPASS(strict)" in run.reason("gate-random-dim-48-copies-1")
    for case in ("wkv-geometry-copies-8", "step-whole-copies-8", "parallel-tensor-copies-8-over-2"):
        assert verdicts[case] == "refused", case
        assert "at most 4 are possible" in run.reason(case)
    for case in ("rows-placement-file", "step-placement-file", "parallel-sequence-9-over-2"):
        assert verdicts[case] == "refused", f"{case}: {run.reason(case)}"
        assert run.reason(case)
    assert verdicts["wkv-bf16-tokens-1"] == "failed"
    assert "wkv_bf16 is not declared, and was not refused" in run.reason("wkv-bf16-tokens-1")
    assert verdicts["lifecycle-two-devices"] == "not-run"
    assert "two devices are needed" in run.reason("lifecycle-two-devices")
    assert "refusals verified, 1 expected failure" in run.summary
    assert run.report is not None
    assert (run.report["distribution"], run.report["distribution_version"]) == ("fake-engram", "0.3")


LIARS = """
def supports(self, problem):
    return ()
def create_wkv(self, spec):
    if spec.hc_mult == 2:
        raise UnsupportedConfigError("not these", (Reason("copies", "2 copies"),))
    if spec.hc_mult == 4 and spec.in_features == 384:
        raise UnsupportedConfigError("nor these", (Reason("copies", "4 copies"),))
    return super().create_wkv(spec)
"""


def test_refusals_that_are_none(tmp_path: Path) -> None:
    """Undeclared and done all the same; refused without a word from supports(); a core case refused."""
    info = "capabilities=BASE.capabilities - {Capability.PLACEMENT_FILE, Capability.GATE}"
    folder = fake.install(tmp_path / "site", LIARS, info)
    keys = "placement-file or geometry-copies-2 or step-chunks or gate-dot"
    run = fake.run(tmp_path / "run", "--engram-backend=fake", "-k", keys, folder=folder)
    assert run.code == 1
    assert set(run.verdicts.values()) == {"failed"}, run.verdicts
    assert "supports() gives no reason" in run.reason("step-placement-file")
    assert "supports() gave no reason" in run.reason("wkv-geometry-copies-2")
    assert "supports() gave no reason" in run.reason("step-chunks")
    assert "can't be declared away" in run.reason("gate-dot-zero")


def test_a_core_case_cannot_be_expected_to_fail(tmp_path: Path) -> None:
    entry = 'version = 1\n[[expected_failure]]\ncase = "gate-dot-zero"\nreason = "x"\n'
    folder = fake.install(tmp_path / "site", expectations=entry)
    run = fake.run(tmp_path / "run", "--engram-backend=fake", "-k", "gate-dot-zero", folder=folder)
    assert run.code == 4
    assert "gate-dot-zero is a core case; it can't be expected to fail" in run.output


@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ((), 4, "the suite needs --engram-backend=NAME"),
        (("--engram-backend=refrence",), 4, "did you mean 'reference'?"),
        (("--engram-backend=fake",), 3, "reference  available"),
        (("--engram-backend=reference", "--engram-device=cuda:99"), 4, "cuda:99"),
        (("--engram-backend=reference", "-k", "no-such-case"), 1, "no case was executed"),
        (("--engram-backend=reference", "-k", "stream-late or graph-replay"), 1, "no case was executed"),
    ],
    ids=["no-backend", "unknown", "unavailable", "no-device", "no-case", "nothing-to-run-here"],
)
def test_no_empty_green(tmp_path: Path, options: tuple[str, ...], code: int, says: str) -> None:
    info = 'device_types=("npu",)'
    folder = fake.install(tmp_path / "site", info=info)
    run = fake.run(tmp_path / "run", *options, folder=folder)
    assert run.code == code, run.output
    assert says in run.output


def test_sizes_are_limited(tmp_path: Path) -> None:
    run = fake.run(
        tmp_path / "a", "--engram-backend=reference", "--engram-size=small", "-k", "share-dim-48 or dot-plus"
    )
    assert run.verdicts == {"gate-share-dim-48-copies-4": "not-run", "gate-dot-plus-2": "passed"}
    assert "size real; this run goes up to small" in run.reason("gate-share-dim-48-copies-4")


QUIET = """
import sys, time
began = time.perf_counter()
import engram_conformance.plugin
spent = time.perf_counter() - began
heavy = {"torch", "numpy", "pydantic", "pluggy", "engram_core", "_pytest", "pytest"} & set(sys.modules)
outside = {name for name in sys.modules if name.startswith("engram_") and not name.startswith("engram_conformance")}
print(spent, sorted(heavy), sorted(outside))
"""


def test_the_plugin_imports_only_the_standard_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUIET], env=fake.environment(), capture_output=True, text=True, check=True, timeout=60
    )
    spent, rest = done.stdout.split(" ", 1)
    assert rest.strip() == "[] []", f"the plugin imports {rest}"
    assert float(spent) < 0.2, f"importing the plugin takes {spent} s"


OWN = """
import sys

def test_own():
    assert 1 + 1 == 2

def test_nothing_heavy_was_loaded():
    assert not {"torch", "numpy", "pydantic", "engram_core", "engram_conformance.session"} & set(sys.modules)

def test_hooks(request):
    manager = request.config.pluginmanager
    import engram_conformance.plugin as plugin
    hooks = {caller.name for caller in manager.get_hookcallers(plugin) or ()}
    assert hooks == {"pytest_addoption", "pytest_configure"}
    assert not manager.has_plugin("engram-conformance-session")
"""


def test_an_unrelated_project_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(OWN)
    outputs = []
    for options in (fake.plugin_option(), ["-p", "no:engram_conformance"]):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *options]
        # An editable install, and only that, makes pytest warn about its import hook.
        command += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        command += ["-k", "not hooks"] if "no:" in options[1] else []
        done = subprocess.run(
            command, cwd=tmp_path, env=fake.environment(), capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stdout
        outputs.append(done.stdout)
    assert "3 passed" in outputs[0]
    assert "2 passed" in outputs[1]
    assert "engram" not in outputs[0], "the plugin wrote into an unrelated project's output"
