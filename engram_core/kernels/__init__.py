"""Vendor-neutral Triton kernels that any GPU backend may use: n-gram hash, row look-up, gate.

No inline assembly and no libdevice here, so that the same source compiles for NVIDIA and AMD targets and runs through
Triton's interpreter on a CPU (``TRITON_INTERPRET=1``, set before this package is imported), which is how CI executes
the real kernels. The interpreter's bf16 and fp8 arithmetic is repaired first (``interpreter.py``), and the programs of
a launch run in lockstep (``lockstep.py``); nothing is patched otherwise.

Importing this package imports Triton; ``engram_core`` itself never does.
"""

from __future__ import annotations

import os
from typing import Final

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether kernels of this process run through Triton's interpreter (decided when they are decorated)."""

if INTERPRETED:
    from engram_core.kernels.interpreter import repair

    repair()
