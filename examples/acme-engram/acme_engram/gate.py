"""The gate in float32, a few tokens at a time so that every intermediate stays in cache; tokens spread over threads.

Sums run over a contiguous last dimension, where NumPy adds pairwise: the error stays at a few units whatever dim is.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from acme_engram.numbers import Floats, narrow, widen, words
from acme_engram.threads import spread
from engram_core.backend import GateWeights
from engram_core.checks import check_gate_operands, check_tensor

_CHUNK: Final = 2


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
    hidden, made, target = words(hidden_states), words(kv), words(out)
    closed = None if token_mask is None else ~token_mask.numpy()

    def work(tokens: slice) -> None:
        with np.errstate(all="ignore"):  # NaN, infinity and zero divisors are values here
            for begin in range(tokens.start, tokens.stop, _CHUNK):
                here = slice(begin, min(begin + _CHUNK, tokens.stop))
                narrow(_injected(widen(hidden[here]), widen(made[here]), qk, weights), target[here])
                if closed is not None:  # selection, never a product: a closed row keeps its bits whatever kv holds
                    np.copyto(target[here], hidden[here], where=closed[here, None, None])

    with np.errstate(all="ignore"):
        qk = _floats(weights.q_weight) * _floats(weights.k_weight)
    spread(work, live, 2 * _CHUNK)
    target[live:] = hidden[live:]
    return out


def _floats(weight: torch.Tensor) -> Floats:
    if weight.dtype == torch.bfloat16:
        return widen(words(weight))
    found: Floats = weight.detach().numpy()
    return found


def _injected(h: Floats, kv: Floats, qk: Floats, weights: GateWeights) -> Floats:
    """``h [t, H, dim]`` and ``kv [t, (H + 1) * dim]`` to ``h + gate * value``, not yet rounded."""
    copies, dim = weights.hc_mult, weights.dim
    parts = kv.reshape(len(kv), copies + 1, dim)
    key, value = parts[:, :copies], parts[:, copies:]
    eps, clamp, scale = np.float32(weights.eps), np.float32(weights.clamp), np.float32(dim**-0.5)
    product = h * qk
    product *= key
    # Two divisions: with a small eps the product of the norms can be less than a float32 holds.
    dot = product.sum(-1, keepdims=True) / np.sqrt(_mean(h * h) + eps) / np.sqrt(_mean(key * key) + eps) * scale
    # np.maximum keeps a NaN; copysign keeps the sign of a zero.
    root = np.copysign(np.sqrt(np.maximum(np.abs(dot), clamp)), dot)
    np.multiply(value, 1 / (1 + np.exp(-root)), out=product)
    product += h
    return product


def _mean(squares: Floats) -> Floats:
    found: Floats = squares.sum(-1, keepdims=True) / np.float32(squares.shape[-1])
    return found
