"""HashLayout: where every n-gram head's rows lie in a layer's table, and the numbers that hash to them.

Pure numbers, computed once from the configuration (docs/contract.md, "Layout"): the primes restart at
``vocab_size - 1`` for every layer and n-gram size, and no layer may use a prime twice, so the primes of one layer
depend on all layers before it. A pipeline stage that holds one layer therefore still computes all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import numpy as np

from engram_core.errors import ConfigError

if TYPE_CHECKING:
    from engram_core.config import EngramConfig

_INT64_MAX = 2**63 - 1
_INT32_ROWS = 2**31
# Witnesses that make Miller-Rabin exact for every number below 2**64.
_WITNESSES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)


def is_prime(number: int) -> bool:
    """Whether ``number`` (below 2**64) is prime; exact."""
    if number < 2:
        return False
    for p in _WITNESSES:
        if number % p == 0:
            return number == p
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for witness in _WITNESSES:
        x = pow(witness, odd, number)
        if x in (1, number - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % number
            if x == number - 1:
                break
        else:
            return False
    return True


def table_primes(vocab_size: int, layers: int, ngram_sizes: int, heads: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Primes ``[layers][ngram_sizes][heads]``: for each size the next ``heads`` unused from ``vocab_size`` on."""
    used: set[int] = set()
    result = []
    for _ in range(layers):
        sizes = []
        for _ in range(ngram_sizes):
            candidate = vocab_size - 1
            found: list[int] = []
            while len(found) < heads:
                candidate += 1
                if candidate not in used and is_prime(candidate):
                    used.add(candidate)
                    found.append(candidate)
            sizes.append(tuple(found))
        result.append(tuple(sizes))
    return tuple(result)


def hash_multipliers(compressed_vocab_size: int, layer_id: int, max_ngram_size: int) -> tuple[int, ...]:
    """The odd multipliers of one layer, ``max_ngram_size`` of them; a product with any compressed id fits in int64."""
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram_size, dtype=np.int64)
    return tuple(int(m) * 2 + 1 for m in drawn)


@dataclass(frozen=True, slots=True)
class HashLayout:
    """Primes, offsets and multipliers of all Engram layers of a model.

    ``primes``: ``[L][n-1][heads]``; ``offsets``: ``[L][C]``, the first row of each column; ``multipliers``: ``[L][n]``;
    ``rows``: ``[L]``, the sum of a layer's primes. Columns are ordered n-gram size major, head minor.
    """

    layer_ids: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    compressed_vocab_size: int
    primes: tuple[tuple[tuple[int, ...], ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    multipliers: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    @classmethod
    def from_config(cls, config: EngramConfig) -> HashLayout:
        """Compute the layout; raises :class:`ConfigError` if a table has fewer rows than its primes need."""
        primes = table_primes(config.vocab_size, len(config.layer_ids), config.max_ngram_size - 1, config.n_heads)
        sizes = [tuple(chain.from_iterable(layer)) for layer in primes]
        rows = tuple(sum(layer) for layer in sizes)
        for layer_id, needed, held in zip(config.layer_ids, rows, config.num_embeddings, strict=True):
            if held < needed:
                raise ConfigError(
                    f"num_embeddings: the table of layer {layer_id} has {held} rows; its primes (vocab_size "
                    f"{config.vocab_size}) sum to {needed}, so at least {needed} rows are needed"
                )
        return cls(
            layer_ids=config.layer_ids,
            max_ngram_size=config.max_ngram_size,
            n_heads=config.n_heads,
            compressed_vocab_size=config.compressed_vocab_size,
            primes=primes,
            offsets=tuple((0, *accumulate(layer[:-1])) for layer in sizes),
            multipliers=tuple(
                hash_multipliers(config.compressed_vocab_size, i, config.max_ngram_size) for i in config.layer_ids
            ),
            rows=rows,
        )

    @property
    def columns(self) -> int:
        """Hash columns of one layer, C = (max_ngram_size - 1) * n_heads."""
        return (self.max_ngram_size - 1) * self.n_heads

    @property
    def needs_int64(self) -> bool:
        """Whether some row id does not fit in int32."""
        return max(self.rows) >= _INT32_ROWS

    def head_sizes(self, layer: int) -> tuple[int, ...]:
        """Rows of each of the C columns of the ``layer``-th Engram layer (an index, not a layer id)."""
        return tuple(chain.from_iterable(self.primes[layer]))

    def index(self, layer_id: int) -> int:
        """Position of ``layer_id`` among the Engram layers, the L axis of hash ids."""
        return self.layer_ids.index(layer_id)


def table_rows(vocab_size: int, layer_ids: Sequence[int], max_ngram_size: int, n_heads: int) -> tuple[int, ...]:
    """Rows that each layer's table needs, the sum of its primes."""
    primes = table_primes(vocab_size, len(layer_ids), max_ngram_size - 1, n_heads)
    return tuple(sum(chain.from_iterable(layer)) for layer in primes)
