"""Whether this machine can run the ROCm backend: all reasons against it, found without initialising HIP.

The GPU's architecture is not judged here, since reading it opens the device, but by ``supports()`` on the one chosen.
"""

from __future__ import annotations

import os

from engram_core import _devices, _environ, _toolchain
from engram_core.info import Reason

_INDEX = "--index-url https://download.pytorch.org/whl/rocm<version>"
_INSTALL_TORCH = f"pip install --force-reinstall torch {_INDEX} (versions: {_toolchain.GET_TORCH})"
_INSTALL_TRITON = f"{_INSTALL_TORCH}: ROCm's torch brings its own triton"
_HIDING = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def probe() -> tuple[Reason, ...]:
    """All reasons against this machine; in Triton's interpreter only Triton itself counts."""
    try:
        version, cuda, hip = _toolchain.torch_build()
    except Exception as exc:  # a ROCm build that misses its libraries raises OSError and others
        broken = Reason("torch-missing", f"torch can't be imported: {type(exc).__name__}: {exc}", _INSTALL_TORCH)
        return broken, *_toolchain.triton_reasons(_INSTALL_TRITON)
    triton = _toolchain.triton_reasons(_INSTALL_TRITON)
    if _environ.interpreting():
        return triton
    reasons: list[Reason] = []
    if hip is None:
        build = f"a CUDA {cuda} build" if cuda else "a CPU build"
        reasons.append(Reason("torch-build", f"torch {version} is {build}; a ROCm build is needed", _INSTALL_TORCH))
    return (*reasons, *_device_reasons(hip is not None), *triton, *_toolchain.compiler_reasons())


def _device_reasons(rocm_build: bool) -> tuple[Reason, ...]:
    # Only a ROCm build can count; under another one the device node tells what there is.
    kfd = _devices.DEV / "kfd"
    if not kfd.exists():
        fix = "run where the amdgpu driver is loaded; in a container: docker run --device=/dev/kfd --device=/dev/dri"
        return (Reason("no-device", f"no AMD GPU is visible: no {kfd}; at least one GPU is needed", fix),)
    reasons: list[Reason] = []
    if not os.access(kfd, os.R_OK | os.W_OK):
        fix = "sudo usermod -aG render,video $USER and log in again; in a container: --group-add render"
        reasons.append(
            Reason("device-permission", f"{kfd} can't be opened by this user; read and write are needed", fix)
        )
    hidden = _devices.hidden_by(_HIDING)
    if hidden:
        message = f"{hidden} hides every GPU; at least one must be visible"
        reasons.append(Reason("device-hidden", message, f"unset {hidden.partition('=')[0]}"))
    elif rocm_build and _devices.cuda_count() == 0:
        message = f"{kfd} exists, and torch counts 0 HIP devices; at least one is needed"
        reasons.append(Reason("driver", message, "rocminfo must list the GPU; reload or update the amdgpu driver"))
    return tuple(reasons)


def facts() -> dict[str, str]:
    """What the doctor shows."""
    version, cuda, hip = _toolchain.torch_build()
    build = f"HIP {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU build"
    return {
        "torch": f"{version} ({build})",
        "HIP devices": str(_devices.cuda_count() if hip else 0),
        "device nodes": ", ".join(_devices.nodes(_devices.AMD_NODES)) or "none",
        "interpreter": f"{_environ.INTERPRET} is set" if _environ.interpreting() else "off",
        **_toolchain.facts(),
    }
