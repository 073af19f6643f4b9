"""Tables on a GPU: rows gathered by the shared kernel, also from page-locked host memory, or copied from a mapped file.

Host memory is taken in huge pages where the system has them and registered once; the kernel then reads single rows over
the bus. A mapped file is gathered by the CPU into page-locked memory and copied; that can't be captured in a graph.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from typing import Final

import torch

from engram_core.backend import TableSpec
from engram_core.exchange import Shard
from engram_core.kernels.lookup import lookup_rows
from engram_core.table import EngramTable
from engram_rocm.arch import on
from engram_rocm.hip import HostRuntime, Registration
from engram_rocm.unpack import unpack_rows

# Beside a decoder's own work a look-up must not take every compute unit: its rows wait for memory anyway.
_BACKGROUND_PROGRAMS: Final = 512


class RocmTable(EngramTable):
    """``runtime``: registers rows that lie in host memory with the GPU; None where the device reads them anyway."""

    def __init__(self, spec: TableSpec, device: torch.device, runtime: HostRuntime | None = None) -> None:
        packed = None
        if spec.placement == "host" and runtime is not None:
            packed = host_rows(Shard.plan(spec.rows, spec.head_sizes, spec.exchange).rows, spec.width)
        super().__init__(spec, device, packed)
        # None: gathered on the CPU, and copied.
        self._readable = self.packed if self.packed.device == device else None
        if runtime is not None and spec.placement in ("host", "shared"):
            self._readable = self._map(runtime)
            self.ids_device, self.graph_safe = device, True

    def _map(self, runtime: HostRuntime) -> torch.Tensor:
        """The rows as the device sees them; they stay registered as long as this table lives."""
        if self.shard.rows == 0:
            return torch.empty(0, self.spec.width, dtype=torch.uint8, device=self.device)
        with on(self.device):
            held = runtime.register(self.packed.data_ptr(), self.packed.numel())
        # Holds the rows too: memory must outlive its registration. The end of the process gives everything back.
        weakref.finalize(self, _close, held, self.packed).atexit = False
        return held.rows(self.spec.width, self.device)

    def gather(self, ids: torch.Tensor, out: torch.Tensor, background: bool) -> None:
        with on(self.device):
            if self._readable is None:
                self._copy(ids, out)
            else:
                programs = _BACKGROUND_PROGRAMS if background else None
                lookup_rows(self._readable, ids, out, self.shard.row_start, programs)

    def _copy(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """Gather on the CPU and copy on the current stream; torch keeps page-locked memory until the copy is done."""
        local = ids.to(torch.int64) - self.shard.row_start
        owned = (local >= 0) & (local < self.shard.rows)
        staged = torch.empty(*ids.shape, self.spec.width, dtype=torch.uint8, pin_memory=True)
        chosen = local.masked_fill(~owned, 0).flatten()
        torch.index_select(self.packed, 0, chosen, out=staged.view(-1, self.spec.width))
        staged.masked_fill_(~owned.unsqueeze(-1), 0)
        if out.dtype == torch.uint8:
            out.copy_(staged, non_blocking=True)
        else:
            out.copy_(unpack_rows(staged.to(self.device, non_blocking=True)).view(out.shape))


def host_rows(rows: int, width: int) -> torch.Tensor:
    """Zero rows ``[rows, width]`` uint8, in huge pages where the system has them: fewer address translations."""
    if rows == 0:
        return torch.empty(0, width, dtype=torch.uint8)
    memory = mmap.mmap(-1, rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A system without them refuses the advice: the table is the same, only slower to translate.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(rows, width)


def _close(held: Registration, packed: torch.Tensor) -> None:
    held.close()
    del packed
