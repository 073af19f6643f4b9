"""The ROCm backend: which kernel runs for which hook, and where.

No kernel of it has run on an AMD GPU yet (docs/rocm.md says what was shown instead, and what to run first on a card).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar

import torch

from engram_core.backend import EngramBackend, GateWeights, Prefetch, Problem, TableSpec, Wkv, WkvSpec
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.gpu.prefetch import SideStreamPrefetch
from engram_core.gpu.runtime import HostRuntime
from engram_core.gpu.table import GpuTable
from engram_core.hashing import TokenBatch
from engram_core.info import BackendInfo, Reason
from engram_core.kernels.hash import KernelHasher
from engram_core.layer import Engram
from engram_core.layout import HashLayout
from engram_core.prefetch import InlinePrefetch
from engram_core.table import EngramTable
from engram_core.tokens import TokenMap
from engram_rocm import arch
from engram_rocm.gate import apply_gate
from engram_rocm.lookup import TUNING, host_runtime
from engram_rocm.plugin import INFO
from engram_rocm.wkv import RocmWkv, WeightForm


class RocmBackend(EngramBackend):
    """``device``: an AMD GPU, or the CPU in Triton's interpreter (which stands for gfx942).

    ``weights``: how e4m3fn WKV weights are held, "bf16" (two bytes a weight: dequantised at load) or "fp8" (one byte).
    Default: "fp8" on gfx950, whose matrix cores take it, and "bf16" elsewhere, where "fp8" saves memory and decodes in
    the kernel. To choose it, pass ``RocmBackend(device, weights="fp8")`` as ``EngramMemory(backend=...)``.
    """

    info: ClassVar[BackendInfo] = INFO

    def __init__(self, device: torch.device, *, weights: WeightForm | None = None) -> None:
        super().__init__(device)
        if weights not in (None, "bf16", "fp8"):
            raise InvalidArgumentError("weights", repr(weights), "'bf16', 'fp8' or None")
        self._weights = weights
        self._side = torch.Stream(device=self.device) if self.device.type != "cpu" else None

    @cached_property
    def architecture(self) -> str:
        """The device's gfx name (empty where it is no AMD GPU); read when first needed."""
        return arch.detect(self.device)

    def supports(self, problem: Problem) -> tuple[Reason, ...]:
        return super().supports(problem) + arch.reasons(self.architecture, self.device)

    def create_wkv(self, spec: WkvSpec) -> Wkv:
        if reasons := arch.reasons(self.architecture, self.device):
            raise UnsupportedConfigError(f"backend rocm has no WKV for {self.device}", reasons)
        architecture = arch.KNOWN[self.architecture]
        return RocmWkv(spec, self.device, architecture, self._weights or ("fp8" if architecture.scaled else "bf16"))

    def post_wkv(
        self,
        hidden_states: torch.Tensor,
        kv: torch.Tensor,
        gate: GateWeights,
        *,
        wkv: Wkv | None = None,
        token_mask: torch.Tensor | None = None,
        num_kv_tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if wkv is not None and not isinstance(wkv, RocmWkv):
            raise InvalidArgumentError("wkv", type(wkv).__name__, "None or a projection that this backend made")
        return apply_gate(hidden_states, kv, gate, wkv, token_mask, num_kv_tokens, out, self.device)

    def prefetch(self, layers: Sequence[Engram], max_rows: int) -> Prefetch:
        if self._side is None:
            return InlinePrefetch(layers, max_rows)
        return SideStreamPrefetch(layers, max_rows, self.device)

    def create_table(self, spec: TableSpec) -> EngramTable:
        return GpuTable(spec, self.device, self.host_runtime(), TUNING)

    def create_hasher(self, layout: HashLayout, token_map: TokenMap) -> Callable[[TokenBatch], torch.Tensor]:
        return KernelHasher(layout, token_map, self.device)

    def lookup_stream(self) -> torch.Stream | None:
        return self._side

    def host_runtime(self) -> HostRuntime | None:
        """What registers host memory with the device; None where the device is the host."""
        return None if self.device.type == "cpu" else host_runtime()
