"""``post_wkv``: the shared gate kernel on a whole projection."""

from __future__ import annotations

import torch

from engram_core.backend import GateWeights, Wkv
from engram_core.checks import check_gate_operands, check_tensor
from engram_core.errors import InvalidArgumentError
from engram_core.kernels.device import on
from engram_core.kernels.gate import gate
from engram_nvidia.wkv import ColumnWkv


def apply_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weights: GateWeights,
    wkv: Wkv | None,
    token_mask: torch.Tensor | None,
    num_kv_tokens: int | None,
    out: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """See :meth:`engram_core.backend.EngramBackend.post_wkv`."""
    if wkv is not None and not isinstance(wkv, ColumnWkv):
        raise InvalidArgumentError("wkv", type(wkv).__name__, "None or a projection that this backend made")
    copies, dim = weights.hc_mult, weights.dim
    check_tensor("gate", weights.q_weight, (copies, dim), (weights.q_weight.dtype,), device)
    features = (copies + 1) * dim
    out, live = check_gate_operands(hidden_states, kv, copies, dim, features, token_mask, num_kv_tokens, out, device)
    with on(device):
        return gate(hidden_states, kv, weights, token_mask, live, out)
