"""The command as a process: what it imports, and what it does when its streams or its user go away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "engram_core"]


def start(*args: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=120, check=False, **options)  # type: ignore[call-overload,no-any-return]


def one_line(err: str) -> str:
    assert len(err.splitlines()) == 1, err
    return err.strip()


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["--version"], ["run", "--seed", "x"]], ids=" ".join)
def test_help_and_usage_load_no_torch(args: list[str]) -> None:
    code = (
        "import sys\nfrom engram_core.cli import main\n"
        f"main({args!r})\nassert 'torch' not in sys.modules and 'numpy' not in sys.modules, 'heavy'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_module_and_exit_code() -> None:
    done = start("run", "--text", "/no/such/file")
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr).startswith("engram-core: /no/such/file: No such file or directory")


def test_closed_standard_input(small: list[str]) -> None:
    small[small.index("--text") + 1] = "-"
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND, *small], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert one_line(done.stderr) == "engram-core: standard input is closed; --text - reads the text from it"


def test_closed_standard_output() -> None:
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "--version"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, one_line(done.stderr)) == (2, "engram-core: standard output is closed")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has /dev/full")
def test_full_disk() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "--version"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, one_line(done.stderr)) == (2, "engram-core: standard output: No space left on device")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["backends"], ["--help"]], ids=" ".join)
def test_broken_pipe(args: list[str], unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [*COMMAND, *args],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert done.returncode == 141
    assert one_line(done.stderr) == "engram-core: the reader of standard output went away (broken pipe)"


def test_interrupt(small: list[str]) -> None:
    small[small.index("--text") + 1] = "-"
    child = subprocess.Popen(
        [*COMMAND, *small],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A job in the background is started with SIGINT ignored, and a child would inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        status = Path(f"/proc/{child.pid}/wchan")
        deadline = time.monotonic() + 60
        # It waits for its text, in a read of the pipe.
        while "pipe" not in status.read_text() and time.monotonic() < deadline:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
        child.wait()
    assert (child.returncode, out) == (130, "")
    assert one_line(err) == "engram-core: interrupted"


def test_names_that_are_no_utf8_do_not_break_the_message(tmp_path: Path) -> None:
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    done = subprocess.run([*COMMAND, "run", "--text", name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "caf" in one_line(done.stderr)


def test_ascii_terminal(small: list[str]) -> None:
    done = start(*small, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
