"""The vendors' probes on machines that this one is not: every reason has the value seen, the value needed and a fix."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from engram_nvidia import probe as nvidia
from engram_rocm import probe as rocm

from engram_core import _devices, _toolchain
from engram_core._devices import cuda_count  # the true one: conftest replaces the module's

CPU, CUDA, ROCM = ("2.13.0+cpu", None, None), ("2.13.0+cu130", "13.0", None), ("2.13.0+rocm7.1", None, "7.1.5")


@pytest.fixture
def machine(monkeypatch):
    """A machine with a toolchain; its torch build, device nodes and device count are set by the call."""

    def install(build, nodes=(), count=0, triton="3.6.0", compiler="/usr/bin/gcc"):
        monkeypatch.setattr(_toolchain, "torch_build", lambda: build)
        monkeypatch.setattr(_toolchain, "triton_version", lambda: triton)
        monkeypatch.setattr(_toolchain, "compiler", lambda: compiler)
        monkeypatch.setattr(_toolchain, "python_header", lambda: Path(__file__))
        monkeypatch.setattr(_devices, "cuda_count", lambda: count)
        for node in nodes:
            (_devices.DEV / node).touch()

    return install


# probe, what the machine has, codes of the reasons, words of one message
CASES = [
    (nvidia, {"build": CUDA, "nodes": ("nvidiactl", "nvidia0"), "count": 1}, [], ""),
    (nvidia, {"build": CPU}, ["torch-build", "no-device"], "torch 2.13.0+cpu is a CPU build; a CUDA build is needed"),
    (nvidia, {"build": ROCM, "nodes": ("kfd",), "count": 1}, ["torch-build", "no-device"], "a ROCm build (HIP 7.1.5)"),
    (nvidia, {"build": CPU, "nodes": ("nvidiactl",)}, ["torch-build"], "a CUDA build is needed"),
    (nvidia, {"build": CUDA}, ["no-device"], "no NVIDIA GPU is visible"),
    (nvidia, {"build": CUDA, "nodes": ("nvidiactl",)}, ["driver"], "counts 0 CUDA devices"),
    (
        nvidia,
        {"build": CPU, "triton": None, "compiler": None},
        ["torch-build", "no-device", "triton-missing", "no-compiler"],
        "a C compiler is needed",
    ),
    (
        nvidia,
        {"build": CUDA, "count": 1, "triton": "3.1.0"},
        ["triton-version"],
        "triton 3.1.0 is too old; triton >= 3.4 is needed",
    ),
    (rocm, {"build": ROCM, "nodes": ("kfd",), "count": 8}, [], ""),
    (rocm, {"build": CPU}, ["torch-build", "no-device"], "torch 2.13.0+cpu is a CPU build; a ROCm build is needed"),
    (rocm, {"build": CUDA, "nodes": ("nvidiactl",), "count": 1}, ["torch-build", "no-device"], "a CUDA 13.0 build"),
    (rocm, {"build": ROCM}, ["no-device"], "no AMD GPU is visible"),
    (rocm, {"build": ROCM, "nodes": ("kfd",)}, ["driver"], "counts 0 HIP devices"),
    (rocm, {"build": ROCM, "nodes": ("kfd",), "count": 1, "triton": None}, ["triton-missing"], "triton >= 3.4"),
]


@pytest.mark.parametrize(("probe", "has", "codes", "words"), CASES)
def test_every_reason_against_a_machine(machine, probe, has, codes, words):
    machine(**has)
    reasons = probe.probe()
    assert [reason.code for reason in reasons] == codes
    assert words in " ".join(reason.message for reason in reasons)
    assert all(reason.fix for reason in reasons)
    assert all(isinstance(value, str) for value in probe.facts().values())


@pytest.mark.parametrize("probe", [nvidia, rocm])
def test_in_the_interpreter_only_triton_counts(machine, monkeypatch, probe):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    machine(CPU, compiler=None)
    assert probe.probe() == ()
    machine(CPU, triton=None)
    assert [reason.code for reason in probe.probe()] == ["triton-missing"]


@pytest.mark.parametrize("probe", [nvidia, rocm])
def test_a_torch_that_can_not_be_imported(machine, monkeypatch, probe):
    machine(CPU, triton=None)

    def broken():
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(_toolchain, "torch_build", broken)
    reasons = probe.probe()
    assert [reason.code for reason in reasons] == ["torch-missing", "triton-missing"]
    assert "OSError: libcudart.so.13" in reasons[0].message


@pytest.mark.parametrize(
    ("probe", "build", "node", "variable"),
    [
        (nvidia, CUDA, "nvidiactl", "CUDA_VISIBLE_DEVICES"),
        (rocm, ROCM, "kfd", "HIP_VISIBLE_DEVICES"),
        (rocm, ROCM, "kfd", "ROCR_VISIBLE_DEVICES"),
    ],
)
def test_a_variable_that_hides_every_gpu_is_named(machine, monkeypatch, probe, build, node, variable):
    machine(build, (node,))
    monkeypatch.setenv(variable, "-1")
    (reason,) = probe.probe()
    assert (reason.code, reason.message) == (
        "device-hidden",
        f"{variable}=-1 hides every GPU; at least one must be visible",
    )
    assert reason.fix.startswith(f"unset {variable}")


def test_a_kfd_that_this_user_may_not_open(machine, monkeypatch):
    machine(ROCM, ("kfd",), count=1)
    monkeypatch.setattr(rocm.os, "access", lambda path, mode: False)
    (reason,) = rocm.probe()
    assert reason.code == "device-permission"
    assert "usermod -aG render,video" in reason.fix


@pytest.fixture
def build(monkeypatch):
    """torch's own answers: which build it is, and what its management library counts (-1: it can't)."""
    import torch

    def set_build(cuda, hip, managed):
        def initialises():
            raise AssertionError("torch.cuda.device_count() may initialise CUDA")

        monkeypatch.setattr(torch, "version", SimpleNamespace(cuda=cuda, hip=hip))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", initialises)
        monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: managed)
        monkeypatch.setattr(torch.cuda, "_device_count_amdsmi", lambda: managed)

    return set_build


def test_devices_are_counted_through_the_management_library(build):
    build("13.0", None, 4)
    assert cuda_count() == 4
    build(None, "7.1", 3)
    assert cuda_count() == 3
    build(None, None, 9)
    assert cuda_count() == 0


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("", 0), ("-1", 0), ("0,1,2,3", 2), ("MIG-a,MIG-b,MIG-c", 3)]
)
def test_without_nvml_device_nodes_are_counted(build, monkeypatch, visible, count):
    build("13.0", None, -1)
    for node in ("nvidiactl", "nvidia0", "nvidia1"):
        (_devices.DEV / node).touch()
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert cuda_count() == count


def test_without_amd_smi_the_kernel_topology_is_counted(build, monkeypatch):
    build(None, "7.1", -1)
    for node, simd in enumerate((0, 256, 256)):
        folder = _devices.KFD_TOPOLOGY / str(node)
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\nname\n")
    assert cuda_count() == 2
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "1")
    assert cuda_count() == 1


def test_a_management_library_that_fails_is_as_good_as_none(build, monkeypatch):
    import torch

    build("13.0", None, -1)
    monkeypatch.setattr(torch.cuda, "_device_count_nvml", lambda: 1 / 0)
    assert cuda_count() == 0


def test_the_toolchain_of_this_machine(tmp_path, monkeypatch):
    package = tmp_path / "triton"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    (package / "__init__.py").write_text('raise AssertionError("imported")\n__version__ = "3.5.1+rocm"\n')
    monkeypatch.delitem(__import__("sys").modules, "triton", raising=False)
    assert _toolchain.triton_version() == "3.5.1+rocm"
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert next(reason.code for reason in _toolchain.compiler_reasons()) == "no-compiler"
    assert "CC=no-such-compiler -O2 is no command" in _toolchain.compiler_reasons()[0].message
