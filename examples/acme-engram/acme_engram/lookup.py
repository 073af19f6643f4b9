"""Row look-up: whole packed rows are copied first, then decoded by table; large batches in several threads.

Threads pay most for a mapped file: each waits for its own pages, so the disk sees several requests at once.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from acme_engram.numbers import Bytes, decode, octets, words
from acme_engram.threads import spread
from engram_core.table import EngramTable

# Tokens fetched together: 24 rows of 264 bytes each, and eight bytes a value while they are decoded, stay in L2.
_CHUNK: Final = 8


class AcmeTable(EngramTable):
    """The core's table, gathered by NumPy."""

    def gather(self, ids: torch.Tensor, out: torch.Tensor, background: bool) -> None:
        packed, wanted = octets(self.packed), ids.numpy()
        owned = (wanted >= self.shard.row_start) & (wanted < self.shard.row_stop)
        local = wanted.astype(np.int64) - self.shard.row_start

        def fetch(tokens: slice) -> None:
            for begin in range(tokens.start, tokens.stop, _CHUNK):
                here = slice(begin, min(begin + _CHUNK, tokens.stop))
                rows = _rows(packed, local[here], owned[here])
                if out.dtype == torch.uint8:
                    octets(out)[here] = rows
                else:
                    decode(rows, words(out)[here])

        spread(fetch, len(local), _CHUNK)


def _rows(packed: Bytes, local: NDArray[np.int64], owned: NDArray[np.bool_]) -> Bytes:
    """Packed rows ``[t, c, W]``; where an id is not ours nothing is read, and the row is zero."""
    if owned.all():
        return packed.take(local, axis=0, mode="clip")
    rows = np.zeros((*local.shape, packed.shape[1]), np.uint8)
    rows[owned] = packed.take(local[owned], axis=0, mode="clip")
    return rows
