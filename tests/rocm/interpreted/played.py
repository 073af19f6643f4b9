"""All ranks of a sliced projection and its gate, played in one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from engram_conformance import bridge, oracle
from engram_conformance.ranks import Play, Seat
from engram_rocm.arch import KNOWN
from engram_rocm.backend import RocmBackend
from engram_rocm.wkv import RocmWkv, WeightForm

from engram_core import Parallel
from engram_core.backend import GateWeights, WkvSpec
from engram_core.parallel import Collectives

CPU = torch.device("cpu")
K = 64


def projection(group: Collectives, dim: int, copies: int, form: WeightForm = "bf16", k: int = K) -> RocmWkv:
    """Without weights."""
    return RocmWkv(WkvSpec(k, dim, copies, Parallel(group)), CPU, KNOWN["gfx942"], form)


@dataclass
class Numbers:
    """Random operands of a gate, and what every correct order of it may give."""

    hidden: torch.Tensor
    kv: torch.Tensor
    weights: GateWeights

    @classmethod
    def make(cls, tokens: int, copies: int, dim: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Numbers:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        q, k = ((1 + 0.3 * draw(copies, dim)).to(dtype) for _ in range(2))
        hidden, kv = draw(tokens, copies, dim).bfloat16(), draw(tokens, (copies + 1) * dim).bfloat16()
        return cls(hidden, kv, GateWeights(q, k, 1e-20))

    def slice(self, wkv: RocmWkv) -> torch.Tensor:
        """What that rank's projection gives of ``kv``."""
        here = wkv.split
        return self.kv.unflatten(-1, (here.outputs, -1))[..., here.place].flatten(1)

    def judge(
        self, out: torch.Tensor, mask: torch.Tensor | None = None, real: int | None = None, random: bool = True
    ) -> None:
        read = bridge.values
        q, k = (w.double().numpy() for w in (self.weights.q_weight, self.weights.k_weight))
        bounds = oracle.gate(read(self.hidden), read(self.kv), q, k, self.weights.eps)
        live = None if mask is None else mask.numpy()
        found = oracle.check_gate(
            bridge.bits(out), bridge.bits(self.hidden), bounds, token_mask=live, num_kv_tokens=real, random=random
        )
        assert found.passed, found.message


def post(
    numbers: Numbers,
    ranks: int,
    mask: torch.Tensor | None = None,
    real: int | None = None,
    strided: bool = False,
) -> tuple[torch.Tensor, Play[torch.Tensor]]:
    """``post_wkv`` on every rank: the result, the same on all of them, and the play with its log."""
    play: Play[torch.Tensor] = Play(ranks, CPU)
    group = play.everyone()
    backend = RocmBackend(CPU)
    dim, copies = numbers.weights.dim, numbers.weights.hc_mult

    def act(rank: int) -> torch.Tensor:
        wkv = projection(group[rank], dim, copies)
        hidden, kv, out, given = numbers.hidden, numbers.slice(wkv), None, mask
        if strided:
            hidden, kv = _holed(hidden), _holed(kv)
            out = _holed(torch.full_like(numbers.hidden, torch.nan))
            given = None if mask is None else torch.stack([mask, ~mask], 1)[:, 0]
        before = (hidden.clone(), kv.clone())
        result = backend.post_wkv(hidden, kv, numbers.weights, wkv=wkv, token_mask=given, num_kv_tokens=real, out=out)
        for now, then in zip((hidden, kv), before, strict=True):
            assert np.array_equal(bridge.bits(now), bridge.bits(then)), "an input was written"
        assert out is None or result is out
        return result.clone()

    results = play.run(act)
    for other in results[1:]:
        assert np.array_equal(bridge.bits(other), bridge.bits(results[0])), "ranks hold different bits"
    return results[0], play


def _holed(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory with gaps between rows, the last dimension dense."""
    holder = torch.full((x.shape[0] * 2, *x.shape[1:-1], x.shape[-1] + 8), torch.nan, dtype=x.dtype)
    view = holder[::2, ..., 4:-4]
    view.copy_(x)
    return view


__all__ = ["CPU", "K", "Numbers", "Play", "Seat", "post", "projection"]
