"""The reference backend: the contract in plain torch operations, on any device.

Strict: it refuses whatever the contract does not allow, so that nobody comes to lean on leniency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from engram_core.backend import EngramBackend, GateWeights, Prefetch, Wkv, WkvSpec
from engram_core.info import BackendInfo
from engram_core.layer import Engram
from engram_core.prefetch import InlinePrefetch
from engram_reference.gate import apply_gate
from engram_reference.plugin import INFO
from engram_reference.wkv import ReferenceWkv


class ReferenceBackend(EngramBackend):
    """Pure torch. Look-ups, hash and tables are the core's own definitions."""

    info: ClassVar[BackendInfo] = INFO

    def create_wkv(self, spec: WkvSpec) -> Wkv:
        return ReferenceWkv(spec, self.device)

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
        return apply_gate(hidden_states, kv, gate, token_mask, num_kv_tokens, out, self.device)

    def prefetch(self, layers: Sequence[Engram], max_rows: int) -> Prefetch:
        return InlinePrefetch(layers, max_rows)
