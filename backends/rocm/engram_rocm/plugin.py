"""What the ROCm backend is, without loading it: no torch, no Triton, no device."""

from __future__ import annotations

from typing import Final

from engram_core.hookspecs import hookimpl
from engram_core.info import BackendInfo, Capability

INFO: Final = BackendInfo(
    name="rocm",
    api_version=(1, 0),
    summary="Triton kernels for AMD Instinct GPUs (CDNA3 gfx942, CDNA4 gfx950); never run on one yet.",
    vendor="AMD",
    device_types=("cuda",),  # torch's ROCm build calls AMD GPUs "cuda"; the probes tell the builds apart
    priority=100,
    probe="engram_rocm.probe:probe",
    factory="engram_rocm.backend:RocmBackend",
    capabilities=frozenset(Capability),
    interpretable=True,
)


@hookimpl
def engram_backend() -> BackendInfo:
    return INFO
