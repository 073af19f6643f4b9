"""Rows of a host table that also lie in device memory: the frequent ones, chosen by whoever runs the model.

Which rows are cached changes no result, only where a row is read. Everything lies at addresses that stay, so a captured
graph serves the rows that are cached when it is replayed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from engram_core.errors import InvalidArgumentError
from engram_core.kernels.lookup import HotSet

_WORD: Final = 64
_PIECE: Final = 2**16
_INT32_MAX: Final = 2**31 - 1


def cached_rows(rows: int, width: int, nbytes: int) -> int:
    """How many of ``rows`` rows of ``width`` bytes fit in ``nbytes`` beside their index.

    Raises :class:`InvalidArgumentError` where not one does.
    """
    index = -(-rows // _WORD) * (8 + 4)
    slots = min((nbytes - index) // width, rows, _INT32_MAX)
    if slots < min(1, rows):
        raise InvalidArgumentError(
            "cache_bytes", str(nbytes), f"at least {index + width}: the index of {rows} rows, and one row"
        )
    return slots


class HotCache:
    """``nbytes`` of device memory for rows of ``packed`` ``[rows, W]`` in CPU memory, its index counted in."""

    def __init__(self, packed: torch.Tensor, nbytes: int, device: torch.device) -> None:
        rows, width = (int(n) for n in packed.shape)
        slots, words = cached_rows(rows, width, nbytes), -(-rows // _WORD)
        self._packed = packed
        self._device = device
        self.version = -1
        """The table's, when rows were copied from it."""
        self._kept = torch.empty(0, dtype=torch.int64, device="cpu")
        self.set = HotSet(
            rows=torch.zeros(slots, width, dtype=torch.uint8, device=device),
            bits=torch.zeros(words, dtype=torch.int64, device=device),
            ranks=torch.zeros(words, dtype=torch.int32, device=device),
            counts=torch.zeros(2, 64, dtype=torch.int64, device=device),
        )

    def replace(self, local: torch.Tensor) -> int:
        """Cache rows ``local`` (int64 on the CPU, the most wanted first), as many as fit; return how many.

        To be called between steps: it waits for the device before it begins and when it ends, since look-ups run on
        streams that this one knows nothing of.
        """
        self._settle()  # no look-up is between its bits and its row
        self.set.bits.zero_()  # from here on nothing is cached, should a copy fail
        self._kept = _first_of_each(local)[: self.set.rows.shape[0]].sort().values
        self.refresh(0, int(self._packed.shape[0]))
        # Made on the CPU: the device may have no memory to spare. Ids are distinct, so adding powers of two sets bits
        # (the highest one as the sign).
        word, one = self._kept // _WORD, torch.ones_like(self._kept)
        bits, counts = (torch.zeros(self.set.bits.shape, dtype=torch.int64, device="cpu") for _ in range(2))
        counts.scatter_add_(0, word, one)
        self.set.ranks.copy_(counts.cumsum(0) - counts)
        self.set.bits.copy_(bits.scatter_add_(0, word, one << self._kept % _WORD))
        self._settle()  # none that comes now finds some bits set, and others not yet
        return int(self._kept.numel())

    def refresh(self, first: int, last: int) -> None:
        """Copy those cached rows again that lie in ``[first, last)``, after the table was written there."""
        begin, end = torch.searchsorted(self._kept, torch.tensor([first, last], device="cpu")).tolist()
        for at in range(begin, end, _PIECE):
            part = self._packed[self._kept[at : min(at + _PIECE, end)]]
            self.set.rows[at : at + part.shape[0]].copy_(part)

    def hits(self) -> tuple[int, int]:
        """Rows served from here, and rows served in all, since the last call; waits for the device."""
        self._settle()
        served, asked = (int(n) for n in self.set.counts.sum(1).tolist())
        self.set.counts.zero_()
        return served, asked

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _first_of_each(ids: torch.Tensor) -> torch.Tensor:
    """``ids`` without what came before, in their order."""
    _, firsts = np.unique(ids.numpy(), return_index=True)
    return ids[torch.from_numpy(np.sort(firsts))]
