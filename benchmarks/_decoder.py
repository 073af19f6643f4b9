"""Synthetic decoder layers of DeepSeek-V4.1-Flash's width: what Engram runs beside in ``step.py``.

Each layer takes the mean of the residual copies, normalises it, projects it up and down and adds the result to every
copy. No attention, no routing: what matters here is which of the card's resources a layer takes, and for how long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

Idle = Callable[[], None]


@dataclass(frozen=True)
class Kind:
    """``wide``: of the projection up. ``own_weights``: each layer has its own (else all share one pair, which stays in
    L2). ``rows``: tokens of a prefill chunk that every layer carries beside the step's own. ``spins``: waits a layer.
    """

    what: str
    wide: int
    own_weights: bool = False
    rows: int = 0
    spins: int = 0
    idle: bool = True
    """Leaves memory bandwidth idle, so that the look-up and the WKV should vanish."""


KINDS: Final = {
    # Attention, shared and active routed experts of one layer at few tokens: about this many bytes of bf16.
    "weights": Kind(
        "bound by bandwidth: 168 MB of bf16 weights a layer, none in L2", 8192, own_weights=True, idle=False
    ),
    "latency": Kind("bound by latency: 10 MB of weights in L2, two waits a layer (all-reduces)", 512, spins=2),
    "compute": Kind("bound by arithmetic: a prefill chunk of 2048 tokens beside, weights in L2", 2048, rows=2048),
}
TINY: Final = {
    name: Kind("tiny", 64, kind.own_weights, min(kind.rows, 70), kind.spins, kind.idle) for name, kind in KINDS.items()
}


class Decoder:
    """``layers`` layers of width ``dim``; ``wait`` stands for a collective's latency."""

    def __init__(self, kind: Kind, layers: int, dim: int, device: torch.device, wait: Callable[[], None]) -> None:
        self.kind, self.layers, self._dim, self._wait = kind, layers, dim, wait
        count = layers if kind.own_weights else 1
        self._up = [_weight(kind.wide, dim, device) for _ in range(count)]
        self._down = [_weight(dim, kind.wide, device) for _ in range(count)]
        self._chunk = torch.randn(kind.rows, dim, device=device).bfloat16() if kind.rows else None

    @property
    def bytes(self) -> int:
        """Weights read in a step, each layer's once; activations are left out (at few tokens they are nothing)."""
        return self.layers * 2 * self._up[0].nbytes

    def __call__(self, index: int, hidden: torch.Tensor, idle: Idle = lambda: None, last: bool = False) -> torch.Tensor:
        """Layer ``index``: residual copies ``[T, H, dim]`` to the same.

        ``idle``: called before each wait, or before the ``last`` alone; where there are none, as the layer begins.
        """
        tokens = hidden.shape[0]
        if not self.kind.spins:
            idle()
        x = F.rms_norm(hidden.mean(1), (self._dim,))
        if self._chunk is not None:
            self._chunk[:tokens].copy_(x)
            x = self._chunk
        at = index % len(self._up)
        x = F.silu(F.linear(x, self._up[at]))
        if self.kind.spins:
            if not last:
                idle()
            self._wait()
        x = F.linear(x, self._down[at])
        if self.kind.spins:
            idle()
            self._wait()
        return hidden + x[:tokens].unsqueeze(1)


def _weight(out_features: int, in_features: int, device: torch.device) -> torch.Tensor:
    return torch.randn(out_features, in_features, dtype=torch.bfloat16, device=device).mul_(in_features**-0.5)
