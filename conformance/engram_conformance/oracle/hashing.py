"""Layout and hash ids (CONTRACT 2 and 3) in Python integers: slow, and with no overflow to hide a fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt

import numpy as np

from engram_conformance.oracle.numbers import I64

_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class LayoutNumbers:
    """``primes`` ``[L][n-1][heads]``, ``offsets`` ``[L][C]``, ``multipliers`` ``[L][n]``, ``rows`` ``[L]``."""

    layer_ids: tuple[int, ...]
    max_ngram_size: int
    n_heads: int
    primes: tuple[tuple[tuple[int, ...], ...], ...]
    offsets: tuple[tuple[int, ...], ...]
    multipliers: tuple[tuple[int, ...], ...]
    rows: tuple[int, ...]

    @property
    def columns(self) -> int:
        """C, n-gram size major, head minor."""
        return (self.max_ngram_size - 1) * self.n_heads

    def head_sizes(self, layer: int) -> tuple[int, ...]:
        """Rows of each column of the ``layer``-th layer (an index)."""
        return tuple(p for sizes in self.primes[layer] for p in sizes)


def _small_primes(limit: int) -> list[int]:
    sieve = bytearray([1]) * (limit + 1)
    sieve[:2] = b"\0\0"
    for p in range(2, isqrt(limit) + 1):
        if sieve[p]:
            sieve[p * p :: p] = bytes(len(range(p * p, limit + 1, p)))
    return [p for p in range(limit + 1) if sieve[p]]


def _primes(base: int, layers: int, sizes: int, heads: int) -> list[list[list[int]]]:
    divisors = _small_primes(isqrt(base * 2 + 1000) + 1)

    def prime(number: int) -> bool:
        return number > 1 and all(number % d for d in divisors if d * d <= number)

    used: set[int] = set()
    result: list[list[list[int]]] = []
    for _ in range(layers):
        result.append([])
        for _ in range(sizes):
            last = base - 1
            result[-1].append([])
            for _ in range(heads):
                last += 1
                while last in used or not prime(last):
                    last += 1
                used.add(last)
                result[-1][-1].append(last)
    return result


def layout(
    vocab_size: int, layer_ids: Sequence[int], max_ngram_size: int, n_heads: int, compressed_vocab_size: int
) -> LayoutNumbers:
    """The numbers that follow from a configuration; ``vocab_size`` is its ``engram_vocab_size``."""
    primes = _primes(vocab_size, len(layer_ids), max_ngram_size - 1, n_heads)
    bound = max(1, _INT64_MAX // compressed_vocab_size // 2)
    offsets, multipliers, rows = [], [], []
    for layer_id, layer in zip(layer_ids, primes, strict=True):
        begin, starts = 0, []
        for p in (p for size in layer for p in size):
            starts.append(begin)
            begin += p
        drawn = np.random.default_rng(10007 * layer_id).integers(0, bound, size=max_ngram_size, dtype=np.int64)
        offsets.append(tuple(starts))
        rows.append(begin)
        multipliers.append(tuple(int(m) * 2 + 1 for m in drawn))
    return LayoutNumbers(
        tuple(layer_ids),
        max_ngram_size,
        n_heads,
        tuple(tuple(tuple(size) for size in layer) for layer in primes),
        tuple(offsets),
        tuple(multipliers),
        tuple(rows),
    )


def hash_ids(
    numbers: LayoutNumbers,
    token_map: Sequence[int] | I64,
    pad_token_id: int,
    input_ids: Sequence[int],
    positions: Sequence[int],
    query_start: Sequence[int],
    lookback: Sequence[Sequence[int]] | None = None,
    dead: Sequence[bool] | None = None,
) -> I64:
    """Hash ids ``[T, L, C]`` of a packed batch; ``token_map``: compressed id of every raw id (a sequence).

    ``lookback`` ``[R][n-1]``: raw ids before each request's chunk, newest first, -1 dead or unknown; None: all unknown.
    """
    input_ids, positions, starts = ([int(v) for v in x] for x in (input_ids, positions, query_start))
    total, n = len(input_ids), numbers.max_ngram_size
    result = np.full((total, len(numbers.layer_ids), numbers.columns), -1, dtype=np.int64)
    for r in range(len(starts) - 1):
        for t in range(starts[r], min(starts[r + 1], total)):
            j = t - starts[r]
            before: list[int | None] = []  # raw ids of the token and its predecessors; None: dead or unknown
            for s in range(n):
                if positions[t] - s < 0:
                    before.append(None)
                elif s <= j:
                    before.append(None if dead is not None and bool(dead[t - s]) else input_ids[t - s])
                else:
                    before.append(None if lookback is None else int(lookback[r][s - j - 1]))
            result[t] = _hash_one(numbers, token_map, pad_token_id, before)
    return result


def hash_sequence(
    numbers: LayoutNumbers,
    token_map: Sequence[int] | I64,
    pad_token_id: int,
    input_ids: Sequence[int],
    dead: Sequence[bool] | None = None,
) -> I64:
    """Hash ids ``[T, L, C]`` of one whole sequence, from its own tokens alone."""
    ids = [int(v) for v in input_ids]
    result = np.empty((len(ids), len(numbers.layer_ids), numbers.columns), dtype=np.int64)
    for p in range(len(ids)):
        before = [
            None if p - s < 0 or (dead is not None and bool(dead[p - s])) else ids[p - s]
            for s in range(numbers.max_ngram_size)
        ]
        result[p] = _hash_one(numbers, token_map, pad_token_id, before)
    return result


def _hash_one(
    numbers: LayoutNumbers, token_map: Sequence[int] | I64, pad_token_id: int, before: Sequence[int | None]
) -> list[list[int]]:
    compressed: list[int] = []
    blocked = False
    for raw in before:
        blocked = blocked or raw is None or not 0 <= raw < len(token_map)
        compressed.append(int(token_map[pad_token_id if blocked or raw is None else raw]))
    rows: list[list[int]] = []
    for layer, factors in enumerate(numbers.multipliers):
        roll, columns = 0, []
        for s, value in enumerate(compressed):
            roll ^= value * factors[s]
            if s >= 1:
                columns += [roll % prime for prime in numbers.primes[layer][s - 1]]
        rows.append([c + o for c, o in zip(columns, numbers.offsets[layer], strict=True)])
    return rows
