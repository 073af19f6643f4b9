"""What acme is, without loading it: read whenever backends are listed, so neither torch nor NumPy is imported."""

from __future__ import annotations

from typing import Final

from engram_core.hookspecs import hookimpl
from engram_core.info import BackendInfo, Capability

INFO: Final = BackendInfo(
    name="acme",
    api_version=(1, 0),
    summary="NumPy on CPUs: weights dequantised once, rows decoded by table, the WKV ahead in a thread; one rank.",
    vendor="Acme",
    device_types=("cpu",),
    priority=10,  # above the reference (0): where auto would run that on a CPU, it runs this
    probe="acme_engram.probe:probe",
    factory="acme_engram.backend:AcmeBackend",
    capabilities=frozenset(
        {
            Capability.HASH,
            Capability.ROWS,
            Capability.WKV_MXFP8,
            Capability.WKV_BF16,
            Capability.GATE,
            Capability.PREFETCH,
            Capability.PLACEMENT_DEVICE,
            Capability.PLACEMENT_HOST,
            Capability.PLACEMENT_FILE,
            Capability.PACKED_ROWS,
        }
    ),
)


@hookimpl
def engram_backend() -> BackendInfo:
    return INFO
