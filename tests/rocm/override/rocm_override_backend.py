"""The backends of ``rocm_override``: the architecture is told, not read, and host memory is registered with CUDA."""

from __future__ import annotations

from typing import ClassVar

import rocm_override
import torch
from engram_rocm.backend import RocmBackend
from engram_rocm.wkv import WeightForm

from engram_core.gpu.runtime import HostRuntime


class Gfx942(RocmBackend):
    info = rocm_override.gfx942.info
    architecture = "gfx942"
    form: ClassVar[WeightForm] = "bf16"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, weights=self.form)

    def host_runtime(self) -> HostRuntime | None:
        # CUDA's calls have the same signatures under another prefix.
        return None if self.device.type == "cpu" else HostRuntime.loaded("libcudart.so", "cuda", 0x8)


class Gfx942Fp8(Gfx942):
    info = rocm_override.gfx942_fp8.info
    form = "fp8"


class Gfx950(Gfx942Fp8):
    """``tl.dot_scaled``: emulated in bf16 on an H200, so its operands and scales are proven and not its speed."""

    info = rocm_override.gfx950.info
    architecture = "gfx950"
