"""The limits that follow from declared capabilities and traits, so that no backend words them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engram_core.info import BackendInfo, Capability, Reason

if TYPE_CHECKING:
    from engram_core.layer import Engram
    from engram_core.specs import Problem


def declared(info: BackendInfo, problem: Problem) -> tuple[Reason, ...]:
    """All reasons against ``problem`` that follow from ``info.capabilities``."""
    parallel = problem.parallel
    wanted = [
        (Capability[f"PLACEMENT_{problem.placement.upper()}"], f"placement={problem.placement!r}", "another placement"),
        (Capability.TENSOR_PARALLEL, f"{parallel.tensor.size} tensor-parallel ranks", "one tensor-parallel rank"),
        (Capability.DATA_PARALLEL, f"tables shared by {parallel.data_size} data-parallel ranks", "Parallel(data=None)"),
        (Capability.SEQUENCE_PARALLEL, "sequence parallelism", "Parallel(sequence=False)"),
        (Capability.HOT_ROWS, f"cache_bytes={problem.cache_bytes}", "cache_bytes=0"),
    ]
    asked = [True, parallel.tensor.size > 1, parallel.data_size > 1, parallel.sequence, problem.cache_bytes > 0]
    reasons = [
        Reason(f"no-{capability.value.replace('_', '-')}", f"{info.name} does not do {what}", f"use {instead}")
        for (capability, what, instead), needed in zip(wanted, asked, strict=True)
        if needed and capability not in info.capabilities
    ]
    if problem.dtype is not torch.bfloat16:
        reasons.append(
            Reason("dtype", f"hidden states are {problem.dtype}; the contract is defined for bfloat16", "use bfloat16")
        )
    return tuple(reasons)


def prefetchable(layer: Engram) -> tuple[Reason, ...]:
    """All reasons why a layer's WKV can't run ahead of it."""
    parallel = layer.parallel
    reasons = []
    if not layer.wkv.side_stream_safe:
        reasons.append(
            Reason("wkv-not-side-stream-safe", "this WKV may not run beside other matrix products of the process")
        )
    if (parallel.tensor.size > 1 or layer.wkv.collective_in_forward) and parallel.ahead is None:
        reasons.append(
            Reason(
                "no-ahead-communicator",
                f"the chain exchanges between {parallel.tensor.size} ranks and has no communicator of its own",
                "pass Parallel(ahead=...), a second communicator over the tensor ranks",
            )
        )
    if parallel.sequence:
        reasons.append(Reason("sequence-parallel", "under sequence parallelism the chain does not run ahead"))
    if layer.table.spec.exchange.data_size > 1:
        reasons.append(Reason("data-parallel-table", "a table shared over data-parallel ranks is not run ahead"))
    return tuple(reasons)
