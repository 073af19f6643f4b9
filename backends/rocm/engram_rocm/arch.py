"""GPU architectures by their gfx name: which of them run, and what differs between them.

The name is read from a chosen device, never while backends are listed, since reading it opens the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch

from engram_core.info import Reason
from engram_core.kernels import INTERPRETED


@dataclass(frozen=True, slots=True)
class Architecture:
    """``slices``: tensor-parallel ranks may each keep a slice of dim. ``scaled``: block-scaled fp8 matrix products."""

    name: str
    generation: str
    slices: bool
    scaled: bool


KNOWN: Final = {
    a.name: a
    for a in (
        Architecture("gfx90a", "CDNA2, Instinct MI200", slices=False, scaled=False),
        Architecture("gfx942", "CDNA3, Instinct MI300", slices=True, scaled=False),
        Architecture("gfx950", "CDNA4, Instinct MI350", slices=True, scaled=True),
    )
}
INTERPRETED_AS: Final = "gfx942"
"""What Triton's interpreter stands for: up to 3.6 it has no ``tl.dot_scaled``."""

_LISTED = ", ".join(f"{a.name} ({a.generation})" for a in KNOWN.values())
_FIX = "ENGRAM_BACKEND=reference, or device= one of the GPUs listed (rocminfo shows each one's gfx name)"


def detect(device: torch.device) -> str:
    """The gfx name of ``device``; empty where it is no AMD GPU."""
    if device.type == "cpu":
        return INTERPRETED_AS if INTERPRETED else ""
    properties = torch.cuda.get_device_properties(device)
    # ROCm's torch adds features to the name: "gfx942:sramecc+:xnack-".
    return str(getattr(properties, "gcnArchName", "")).partition(":")[0] if torch.version.hip else ""


def reasons(name: str, device: torch.device) -> tuple[Reason, ...]:
    """All reasons against the architecture ``name`` of ``device``."""
    if name in KNOWN:
        return ()
    if not name:
        return (Reason("no-amd-gpu", f"{device} is no AMD GPU; one of {_LISTED} is needed", _FIX),)
    if name.startswith(("gfx10", "gfx11", "gfx12")):
        message = f"{device} is {name}, an RDNA GPU: waves of 32 lanes, other matrix instructions; needed is {_LISTED}"
        return (Reason("architecture-rdna", message, _FIX),)
    message = f"{device} is {name}, which no kernel here was made for; needed is {_LISTED}"
    return (Reason("architecture", message, _FIX),)


@cache
def matrix_options() -> dict[str, Any]:
    """Launch options of kernels with matrix products: instructions of 16 x 16, and how deep operands are packed.

    Empty where Triton compiles for none of AMD's targets, which would refuse the words.
    """
    if INTERPRETED:
        return {}
    from triton.runtime import driver

    target = driver.active.get_current_target()
    if target.backend != "hip":
        return {}
    # CDNA4 reads operands twice as deep by itself.
    return {"matrix_instr_nonkdim": 16, "kpack": 1 if target.arch == "gfx950" else 2}
