"""Tables on an NVIDIA GPU: rows gathered by the shared kernel, from device memory or over the bus from host memory.

Tables of placement "shared" and "file" are gathered on the CPU, as the core does it.
"""

from __future__ import annotations

import torch

from engram_core.backend import TableSpec
from engram_core.kernels.lookup import lookup_rows
from engram_core.table import EngramTable
from engram_nvidia.arch import on
from engram_nvidia.host import Runtime


class NvidiaTable(EngramTable):
    """``runtime``: page-locks rows that lie in host memory; None where the device is the host (interpreted)."""

    def __init__(self, spec: TableSpec, device: torch.device, runtime: Runtime | None) -> None:
        super().__init__(spec, device)
        self._here = self.packed.device == device
        if spec.placement == "host" and runtime is not None:
            with on(device):
                runtime.register(self.packed)
            self.ids_device, self.graph_safe, self._here = device, True, True

    def gather(self, ids: torch.Tensor, out: torch.Tensor, background: bool) -> None:
        if not self._here or self.shard.rows == 0:
            super().gather(ids, out, background)
            return
        with on(self.device):
            lookup_rows(self.packed, ids, out, self.shard.row_start, self._programs(background))

    def _programs(self, background: bool) -> int | None:
        """Beside a decoder's own work a look-up leaves it most of the card: its rows wait for memory anyway."""
        if not background or self.device.type == "cpu":
            return None
        return 4 * int(torch.cuda.get_device_properties(self.device).multi_processor_count)
