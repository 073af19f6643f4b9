"""What needs a process of its own: the kernels interpreted, and compiled for NVIDIA GPUs that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# Shared memory that a program may take, and what a matrix product becomes.
GPUS = {
    "8.0": (163 << 10, "mma.sync"),
    "9.0": (227 << 10, "wgmma"),
    "10.0": (227 << 10, "tcgen05.mma"),
    "12.0": (99 << 10, "mma.sync"),
}


def run(*command: str, interpret: bool) -> str:
    """Output of a Python process; fails with all that it said."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], env=environment, capture_output=True, text=True, timeout=290
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_kernel_in_the_interpreter() -> None:
    config = ("-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-p", "no:xdist")
    said = run("-m", "pytest", "-q", *config, str(HERE / "interpreted"), interpret=True)
    assert " passed" in said.splitlines()[-1], said
    assert "skipped" not in said.splitlines()[-1], said


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_every_kernel_compiles_for(gpu: str) -> None:
    """Matrix instructions, no spills, no stack, shared memory within the limit, subnormals kept, operands in place."""
    room, many = GPUS[gpu]
    kernels: list[dict[str, Any]] = json.loads(run(str(HERE / "cross_compile.py"), gpu, interpret=False))["kernels"]
    wanted = {"_few_kernel": ["mma.sync"], "_many_kernel": [many]}
    for kernel in kernels:
        name, symbol = kernel["name"], kernel["kernel"]
        assert (kernel["spills"], kernel["stack"]) == (0, 0), f"{name}: spills {kernel}"
        assert kernel["shared"] <= room, f"{name}: {kernel['shared']} bytes of shared memory"
        assert kernel["matrix"] == wanted.get(symbol, []), name
        assert kernel["flushed"] == 0, f"{name}: float32 subnormals are flushed"
        if symbol in wanted or symbol == "_expand_kernel":
            assert kernel["decoded"] > 0, f"{name}: weights are not decoded two at a time"
        if symbol in wanted:
            assert kernel["loop_shuffles"] == 0, f"{name}: an operand is moved between lanes in the main loop"
        assert (kernel["waits"] > 0) == (gpu == "9.0" and symbol == "_many_kernel"), name
    assert {k["kernel"] for k in kernels} == {
        "_gate_kernel",
        "_few_kernel",
        "_many_kernel",
        "_sum_kernel",
        "_expand_kernel",
        "_lookup_kernel",
        "_order_kernel",
        "_operands_kernel",
        "_hash_kernel",
    }
