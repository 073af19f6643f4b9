"""What the NVIDIA backend is, without loading it: no torch, no Triton, no device."""

from __future__ import annotations

from typing import Final

from engram_core.hookspecs import hookimpl
from engram_core.info import BackendInfo, Capability

INFO: Final = BackendInfo(
    name="nvidia",
    api_version=(1, 0),
    summary="Triton and FlashInfer kernels for NVIDIA GPUs (SM80 and later).",
    vendor="NVIDIA",
    device_types=("cuda",),
    priority=100,
    probe="engram_nvidia.probe:probe",
    factory="engram_nvidia.backend:NvidiaBackend",
    capabilities=frozenset(Capability),
    interpretable=True,
)


@hookimpl
def engram_backend() -> BackendInfo:
    return INFO
