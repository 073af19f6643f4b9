"""Which outputs of the projection a rank holds: the same slice of dim of every key and of the value.

With the usual split, N / P outputs in a row, a rank would hold whole keys of some copies and nothing of the others, and
the gate could start only after everything was gathered. With a slice of each, a rank sums its share of every copy's
dot product, and only the value and two numbers a copy cross the wire.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram_core.backend import WkvSpec
from engram_core.formats import BLOCK


@dataclass(frozen=True, slots=True)
class Split:
    """Rank ``rank`` of ``ranks`` holds ``[rank * width, (rank + 1) * width)`` of each of ``outputs`` = H + 1 outputs.

    Not ``sliced``: the whole projection, ``width`` = dim.
    """

    outputs: int
    width: int
    rank: int
    ranks: int

    @classmethod
    def plan(cls, spec: WkvSpec, slices: bool) -> Split:
        """A pure function of what all ranks share: slices where there are several ranks and 32 divides a slice.

        32 rows of the weight share scales, so no other slice owns its scales whole. Under sequence parallelism the
        ranks hold different tokens, and the gate of one can't be summed by the others.
        """
        ranks = spec.parallel.tensor.size
        if not slices or ranks == 1 or spec.parallel.sequence or spec.dim % (ranks * BLOCK):
            return cls(spec.hc_mult + 1, spec.dim, 0, 1)
        return cls(spec.hc_mult + 1, spec.dim // ranks, spec.parallel.tensor.rank, ranks)

    @property
    def sliced(self) -> bool:
        """Whether the ranks hold slices of dim."""
        return self.ranks > 1

    @property
    def features(self) -> int:
        """Outputs that this rank computes."""
        return self.outputs * self.width

    @property
    def place(self) -> slice:
        """This rank's slice of dim."""
        return slice(self.rank * self.width, (self.rank + 1) * self.width)

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``x`` ``[N, ..]`` or ``[N/32, ..]``, as a view ``[H + 1, rows of a slice, ..]``."""
        each = x.shape[0] // (self.outputs * self.ranks)
        whole = x.view(self.outputs, each * self.ranks, *x.shape[1:])
        return whole[:, self.rank * each : (self.rank + 1) * each]
