"""How tables are read on AMD GPUs, and the runtime that registers host memory. Nothing of it was measured on a card."""

from __future__ import annotations

from typing import Final

from engram_core.gpu.runtime import HostRuntime
from engram_core.gpu.table import Tuning

TUNING: Final = Tuning()


def host_runtime() -> HostRuntime:
    """Raises :class:`~engram_core.errors.TableError` where the process has no HIP runtime."""
    return HostRuntime.loaded("libamdhip64.so", "hip")
