"""The gate, step by step as the contract writes it: float32 after the loads, one rounding at the end."""

from __future__ import annotations

from typing import Final

import torch

from engram_core.backend import GateWeights
from engram_core.checks import check_gate_operands, check_tensor

# Bounds the float32 temporaries (4 copies of 5120: about 20 MB for each of a handful).
_CHUNK_TOKENS: Final = 256


def apply_gate(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    weights: GateWeights,
    token_mask: torch.Tensor | None,
    num_kv_tokens: int | None,
    out: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """``out = bf16(h + gate * value)``; see :meth:`engram_core.backend.EngramBackend.post_wkv`."""
    check_tensor("gate", weights.q_weight, weights.q_weight.shape, (weights.q_weight.dtype,), device)
    copies, dim = weights.hc_mult, weights.dim
    out, live = check_gate_operands(
        hidden_states, kv, copies, dim, (copies + 1) * dim, token_mask, num_kv_tokens, out, device
    )
    qk = weights.q_weight.float() * weights.k_weight.float()
    out[live:].copy_(hidden_states[live:])
    for begin in range(0, live, _CHUNK_TOKENS):
        here = slice(begin, min(begin + _CHUNK_TOKENS, live))
        h = hidden_states[here].float()
        key = kv[here, : copies * dim].float().unflatten(-1, (copies, dim))
        value = kv[here, copies * dim :].float().unsqueeze(1)
        rh = torch.rsqrt((h * h).mean(-1, keepdim=True) + weights.eps)
        rk = torch.rsqrt((key * key).mean(-1, keepdim=True) + weights.eps)
        dot = (h * qk * key).sum(-1, keepdim=True) * rh * rk * dim**-0.5
        opened = torch.sigmoid(torch.copysign(dot.abs().clamp_min(weights.clamp).sqrt(), dot))
        result = (h + opened * value).to(torch.bfloat16)
        if token_mask is not None:  # selection, never a product: a closed row keeps its bits whatever kv holds
            result = torch.where(token_mask[here, None, None], result, hidden_states[here])
        out[here].copy_(result)
    return out
