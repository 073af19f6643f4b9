"""Hash ids on a tape: each request's lookback and chunk are laid end to end, so a predecessor is a step back on it.

The map is read once a token and not once a predecessor, and no predecessor is gathered: the tape is shifted.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.hashing import TokenBatch
from engram_core.layout import HashLayout
from engram_core.tokens import TokenMap

Longs: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class AcmeHasher:
    """From a checked batch, its lookback ``[R, n-1]``, to hash ids ``[T, L, C]``; a new tensor at each call."""

    def __init__(self, layout: HashLayout, token_map: TokenMap) -> None:
        self._back = layout.max_ngram_size - 1
        self._map = token_map.ids.numpy().astype(np.int64)
        self._pad = np.int64(token_map.pad_id)
        self._multipliers = np.array(layout.multipliers, np.int64)  # [L, n]
        self._primes = np.array(layout.primes, np.uint64)  # [L, n-1, heads]
        self._offsets = np.array(layout.offsets, np.uint64).reshape(self._primes.shape)
        self._dtype = np.int64 if layout.needs_int64 else np.int32

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        tokens, requests, back = len(batch), batch.requests, self._back
        layers, sizes, heads = self._primes.shape
        ids = np.full((tokens, layers, sizes, heads), -1, self._dtype)
        if tokens and requests:
            # Whatever query_start holds, every place on the tape stays within it.
            start = np.clip(batch.query_start.numpy().astype(np.int64), 0, tokens)
            request = np.clip(np.searchsorted(start, np.arange(tokens), side="right") - 1, 0, requests - 1)
            place = np.arange(tokens) + (request + 1) * back
            value, bad = self._tape(batch, start[:-1], place)
            real = np.arange(tokens) < start[-1]
            hashed = self._hash(batch.positions.numpy(), place, value, bad)
            ids[real] = hashed[real]
        return torch.from_numpy(ids.reshape(tokens, layers, sizes * heads))

    def _tape(self, batch: TokenBatch, start: Longs, place: Longs) -> tuple[Longs, Flags]:
        """Compressed ids along the tape, and which of them block an n-gram."""
        back = self._back
        raw = np.full(len(place) + batch.requests * back, -1, np.int64)
        # Before each chunk its lookback, oldest first.
        ahead = start + (np.arange(batch.requests) + 1) * back
        raw[ahead[:, None] - 1 - np.arange(back)] = batch.lookback.numpy()
        raw[place] = batch.input_ids.numpy()
        bad = (raw < 0) | (raw >= len(self._map))
        if batch.dead is not None:
            bad[place] |= batch.dead.numpy()
        return self._map[np.where(bad, 0, raw)], bad

    def _hash(self, positions: NDArray[Any], place: Longs, value: Longs, bad: Flags) -> NDArray[np.uint64]:
        blocked = np.zeros(len(place), bool)
        roll = np.zeros((len(place), len(self._multipliers)), np.int64)
        found = np.empty((len(place), *self._primes.shape), np.uint64)
        for s in range(self._back + 1):
            blocked |= bad[place - s] | (positions < s)  # cumulative: what is older than a blocked token is blocked too
            token = np.where(blocked, self._pad, value[place - s])
            roll ^= token[:, None] * self._multipliers[:, s]
            if s:
                # Never negative, and unsigned division is the faster one.
                found[:, :, s - 1] = roll.view(np.uint64)[:, :, None] % self._primes[:, s - 1] + self._offsets[:, s - 1]
        return found
