"""Rows of a table in host memory, gathered by the CPU and copied: for many tokens whose ids the host knows.

A GPU that reads single rows over the bus waits for an address translation for each; a copy of gathered rows runs at the
bus's own speed. The CPU gathers one piece while the one before travels, and where the device can read the table too it
takes a share of the tokens itself meanwhile: the two wait for different things.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from engram_core.kernels.lookup import lookup_rows

# Rows a piece: fewer, and starting the CPU's threads costs more than what overlaps.
_PIECE_ROWS: Final = 98304


class CpuGather:
    """``packed`` ``[rows, W]`` uint8 in CPU memory: rows ``[start, start + rows)`` of the whole table."""

    def __init__(self, packed: torch.Tensor, start: int, device: torch.device) -> None:
        self._packed = packed
        self._start = start
        self._device = device
        self._pinned = device.type == "cuda"
        self._copies = torch.Stream(device=device) if self._pinned else None
        self._counting = torch.empty(0, dtype=torch.int32, device=device)

    def __call__(
        self,
        ids: torch.Tensor,
        out: torch.Tensor,
        meanwhile: Callable[[torch.Tensor], None] | None = None,
        share: float = 0.0,
    ) -> None:
        """Fill ``out`` ``[T, c, D | W]`` on the device with the rows of ``ids`` ``[T, c]`` in CPU memory.

        ``meanwhile(out[:n])``: launches the look-up of the first ``n = share * T`` tokens in another way. The current
        stream has everything when this returns; the calling thread works until the last piece is on its way.
        """
        first = int(ids.shape[0] * share) if meanwhile is not None else 0
        if self._copies is None:
            self._gather(ids, out)
            return
        current = torch.accelerator.current_stream(self._device)
        # Before the device's own share: the copies must not wait for it, only for earlier readers of ``out``.
        self._copies.wait_stream(current)
        if meanwhile is not None and first:
            meanwhile(out[:first])
        with self._copies:
            self._gather(ids[first:], out[first:])
        # Whoever waits for the look-up waits for the current stream.
        current.wait_stream(self._copies)

    def _gather(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        tokens, columns = (int(n) for n in ids.shape)
        rows, width = (int(n) for n in self._packed.shape)
        flat = ids.reshape(-1)
        # int64 where a number may be beyond int32: torch would wrap it.
        index = flat if self._start == 0 else flat.to(torch.int64) - self._start
        elsewhere = None
        low, high = torch.aminmax(index)  # one pass tells that all rows are here, as they are on one rank
        if int(low) < 0 or int(high) >= rows:
            index = index.to(torch.int64)
            elsewhere = (index < 0) | (index >= rows)
            index = index.masked_fill(elsewhere, 0)
        # A new one each time: the copies may wait for long, and torch keeps page-locked memory until they are done.
        gathered = torch.empty(tokens * columns, width, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        there = torch.empty(tokens, columns, width, dtype=torch.uint8, device=self._device)
        each = max(1, -(-tokens // max(1, round(tokens * columns / _PIECE_ROWS))))
        for begin in range(0, tokens, each):
            end = min(begin + each, tokens)
            part = slice(begin * columns, end * columns)
            torch.index_select(self._packed, 0, index[part], out=gathered[part])
            if elsewhere is not None:
                gathered[part].masked_fill_(elsewhere[part].unsqueeze(1), 0)
            there[begin:end].copy_(gathered[part].view(end - begin, columns, width), non_blocking=True)
            if out.dtype == torch.uint8:
                out[begin:end].copy_(there[begin:end])
            else:
                count = self._count((end - begin) * columns).view(end - begin, columns)
                lookup_rows(there[begin:end].view(-1, width), count, out[begin:end])

    def _count(self, rows: int) -> torch.Tensor:
        """0, 1, 2, ... on the device: gathered rows lie in order."""
        if self._counting.shape[0] < rows:
            self._counting = torch.arange(rows, dtype=torch.int32, device=self._device)
        return self._counting[:rows]
