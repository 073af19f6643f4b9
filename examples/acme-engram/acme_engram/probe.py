"""Whether this machine can run acme: all reasons against it, each with what mends it."""

from __future__ import annotations

import os
import sys

from engram_core.info import Reason


def probe() -> tuple[Reason, ...]:
    """All reasons against this machine, not only the first."""
    reasons = []
    if sys.byteorder != "little":
        reasons.append(Reason("byte-order", f"this CPU is {sys.byteorder}-endian; acme needs little-endian"))
    for name in ("numpy", "torch"):
        try:
            __import__(name)
        except Exception as exc:  # a damaged install raises OSError and others besides ImportError
            message = f"{name} can't be imported: {type(exc).__name__}: {exc}"
            reasons.append(Reason(f"{name}-missing", message, f"pip install {name}"))
    return tuple(reasons)


def facts() -> dict[str, str]:
    """What the doctor shows."""
    import numpy as np

    return {"numpy": np.__version__, "cpus": str(os.cpu_count())}
