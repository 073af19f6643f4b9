"""Geometries by name. Small ones fit what kernels usually ask for (K at least 128, widths multiples of 16)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from engram_conformance import oracle
from engram_core.config import EngramConfig


@dataclass(frozen=True)
class Geometry:
    """A model's Engram geometry. ``vocab``: raw token ids; ``compressed``: distinct compressed ids among them."""

    hidden: int = 128
    copies: int = 4
    layers: tuple[int, ...] = (1, 14)
    ngram: int = 4
    heads: int = 2
    head_dim: int = 64
    base: int = 97
    vocab: int = 800
    compressed: int = 500
    pad: int = 2
    eps: float = 1e-20

    @property
    def columns(self) -> int:
        """C."""
        return (self.ngram - 1) * self.heads

    @property
    def k(self) -> int:
        """Inputs of the WKV."""
        return self.columns * self.head_dim

    @property
    def n(self) -> int:
        """Outputs of the WKV."""
        return (self.copies + 1) * self.hidden

    @property
    def numbers(self) -> oracle.LayoutNumbers:
        """Primes, offsets and multipliers, by the oracle."""
        return _numbers(self)

    def config(self) -> EngramConfig:
        """As ``engram_core`` takes it."""
        return EngramConfig(
            hidden_size=self.hidden,
            hc_mult=self.copies,
            layer_ids=self.layers,
            num_embeddings=self.numbers.rows,
            vocab_size=self.base,
            max_ngram_size=self.ngram,
            n_heads=self.heads,
            head_dim=self.head_dim,
            compressed_vocab_size=self.compressed,
            pad_token_id=self.pad,
            rms_norm_eps=self.eps,
        )


@lru_cache
def _numbers(geometry: Geometry) -> oracle.LayoutNumbers:
    g = geometry
    return oracle.layout(g.base, g.layers, g.ngram, g.heads, g.compressed)


_SMALL = Geometry()

GEOMETRIES: Final[dict[str, Geometry]] = {
    "tiny": Geometry(hidden=64, ngram=3, heads=2, head_dim=32, base=11, vocab=64, compressed=64),
    "small": _SMALL,
    "one": replace(_SMALL, layers=(3,)),
    "three": replace(_SMALL, layers=(0, 2, 5)),
    "bigram": replace(_SMALL, ngram=2, heads=4),
    "fivegram": replace(_SMALL, ngram=5, heads=3),
    "one-head": replace(_SMALL, heads=1, head_dim=128),
    "columns-15": replace(_SMALL, heads=5, head_dim=32),
    "columns-9": replace(_SMALL, heads=3, head_dim=32),
    "columns-24": replace(_SMALL, heads=8, head_dim=32),
    "copies-1": replace(_SMALL, copies=1, hidden=256),
    "copies-2": replace(_SMALL, copies=2),
    "copies-8": replace(_SMALL, copies=8),
    # dim / P is no multiple of 32 for any P above 1, so that the whole projection is kept on every rank.
    "odd-slices": replace(_SMALL, hidden=48),
    "tall": replace(_SMALL, hidden=64, heads=8, head_dim=256),  # K = 6144 at little cost
    "wide-ids": Geometry(base=2**27, heads=8, vocab=99_092, compressed=99_092),  # more than 2**31 rows: int64 ids
    # The published model with small tables, and the published model itself (hash and rows only: 94 GiB a layer).
    "real": Geometry(5120, 4, (1, 14), 4, 8, 256, 1009, 1000, 700),
    "v41": Geometry(5120, 4, (1, 14), 4, 8, 256, 16_000_000, 99_092, 99_092),
}


def geometry(name: str) -> Geometry:
    """The geometry of that name."""
    return GEOMETRIES[name]
