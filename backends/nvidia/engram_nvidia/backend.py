"""The NVIDIA backend's place: found, probed and listed already, and refused when it is to be created."""

from __future__ import annotations

import torch

from engram_core.backend import EngramBackend
from engram_core.errors import BackendUnavailableError
from engram_core.info import Reason
from engram_nvidia.plugin import INFO


class NvidiaBackend(EngramBackend):
    info = INFO

    def __new__(cls, device: torch.device) -> NvidiaBackend:
        reason = Reason(
            "not-implemented",
            "not implemented yet: this release finds and probes the NVIDIA backend, and can't run it",
            "ENGRAM_BACKEND=reference, or a release with the NVIDIA backend (CHANGELOG.md)",
        )
        raise BackendUnavailableError(f"backend 'nvidia' on {device}: {reason.message}.", reasons=(reason,))
