"""EngramTable: one layer's rows, packed, and the look-up that fetches them.

A row is 264 bytes in one piece (256 codes, 8 scales) on every placement: one stream of transactions and one address
translation a row, where two arrays would cost two.
"""

from __future__ import annotations

from typing import Final

import torch

from engram_core.checks import INDEX_DTYPES, check_disjoint, check_tensor
from engram_core.errors import InvalidArgumentError, TableError, UnsupportedConfigError
from engram_core.exchange import Shard
from engram_core.formats import E8M0, FP8, code_bytes, rows_to_bf16, scale_bytes, unpack_rows
from engram_core.info import Reason
from engram_core.shared import SharedRows, share_rows
from engram_core.specs import TableSpec
from engram_core.storage import allocate

# Bounds the fp32 temporaries of a look-up (24 columns: about 50 MB a chunk).
_CHUNK_TOKENS: Final = 512


class EngramTable:
    """This rank's part of one layer's table.

    ``packed``: ``[rows, W]`` uint8; ``shard``: which rows and columns these are; ``graph_safe``: whether a look-up may
    be captured in a device graph; ``ids_device``: where :meth:`lookup` wants its ids. A backend subclasses it to gather
    faster: it overrides :meth:`gather` alone, and may pass ``packed`` rows that it allocated itself; for a cache of hot
    rows also :meth:`store_cache` and :meth:`read_hits`.
    """

    host_ids_from: int | None = None
    """Tokens from which on a look-up is faster with its ids in CPU memory too; None: they are of no use."""

    # Tensors made in inference mode can be written in no other, and count no writes: a table reloaded later would pass
    # for the one looked up before.
    @torch.inference_mode(False)
    def __init__(self, spec: TableSpec, device: torch.device, packed: torch.Tensor | None = None) -> None:
        if spec.cache_bytes and type(self).store_cache is EngramTable.store_cache:
            reason = Reason("no-hot-rows", f"{type(self).__name__} has no cache of hot rows", "use cache_bytes=0")
            raise UnsupportedConfigError("cache_bytes: this table can't have one", (reason,))
        self.spec = spec
        self.device = device
        self.shard = Shard.plan(spec.rows, spec.head_sizes, spec.exchange)
        self._shared: SharedRows | None = None
        if packed is None and spec.placement == "shared":
            self._shared = share_rows(spec.rows, spec.width, spec.parallel, device)
            packed = self._shared.packed[self.shard.row_start : self.shard.row_stop]
        self.packed = allocate(spec, self.shard, device) if packed is None else packed
        check_tensor("packed", self.packed, (self.shard.rows, spec.width), (torch.uint8,))
        self.ids_device = self.packed.device
        self.graph_safe = self.packed.device == device and spec.placement != "file"

    @property
    def values(self) -> torch.Tensor:
        """The codes ``[rows, D]`` e4m3fn, a strided view for loading (of a ``file``: private to this process)."""
        return unpack_rows(self.packed)[0]

    @property
    def scales(self) -> torch.Tensor:
        """The scale bytes ``[rows, D/32]`` uint8, a strided view for loading."""
        return unpack_rows(self.packed)[1]

    @property
    def version(self) -> int:
        """Changes with every write to the rows, also through the views, and with every load by the shared writer."""
        own = 0 if self.packed.is_inference() else self.packed._version
        return own if self._shared is None else own + self._shared.loads

    @property
    def stored_rows(self) -> range:
        """Rows of the whole table that :meth:`load` stores here: this rank's; of "shared" all, on its writer alone."""
        if self.spec.placement == "file":
            return range(0)
        if self._shared is None:
            return range(self.shard.row_start, self.shard.row_stop)
        return range(self.spec.rows if self._shared.writer else 0)

    def load(self, values: torch.Tensor | None, scales: torch.Tensor | None, start: int = 0) -> None:
        """Copy rows ``[start, start + n)`` of the whole table: of them, those that this rank holds.

        ``values`` ``[n, D]`` e4m3fn (or bytes), ``scales`` ``[n, D/32]`` e8m0 (or bytes), None: these stay as they are.
        The bytes are copied. Of a table of placement "shared" one rank a node stores them; the others check them only.
        """
        if self.spec.placement == "file":
            raise TableError("load: a table of placement 'file' holds its file's rows; write the file instead")
        dim = self.spec.head_dim
        count: int | str = "n"
        if values is not None:
            count = int(check_tensor("values", values, (count, dim), (FP8, torch.uint8)).shape[0])
        if scales is not None:
            count = int(check_tensor("scales", scales, (count, dim // 32), (E8M0, torch.uint8)).shape[0])
        if isinstance(count, str):
            raise InvalidArgumentError("values", "None, and scales None", "at least one of them")
        if not 0 <= start <= self.spec.rows - count:
            raise InvalidArgumentError(
                "start", f"{start} for {count} rows", f"rows within the table's {self.spec.rows}"
            )
        if self._shared is not None and not self._shared.writer:
            return
        stored, begin = (self.packed, self.shard.row_start) if self._shared is None else (self._shared.packed, 0)
        first = max(start, begin)
        last = min(start + count, begin + stored.shape[0])
        if first < last:
            target, there = stored[first - begin : last - begin], slice(first - start, last - start)
            if values is not None:
                target[:, :dim].copy_(code_bytes(values[there]))
            if scales is not None:
                target[:, dim:].copy_(scale_bytes(scales[there]))
        if self._shared is not None:
            self._shared.count_load()

    def lookup(
        self,
        hash_ids: torch.Tensor,
        out: torch.Tensor | None = None,
        *,
        background: bool = False,
        packed: bool = False,
        host_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rows of this rank's columns, ``[T, columns, D]`` bf16 or, ``packed``, ``[T, columns, W]`` uint8.

        ``hash_ids`` ``[T, C]`` int32 or int64 of all columns, any strides, on ``ids_device``. An id that is negative,
        beyond the table or another shard's gives a zero row, and nothing is read. ``background``: other work runs
        beside it. ``host_ids``: the same ids in CPU memory, for a table that can use them (:attr:`host_ids_from`).
        Raises :class:`InvalidArgumentError`, and :class:`TableError` inside a graph capture where the table is not
        ``graph_safe``.
        """
        ids = check_tensor("hash_ids", hash_ids, ("T", self.spec.columns), INDEX_DTYPES, self.ids_device)
        if host_ids is not None:
            check_tensor("host_ids", host_ids, ids.shape, INDEX_DTYPES, torch.device("cpu"))
        shape = (int(ids.shape[0]), self.shard.columns, self.spec.width if packed else self.spec.head_dim)
        dtype = torch.uint8 if packed else torch.bfloat16
        if out is None:
            out = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            check_tensor("out", out, shape, (dtype,), self.device, dense_last=True)
            check_disjoint("out", out, hash_ids=ids, table=self.packed)
        self.check_capture()
        real = self.shard.real
        if real < self.shard.columns:
            out[:, real:].zero_()
        if self.shard.rows == 0:
            out.zero_()
        elif shape[0]:
            mine = slice(self.shard.first, self.shard.first + real)
            if host_ids is None or self.host_ids_from is None or shape[0] < self.host_ids_from:
                self.gather(ids[:, mine], out[:, :real], background)
            else:
                self.gather(ids[:, mine], out[:, :real], background, host_ids[:, mine])
        return out

    def check_capture(self) -> None:
        """Raises :class:`TableError` inside a graph capture where the table is not ``graph_safe``."""
        if not self.graph_safe and is_capturing(self.device):
            raise TableError(
                f"lookup: a table of placement {self.spec.placement!r} is gathered on the CPU and can't be captured; "
                f"look rows up before the capture, or use placement 'device'"
            )

    def gather(
        self, ids: torch.Tensor, out: torch.Tensor, background: bool, host_ids: torch.Tensor | None = None
    ) -> None:
        """Fill ``out`` ``[T, c, D | W]`` with the rows of checked ``ids`` ``[T, c]``, T at least 1.

        A rank that holds no rows is never asked. ``host_ids`` is given only where :attr:`host_ids_from` allows it.
        """
        for begin in range(0, ids.shape[0], _CHUNK_TOKENS):
            local = ids[begin : begin + _CHUNK_TOKENS].to(torch.int64) - self.shard.row_start
            owned = (local >= 0) & (local < self.shard.rows)
            rows = self.packed[local.masked_fill(~owned, 0)].masked_fill_(~owned.unsqueeze(-1), 0)
            out[begin : begin + _CHUNK_TOKENS].copy_(rows if out.dtype == torch.uint8 else rows_to_bf16(rows))

    def settle(self) -> None:
        """Bring what was derived from the rows up to date; called when every rank has loaded its own."""

    def cache_rows(self, ids: torch.Tensor) -> int:
        """Serve these rows from device memory from now on instead of those before, and return how many were kept.

        ``ids`` ``[n]`` int32 or int64 on the CPU, rows of the whole table, the most wanted first: of this rank's as
        many as ``cache_bytes`` holds. No result changes, only where a row is read; a captured graph follows. To be
        called between steps. Raises :class:`TableError` where the table was made without ``cache_bytes``, and
        :class:`InvalidArgumentError` for an id that is no row.
        """
        self._check_cache("cache_rows")
        check_tensor("ids", ids, ("n",), INDEX_DTYPES, torch.device("cpu"))
        if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < self.spec.rows):
            raise InvalidArgumentError(
                "ids", f"from {int(ids.min())} to {int(ids.max())}", f"rows from 0 to {self.spec.rows - 1}"
            )
        return self.store_cache(ids.to(torch.int64))

    def cache_hits(self) -> tuple[int, int]:
        """Rows that the cache served and rows that were served in all, since the last call; waits for the device."""
        self._check_cache("cache_hits")
        return self.read_hits()

    def _check_cache(self, what: str) -> None:
        if not self.spec.cache_bytes:
            raise TableError(f"{what}: this table has no cache of hot rows; make it with cache_bytes")
        if is_capturing(self.device):
            raise TableError(f"{what}: waits for the device, and can't be captured; call it between steps")

    def store_cache(self, ids: torch.Tensor) -> int:
        """:meth:`cache_rows` of checked ``ids``; whoever declares hot rows writes it (docs/backend-authors.md)."""
        raise NotImplementedError(f"{type(self).__name__} was given cache_bytes and has no cache of hot rows")

    def read_hits(self) -> tuple[int, int]:
        """:meth:`cache_hits`; whoever declares hot rows writes it (docs/backend-authors.md)."""
        raise NotImplementedError(f"{type(self).__name__} was given cache_bytes and has no cache of hot rows")


def is_capturing(device: torch.device) -> bool:
    """Whether the current stream of ``device`` is being captured in a graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
