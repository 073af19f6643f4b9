"""The NVIDIA backend: which kernel runs for which hook, and where.

What ran on which card, and what never ran, stands in docs/nvidia.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import ClassVar, Literal, TypeAlias

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
from engram_nvidia import arch, flashinfer
from engram_nvidia.gate import apply_gate
from engram_nvidia.lookup import TUNING, host_runtime
from engram_nvidia.plugin import INFO
from engram_nvidia.wkv import columns
from engram_nvidia.wkv_mxfp8 import Mxfp8Wkv
from engram_nvidia.wkv_w8a16 import W8A16Wkv

Product: TypeAlias = Literal["w8a16", "mxfp8"]


class NvidiaBackend(EngramBackend):
    """``device``: an NVIDIA GPU, or the CPU in Triton's interpreter (which stands for an SM90).

    ``product``: how WKV weights are multiplied, "mxfp8" (FlashInfer, SM100 and SM103) or "w8a16" (own kernels).
    Default: "mxfp8" where the GPU has it. To choose, pass ``NvidiaBackend(device, product="w8a16")`` as
    ``EngramMemory(backend=...)``.
    """

    info: ClassVar[BackendInfo] = INFO

    def __init__(self, device: torch.device, *, product: Product | None = None) -> None:
        super().__init__(device)
        if product not in (None, "w8a16", "mxfp8"):
            raise InvalidArgumentError("product", repr(product), "'w8a16', 'mxfp8' or None")
        self._product = product
        self._side = torch.Stream(device=self.device) if self.device.type == "cuda" else None

    @cached_property
    def chip(self) -> arch.Chip | None:
        """What the device is, read when first needed; None: no NVIDIA GPU."""
        return arch.detect(self.device)

    def supports(self, problem: Problem) -> tuple[Reason, ...]:
        config = problem.config
        spec = WkvSpec(
            (config.max_ngram_size - 1) * config.n_heads * config.head_dim,
            config.hidden_size,
            config.hc_mult,
            problem.parallel,
        )
        return super().supports(problem) + self._wkv_reasons(spec)

    def _wkv_reasons(self, spec: WkvSpec) -> tuple[Reason, ...]:
        if found := arch.reasons(self.chip, self.device):
            return found
        if not self._mxfp8:
            return ()
        assert self.chip is not None  # it has no reasons against it
        if not self.chip.mxfp8:
            have = ".".join(map(str, self.chip.capability))
            fix = "NvidiaBackend(device, product='w8a16'), or no product"
            return (Reason("no-mxfp8", f"{self.device} is SM {have}; MXFP8 products need SM 10.0 or 10.3", fix),)
        share = columns(spec)
        return flashinfer.reasons(share.stop - share.start, spec.in_features)

    @property
    def _mxfp8(self) -> bool:
        return self._product == "mxfp8" or (self._product is None and self.chip is not None and self.chip.mxfp8)

    def create_wkv(self, spec: WkvSpec) -> Wkv:
        if found := self._wkv_reasons(spec):
            raise UnsupportedConfigError(f"backend nvidia has no WKV for this on {self.device}", found)
        assert self.chip is not None  # it has no reasons against it
        return Mxfp8Wkv(spec, self.device) if self._mxfp8 else W8A16Wkv(spec, self.device, self.chip)

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
        return apply_gate(hidden_states, kv, gate, wkv, token_mask, num_kv_tokens, out, self.device)

    def prefetch(self, layers: Sequence[Engram], max_rows: int) -> Prefetch:
        if self._side is None:
            return InlinePrefetch(layers, max_rows)
        return SideStreamPrefetch(layers, max_rows, self.device)

    def create_table(self, spec: TableSpec) -> EngramTable:
        return GpuTable(spec, self.device, self.host_runtime(), TUNING)

    def host_runtime(self) -> HostRuntime | None:
        """What registers host memory with the device; None where the device is the host."""
        return None if self.device.type == "cpu" else host_runtime()

    def create_hasher(self, layout: HashLayout, token_map: TokenMap) -> Callable[[TokenBatch], torch.Tensor]:
        return KernelHasher(layout, token_map, self.device)

    def lookup_stream(self) -> torch.Stream | None:
        return self._side

    def warmup(self, layers: Sequence[Engram], token_counts: Sequence[int]) -> None:
        if any(isinstance(layer.wkv, Mxfp8Wkv) for layer in layers):
            with flashinfer.tuning():
                super().warmup(layers, token_counts)
        else:
            super().warmup(layers, token_counts)
