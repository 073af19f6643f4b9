"""What needs a process of its own: the kernels interpreted, the kernels compiled for AMD GPUs, several real ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent
LDS = {"gfx90a": 64 << 10, "gfx942": 64 << 10, "gfx950": 160 << 10}
# What a matrix product becomes on each: bf16, and block-scaled fp8.
MATRIX = {
    "gfx90a": {"w8a16": "v_mfma_f32_16x16x16bf16_1k"},
    "gfx942": {"w8a16": "v_mfma_f32_16x16x16_bf16"},
    "gfx950": {"w8a16": "v_mfma_f32_16x16x32_bf16", "scaled": "v_mfma_scale_f32_16x16x128_f8f6f4"},
}


def run(*command: str, interpret: bool, timeout: int = 280) -> str:
    """Output of a Python process; fails with all that it said."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("TRITON_", "PYTEST_"))}
    environment |= {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_every_kernel_in_the_interpreter() -> None:
    root = HERE.parents[1]
    quiet = ("-q", "-p", "no:cacheprovider", "-p", "no:xdist")
    config = ("-c", str(root / "pyproject.toml"), "--rootdir", str(root))
    said = run("-m", "pytest", *quiet, *config, str(HERE / "interpreted"), interpret=True)
    print(said)  # shown where something later fails
    assert " passed" in said.splitlines()[-1]
    # Before 3.8 the interpreter has no tl.dot_scaled: that file alone is skipped.
    old = tuple(int(part) for part in version("triton").split(".")[:2]) < (3, 8)
    assert ("1 skipped" if old else " passed in") in said.splitlines()[-1]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_real_processes(size: int) -> None:
    run(str(HERE / "ranks.py"), str(size), interpret=True)


@pytest.mark.parametrize("gpu", sorted(LDS))
def test_every_kernel_compiles_for(gpu: str) -> None:
    """Matrix instructions, no spills and no scratch, local memory within the limit, waves of 64, subnormals kept."""
    kernels: list[dict[str, Any]] = json.loads(run(str(HERE / "cross_compile.py"), gpu, interpret=False))["kernels"]
    seen = set()
    for kernel in kernels:
        name = kernel["name"]
        kind = name.split()[0]
        seen.add(kind)
        spilled = {key: kernel[key] for key in ("vgpr_spills", "sgpr_spills", "scratch")}
        assert not any(spilled.values()), f"{name}: {spilled}"
        assert kernel["wave"] == 64, name
        assert kernel["lds"] <= LDS[gpu], f"{name}: {kernel['lds']} bytes of local memory"
        assert kernel["denormals"] == 3, f"{name}: float32 subnormals are flushed"
        assert kernel["matrix"] == ([MATRIX[gpu][kind]] if kind in MATRIX[gpu] else []), name
        if kind in ("pack", "finish", "w8a16", "scaled") and "dim=96" not in name:
            assert any("dwordx4" in load for load in kernel["loads"]), f"{name}: loads are narrow: {kernel['loads']}"
        if kind in ("unpack", "scaled"):  # a row of 264 bytes is a multiple of 8
            assert any("dwordx2" in load for load in kernel["loads"]), f"{name}: loads are narrow: {kernel['loads']}"
    sliced = {"pack", "finish"} if gpu != "gfx90a" else set()
    assert seen == {"gate", "hash", "look-up", "order", "unpack"} | sliced | set(MATRIX[gpu])
