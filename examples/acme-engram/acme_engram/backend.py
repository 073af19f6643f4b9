"""The class that the plugin names: it says what acme can't do, and hands out its parts."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch

from acme_engram.gate import apply_gate
from acme_engram.hashing import AcmeHasher
from acme_engram.lookup import AcmeTable
from acme_engram.plugin import INFO
from acme_engram.prefetch import ThreadPrefetch
from acme_engram.wkv import AcmeWkv
from engram_core.backend import EngramBackend, GateWeights, Prefetch, Problem, TableSpec, Wkv, WkvSpec
from engram_core.checks import describe
from engram_core.errors import InvalidArgumentError, UnsupportedConfigError
from engram_core.hashing import TokenBatch
from engram_core.info import BackendInfo, Reason
from engram_core.layer import Engram
from engram_core.layout import HashLayout
from engram_core.parallel import Parallel
from engram_core.table import EngramTable
from engram_core.tokens import TokenMap


class AcmeBackend(EngramBackend):
    """NumPy on the CPU, one rank."""

    info: ClassVar[BackendInfo] = INFO

    def supports(self, problem: Problem) -> tuple[Reason, ...]:
        """The declared limits, and one that depends on the machine: the dequantised weights must fit."""
        config = problem.config
        need = 4 * config.wkv_out_features * config.wkv_in_features
        have = _memory()
        reasons = super().supports(problem)
        if need > have:
            message = f"a layer's WKV takes {need} bytes in float32; this machine has {have} bytes of memory"
            reasons += (Reason("memory", message, "use the reference backend: it keeps weights in fp8"),)
        return reasons

    def create_wkv(self, spec: WkvSpec) -> Wkv:
        _refuse_ranks("create_wkv", spec.parallel)
        if spec.dtype is not torch.bfloat16:
            reason = Reason("dtype", f"rows and kv are {spec.dtype}; acme has bfloat16", "use bfloat16")
            raise UnsupportedConfigError("create_wkv: this dtype is not there", (reason,))
        return AcmeWkv(spec, self.device)

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
        if wkv is not None and not isinstance(wkv, AcmeWkv):
            raise InvalidArgumentError("wkv", describe(wkv), "a projection made by acme: kv is its own affair")
        return apply_gate(hidden_states, kv, gate, token_mask, num_kv_tokens, out, self.device)

    def prefetch(self, layers: Sequence[Engram], max_rows: int) -> Prefetch:
        return ThreadPrefetch(layers, max_rows)

    def create_table(self, spec: TableSpec) -> EngramTable:
        _refuse_ranks("create_table", spec.parallel)
        if spec.placement == "shared":
            reason = Reason("no-placement-shared", "acme does not do placement='shared'", "use another placement")
            raise UnsupportedConfigError("create_table: this placement is not declared", (reason,))
        return AcmeTable(spec, self.device)

    def create_hasher(self, layout: HashLayout, token_map: TokenMap) -> Callable[[TokenBatch], torch.Tensor]:
        return AcmeHasher(layout, token_map)


def _refuse_ranks(hook: str, parallel: Parallel) -> None:
    if parallel.shards > 1 or parallel.sequence:
        reason = Reason("one-rank", f"{parallel.shards} ranks share this layer; acme has one", "use Parallel.single()")
        raise UnsupportedConfigError(f"{hook}: acme does not exchange between ranks", (reason,))


def _memory() -> int:
    """Bytes of memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
