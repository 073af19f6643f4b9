"""The ROCm backend's place: found, probed and listed already, and refused when it is to be created."""

from __future__ import annotations

import torch

from engram_core.backend import EngramBackend
from engram_core.errors import BackendUnavailableError
from engram_core.info import Reason
from engram_rocm.plugin import INFO


class RocmBackend(EngramBackend):
    info = INFO

    def __new__(cls, device: torch.device) -> RocmBackend:
        reason = Reason(
            "not-implemented",
            "not implemented yet: this release finds and probes the ROCm backend, and can't run it",
            "ENGRAM_BACKEND=reference, or a release with the ROCm backend (CHANGELOG.md)",
        )
        raise BackendUnavailableError(f"backend 'rocm' on {device}: {reason.message}.", reasons=(reason,))
