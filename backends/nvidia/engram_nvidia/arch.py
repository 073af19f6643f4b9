"""NVIDIA GPUs by their compute capability: which run, and what the kernels must know of them.

Read from a chosen device, never while backends are listed, since reading it opens the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from engram_core.info import Reason
from engram_core.kernels import INTERPRETED

_OLDEST: Final = (8, 0)
_MXFP8: Final = ((10, 0), (10, 3))
_FIX: Final = "ENGRAM_BACKEND=reference, or device= an Ampere GPU or later (nvidia-smi --query-gpu=compute_cap)"


@dataclass(frozen=True, slots=True)
class Chip:
    """``capability``: (major, minor). ``fast``: weights are decoded with inline PTX. ``settle``: a Hopper, whose matrix
    products read registers while they run (``decode.py``).
    """

    capability: tuple[int, int]
    fast: bool
    settle: bool

    @property
    def mxfp8(self) -> bool:
        """Block-scaled products of FlashInfer's cute-dsl."""
        return self.capability in _MXFP8


INTERPRETED_CHIP: Final = Chip((9, 0), fast=False, settle=False)
"""What Triton's interpreter stands for: an SM90 without inline PTX."""


def of_capability(major: int, minor: int) -> Chip:
    """The chip of a compute capability."""
    return Chip((major, minor), fast=True, settle=major == 9)


def detect(device: torch.device) -> Chip | None:
    """The chip of ``device``; None where it is no NVIDIA GPU."""
    if device.type == "cpu":
        return INTERPRETED_CHIP if INTERPRETED else None
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    properties: Any = torch.cuda.get_device_properties(device)
    return of_capability(properties.major, properties.minor)


def reasons(chip: Chip | None, device: torch.device) -> tuple[Reason, ...]:
    """All reasons against ``chip``."""
    if chip is None:
        return (Reason("no-nvidia-gpu", f"{device} is no NVIDIA GPU; compute capability 8.0 or later is needed", _FIX),)
    if chip.capability < _OLDEST:
        have = ".".join(map(str, chip.capability))
        message = f"{device} has compute capability {have}; 8.0 or later is needed (bf16 matrix products)"
        return (Reason("compute-capability", message, _FIX),)
    return ()
