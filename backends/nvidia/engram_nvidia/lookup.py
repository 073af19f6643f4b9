"""What was measured for tables on NVIDIA GPUs, and the runtime that registers host memory (benchmarks/RESULTS.md)."""

from __future__ import annotations

from typing import Final

from engram_core.gpu.runtime import HostRuntime
from engram_core.gpu.table import Tuning

TUNING: Final = Tuning()
_READ_ONLY: Final = 0x8  # cudaHostRegisterReadOnly: without it CUDA refuses memory that is mapped so


def host_runtime() -> HostRuntime:
    """Raises :class:`~engram_core.errors.TableError` where the process has no CUDA runtime."""
    return HostRuntime.loaded("libcudart", "cuda", _READ_ONLY)
