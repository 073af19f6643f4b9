"""Tables on a GPU: rows gathered by the shared kernel from device memory, or over the bus from host memory.

Host memory ("host", "shared") is registered once, and the kernel reads single rows of it through the device's own
address: few of them as they come, many in address order. With the ids in CPU memory too, many tokens are gathered by
the CPU instead, as those of a mapped file ("file") always are. Which way is taken depends only on the number of tokens,
on whether a graph is captured and on whether ids came in CPU memory: on values that all ranks share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engram_core.errors import InvalidArgumentError
from engram_core.exchange import Shard
from engram_core.gpu.gather import CpuGather
from engram_core.gpu.hot import HotCache, cached_rows
from engram_core.gpu.memory import host_rows
from engram_core.gpu.runtime import HostRuntime
from engram_core.kernels.device import on
from engram_core.kernels.lookup import lookup_rows
from engram_core.kernels.order import address_order
from engram_core.specs import TableSpec
from engram_core.table import EngramTable, is_capturing


@dataclass(frozen=True)
class Tuning:
    """What was measured on a kind of GPU and its host (tokens are those of 24 columns).

    ``background``: programs of a look-up beside other work, for each multiprocessor, of a table in device memory.
    ``in_flight``: rows of host memory that such a look-up reads at a time: the bus serves them one by one, and more
    that wait for it slow everything else that reads memory. ``ordered``: rows from which on address order pays;
    ``in_order``: rows then read at a time. Of both twice as many with a cache of hot rows: many of them are read there.
    ``cpu_tokens``: tokens from which on the CPU gathers, where it has the ids; ``device_share``: of those, what the
    device reads meanwhile.
    """

    background: int = 4
    in_flight: int = 96
    ordered: int = 3072
    in_order: int = 512
    cpu_tokens: int = 2048
    device_share: float = 0.35

    def __post_init__(self) -> None:
        if not 0 <= self.device_share < 1:
            raise InvalidArgumentError("device_share", str(self.device_share), "a share from 0 on, below 1")


class GpuTable(EngramTable):
    """``runtime``: registers rows that lie in host memory; None where the device is the host (interpreted)."""

    @torch.inference_mode(False)  # as EngramTable's own
    def __init__(
        self, spec: TableSpec, device: torch.device, runtime: HostRuntime | None, tuning: Tuning | None = None
    ) -> None:
        over_bus = runtime is not None and spec.placement in ("host", "shared")
        packed, rows = None, Shard.plan(spec.rows, spec.head_sizes, spec.exchange).rows
        if spec.cache_bytes:
            cached_rows(rows, spec.width, spec.cache_bytes)  # refuses too few, before gigabytes are touched
        if over_bus and spec.placement == "host":
            packed = host_rows(rows, spec.width)
        super().__init__(spec, device, packed)
        self._tuning = tuning or Tuning()
        self._over_bus = over_bus
        # None: gathered on the CPU, and copied.
        self._readable = self.packed if self.packed.device == device and spec.placement != "file" else None
        if runtime is not None and over_bus:
            self._readable = self._register(runtime)
            self.ids_device, self.graph_safe = device, True
        self._cpu = CpuGather(self.packed, self.shard.row_start, device) if self.packed.device.type == "cpu" else None
        self._hot = HotCache(self.packed, spec.cache_bytes, device) if spec.cache_bytes else None
        if over_bus and self._hot is None and spec.exchange.data_size == 1:
            self.host_ids_from = self._tuning.cpu_tokens

    def _register(self, runtime: HostRuntime) -> torch.Tensor:
        if self.shard.rows == 0:
            return torch.empty(0, self.spec.width, dtype=torch.uint8, device=self.device)
        writable = self._shared is None or self._shared.writer
        with on(self.device):
            return runtime.register(self.packed, writable).view(self.device)

    def gather(
        self, ids: torch.Tensor, out: torch.Tensor, background: bool, host_ids: torch.Tensor | None = None
    ) -> None:
        if not is_capturing(self.device):
            self.settle()
        with on(self.device):
            if self._readable is None:
                assert self._cpu is not None  # what the device can't read is in CPU memory
                self._cpu(ids, out)
            elif host_ids is not None and self._cpu is not None and not is_capturing(self.device):
                first = self._tuning.device_share
                self._cpu(host_ids, out, lambda part: self._read(ids[: part.shape[0]], part, background), first)
            else:
                self._read(ids, out, background)

    def _read(self, ids: torch.Tensor, out: torch.Tensor, background: bool) -> None:
        assert self._readable is not None
        start, tuning = self.shard.row_start, self._tuning
        hot = None if self._hot is None else self._hot.set
        if not self._over_bus:
            lookup_rows(self._readable, ids, out, start, self._programs(background), hot=hot)
            return
        order, in_flight = None, tuning.in_flight if background else None
        if ids.numel() >= tuning.ordered:
            order, in_flight = address_order(ids, start, self.shard.row_stop), tuning.in_order
        if hot is not None and in_flight is not None:
            in_flight *= 2
        lookup_rows(self._readable, ids, out, start, in_flight=in_flight, order=order, hot=hot)

    def _programs(self, background: bool) -> int | None:
        """Programs of a look-up in device memory; beside a decoder's own work a bounded number."""
        if not background or self.device.type == "cpu":
            return None
        return self._tuning.background * int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def store_cache(self, ids: torch.Tensor) -> int:
        assert self._hot is not None  # cache_rows asks only tables that have one
        local = ids - self.shard.row_start
        self._hot.version = self.version
        return self._hot.replace(local[(local >= 0) & (local < self.shard.rows)])

    def read_hits(self) -> tuple[int, int]:
        assert self._hot is not None  # cache_hits asks only tables that have one
        return self._hot.hits()

    def load(self, values: torch.Tensor | None, scales: torch.Tensor | None, start: int = 0) -> None:
        # A large table comes in many pieces: of each only what is cached is copied again.
        current = self._hot is not None and self._hot.version == self.version
        if self._over_bus and self.device.type == "cuda":
            # The CPU writes behind no stream: what was enqueued before it still reads the rows of before.
            torch.cuda.synchronize(self.device)
        super().load(values, scales, start)
        loaded = values if values is not None else scales
        if self._hot is None or loaded is None or not self.stored_rows:
            return
        if current:
            first = start - self.shard.row_start
            self._hot.refresh(first, first + int(loaded.shape[0]))
            self._hot.version = self.version
        else:
            self.settle()

    def settle(self) -> None:
        # The version first: what another process writes meanwhile is copied again.
        if self._hot is not None and self._hot.version != (version := self.version):
            self._hot.refresh(0, self.shard.rows)
            self._hot.version = version
