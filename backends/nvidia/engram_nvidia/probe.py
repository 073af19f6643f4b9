"""Whether this machine can run the NVIDIA backend: all reasons against it, found without initialising CUDA.

The GPU's architecture is not judged here, since reading it opens the device, but by ``supports()`` on the one chosen.
FlashInfer is needed on SM100 alone, so its absence is a fact for the doctor and no reason.
"""

from __future__ import annotations

import os
from importlib import metadata

from engram_core import _devices, _environ, _toolchain
from engram_core.info import Reason

_INSTALL_TRITON = "pip install triton"
_INSTALL_TORCH = f"pip install --force-reinstall torch (a CUDA build; by CUDA version: {_toolchain.GET_TORCH})"


def probe() -> tuple[Reason, ...]:
    """All reasons against this machine; in Triton's interpreter only Triton itself counts."""
    try:
        version, cuda, hip = _toolchain.torch_build()
    except Exception as exc:  # a CUDA build that misses its libraries raises OSError and others
        broken = Reason("torch-missing", f"torch can't be imported: {type(exc).__name__}: {exc}", _INSTALL_TORCH)
        return broken, *_toolchain.triton_reasons(_INSTALL_TRITON)
    triton = _toolchain.triton_reasons(_INSTALL_TRITON)
    if _environ.interpreting():
        return triton
    reasons: list[Reason] = []
    if cuda is None:
        build = f"a ROCm build (HIP {hip})" if hip else "a CPU build"
        reasons.append(Reason("torch-build", f"torch {version} is {build}; a CUDA build is needed", _INSTALL_TORCH))
    return (*reasons, *_device_reasons(cuda is not None), *triton, *_toolchain.compiler_reasons())


def _device_reasons(cuda_build: bool) -> tuple[Reason, ...]:
    # Only a CUDA build can count; under another one the device nodes tell what there is.
    if cuda_build and _devices.cuda_count() > 0:
        return ()
    nodes = _devices.nodes((*_devices.NVIDIA_NODES, "dxg"))
    if not nodes:
        fix = "run where an NVIDIA driver is loaded (nvidia-smi shows the GPU); in a container: docker run --gpus all"
        message = f"no NVIDIA GPU is visible: no {_devices.DEV}/nvidiactl; at least one GPU is needed"
        return (Reason("no-device", message, fix),)
    hidden = _devices.hidden_by(("CUDA_VISIBLE_DEVICES",))
    if hidden:
        message = f"{hidden} hides every GPU; at least one must be visible"
        return (Reason("device-hidden", message, "unset CUDA_VISIBLE_DEVICES, or CUDA_VISIBLE_DEVICES=0"),)
    if not cuda_build:
        return ()
    setting = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    message = f"{nodes[0]} exists, and torch counts 0 CUDA devices (CUDA_VISIBLE_DEVICES={setting})"
    return (
        Reason(
            "driver", f"{message}; at least one is needed", "nvidia-smi must list the GPU; reload or update the driver"
        ),
    )


def facts() -> dict[str, str]:
    """What the doctor shows."""
    version, cuda, hip = _toolchain.torch_build()
    build = f"CUDA {cuda}" if cuda else f"HIP {hip}" if hip else "CPU build"
    return {
        "torch": f"{version} ({build})",
        "CUDA devices": str(_devices.cuda_count() if cuda else 0),
        "device nodes": ", ".join(_devices.nodes(_devices.NVIDIA_NODES)) or "none",
        "FlashInfer": f"{_flashinfer() or 'not installed'} (needed on SM100 and SM103 only)",
        "interpreter": f"{_environ.INTERPRET} is set" if _environ.interpreting() else "off",
        **_toolchain.facts(),
    }


def _flashinfer() -> str | None:
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None
