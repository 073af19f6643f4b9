"""bf16 products through cuBLAS, held to float32 accumulation."""

from __future__ import annotations

import torch


def product(rows: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out`` ``[T, N]`` = ``rows`` ``[T, K]`` times ``weight`` ``[N, K]``, all bf16."""
    if rows.device.type == "cpu":  # interpreted: bf16 products of CPUs flush subnormals, and no kernel is tested here
        return out.copy_(rows.float() @ weight.float().T)
    # By default cuBLAS may add the parts of a split K in bf16, fifty times what the contract allows.
    switches = torch.backends.cuda.matmul
    before = switches.allow_bf16_reduced_precision_reduction
    switches.allow_bf16_reduced_precision_reduction = False
    try:
        return torch.mm(rows, weight.T, out=out)
    finally:
        switches.allow_bf16_reduced_precision_reduction = before
