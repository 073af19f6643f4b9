"""What the reference backend is, without loading it: no torch, no device."""

from __future__ import annotations

from typing import Final

from engram_core.hookspecs import hookimpl
from engram_core.info import BackendInfo, Capability

INFO: Final = BackendInfo(
    name="reference",
    api_version=(1, 0),
    summary="Pure torch on any device: strict and slow, the definition that other backends are read against.",
    vendor="engram-core",
    device_types=("*",),
    priority=0,
    probe="engram_reference.probe:probe",
    factory="engram_reference.backend:ReferenceBackend",
    capabilities=frozenset(Capability) - {Capability.GRAPH_CAPTURE, Capability.HOT_ROWS},
)


@hookimpl
def engram_backend() -> BackendInfo:
    return INFO
