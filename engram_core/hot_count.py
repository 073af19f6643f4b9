"""RowCounter: counts the rows that token batches look up, in bounded memory.

Ids wait raw until there are enough of them for one sort; a layer's counts are two arrays sorted by id, 12 bytes a row.
Where more than ``max_rows`` rows were seen, the rarest are forgotten: most rows are seen once and never again, and a
row that comes back is counted from 1. That can change which rows are chosen, among rare ones; it changes no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from engram_core.checks import describe
from engram_core.errors import InvalidArgumentError
from engram_core.hashing import TokenBatch, TorchHasher, check_token_map, with_lookback
from engram_core.hot import HotRows, hashing_fingerprint
from engram_core.layout import HashLayout

if TYPE_CHECKING:
    from engram_core.config import EngramConfig
    from engram_core.tokens import TokenMap

    Ids = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

MAX_ROWS: Final = 50_000_000
"""Rows a layer that a counter keeps at most, unless told otherwise: 0.6 GB, and twice that for a moment."""
_BATCH_TOKENS: Final = 2**16
_PENDING: Final = 2**24


class RowCounter:
    """Counts the look-ups of every live token, C a layer, by row.

    ``layer_ids``: the Engram layers to count, default all. ``max_rows``: rows a layer beyond which the rarest are
    dropped. ``tokens``: live tokens so far. ``dropped``: for each layer how often a row was dropped.

    Raises :class:`TokenMapError` if the map is not the configuration's, :class:`InvalidArgumentError` for a layer
    without Engram or a ``max_rows`` below 2.
    """

    def __init__(
        self,
        config: EngramConfig,
        token_map: TokenMap,
        layer_ids: Sequence[int] | None = None,
        max_rows: int = MAX_ROWS,
    ) -> None:
        check_token_map(config, token_map)
        self.layout = HashLayout.from_config(config)
        self.layer_ids = tuple(sorted(set(self.layout.layer_ids if layer_ids is None else layer_ids)))
        if not self.layer_ids or not set(self.layer_ids) <= set(self.layout.layer_ids):
            raise InvalidArgumentError(
                "layer_ids", list(self.layer_ids), f"Engram layers of the model, {list(self.layout.layer_ids)}"
            )
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 2:
            raise InvalidArgumentError("max_rows", describe(max_rows), "an int of at least 2")
        self.max_rows = max_rows
        self.tokens = 0
        self.fingerprint = hashing_fingerprint(self.layout, token_map)
        self._hash = TorchHasher(self.layout, token_map, torch.device("cpu"))
        self._layers = {layer_id: _Layer(self.layout.needs_int64, max_rows) for layer_id in self.layer_ids}

    @property
    def dropped(self) -> dict[int, int]:
        return {layer_id: layer.dropped for layer_id, layer in self._layers.items()}

    def add(self, batch: TokenBatch) -> None:
        """Count a batch (CPU tensors): its tokens that are neither dead nor padding.

        Raises :class:`InvalidArgumentError` for tensors elsewhere or a lookback of another width.
        """
        if batch.device.type != "cpu":
            raise InvalidArgumentError("batch", f"tensors on {batch.device}", "tensors on the CPU")
        ids = self._hash(with_lookback(batch, self.layout.max_ngram_size - 1))
        live = torch.arange(len(batch)) < batch.query_start[-1]
        if batch.dead is not None:
            live &= ~batch.dead
        self.tokens += int(live.sum())
        for layer_id, layer in self._layers.items():
            layer.add(ids[live, self.layout.index(layer_id)].reshape(-1).numpy())

    def add_documents(self, documents: Sequence[Sequence[int]]) -> None:
        """Count whole documents, each a sequence of raw token ids that begins at position 0."""
        for batch in document_batches(documents, self.layout.max_ngram_size - 1):
            self.add(batch)

    def update(self, other: RowCounter) -> None:
        """Add what another counter of the same model and layers has counted."""
        if (other.fingerprint, other.layer_ids) != (self.fingerprint, self.layer_ids):
            raise InvalidArgumentError(
                "other",
                f"layers {list(other.layer_ids)}, fingerprint {other.fingerprint[:12]}",
                f"layers {list(self.layer_ids)}, fingerprint {self.fingerprint[:12]}",
            )
        self.tokens += other.tokens
        for layer_id, layer in self._layers.items():
            layer.merge(*other._layers[layer_id].settled())
            layer.dropped += other._layers[layer_id].dropped

    def result(self, rows: int | None = None) -> HotRows:
        """The counts so far; ``rows``: only that many of each layer, the most frequent. Counting may go on."""
        ids, counts = {}, {}
        for layer_id, layer in self._layers.items():
            held, times = layer.settled()
            order = _by_count(times)[:rows]  # a stable sort: of equal counts the smaller id comes first
            ids[layer_id], counts[layer_id] = torch.from_numpy(held[order]), torch.from_numpy(times[order])
        return HotRows(ids, counts, self.tokens, self.fingerprint)


class _Layer:
    """``ids`` ascending, ``counts`` of the same length, and raw ids that wait to be counted."""

    def __init__(self, wide: bool, max_rows: int) -> None:
        self._ids: Ids = np.empty(0, dtype=np.int64 if wide else np.int32)
        self._counts: Ids = np.empty(0, dtype=np.int64)
        self._pending: list[Ids] = []
        self._waiting = 0
        self._max_rows = max_rows
        self.dropped = 0

    def add(self, ids: Ids) -> None:
        self._pending.append(ids)
        self._waiting += ids.size
        # As many as half of what is merged into, so that merging costs a fixed time an id.
        if self._waiting >= max(_PENDING, self._ids.size // 2):
            self.settled()

    def settled(self) -> tuple[Ids, Ids]:
        """Nothing waits any more: ids, counts."""
        if self._pending:
            ids, counts = np.unique(np.concatenate(self._pending), return_counts=True)
            self._pending, self._waiting = [], 0
            self.merge(ids, counts)
        return self._ids, self._counts

    def merge(self, ids: Ids, counts: Ids) -> None:
        """Add sorted, different ids with their counts; then forget the rarest where there are too many."""
        self.settled()
        place = np.searchsorted(self._ids, ids)
        known = np.zeros(ids.size, dtype=bool)
        inside = place < self._ids.size
        known[inside] = self._ids[place[inside]] == ids[inside]
        self._counts[place[known]] += counts[known]
        self._ids = np.insert(self._ids, place[~known], ids[~known])
        self._counts = np.insert(self._counts, place[~known], counts[~known])
        if self._ids.size > self._max_rows:
            self._drop()

    def _drop(self) -> None:
        """All that were seen once, but at least half stay; then the rarest until the limit is kept."""
        stay = min(self._max_rows, max(self._max_rows // 2, int(np.count_nonzero(self._counts > 1))))
        chosen = np.sort(_by_count(self._counts)[:stay])
        self.dropped += self._ids.size - stay
        self._ids, self._counts = self._ids[chosen], self._counts[chosen]


def _by_count(counts: Ids) -> Ids:
    return np.argsort(-counts, kind="stable")


def document_batches(
    documents: Sequence[Sequence[int]], lookback: int, tokens: int = _BATCH_TOKENS
) -> Iterator[TokenBatch]:
    """Documents one after another, at most ``tokens`` a batch; one that is cut goes on with its ``lookback``."""
    lengths = np.array([len(document) for document in documents], dtype=np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    total = int(ends[-1]) if len(ends) else 0
    flat = np.concatenate([np.asarray(document, dtype=np.int64) for document in documents]) if total else np.empty(0)
    positions = np.arange(total) - np.repeat(starts, lengths)
    for begin in range(0, total, tokens):
        end = min(begin + tokens, total)
        first = np.unique(np.concatenate([[begin], starts[(starts > begin) & (starts < end)]]))
        # What lies before position 0 is another document's, and is ignored there.
        before = flat[np.maximum(first[:, None] - 1 - np.arange(lookback), 0)]
        yield TokenBatch(
            input_ids=torch.from_numpy(flat[begin:end]),
            positions=torch.from_numpy(positions[begin:end]),
            query_start=torch.from_numpy(np.append(first, end) - begin),
            lookback=torch.from_numpy(before),
        )
