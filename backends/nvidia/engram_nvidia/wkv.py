"""The WKV projection of this rank: a share of the outputs, gathered over the tensor-parallel ranks.

What is common to the ways of multiplying: which outputs a rank computes, the checks, the exchange. ``wkv_w8a16.py`` and
``wkv_mxfp8.py`` say how.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from engram_core.backend import Wkv, WkvSpec
from engram_core.formats import BLOCK, scale_bytes
from engram_core.kernels.device import on
from engram_nvidia.dense import product


class ColumnWkv(Wkv):
    """Column-parallel: each rank computes ``N / P`` outputs and all gather them, where ``N / P`` is a multiple of 32.

    Under sequence parallelism, and where the split is none, each rank computes the whole projection of its own tokens.
    bf16 weights are multiplied as they are.
    """

    side_stream_safe = True

    def __init__(self, spec: WkvSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self.columns = columns(spec)
        self.collective_in_forward = self.columns.stop - self.columns.start < spec.out_features
        self._dense: torch.Tensor | None = None

    def store(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        # In inference mode, since what was loaded in it can be written in no other.
        with on(self.device), torch.inference_mode():
            part = weight[self.columns]
            if scale is None:
                self.keep_dense(part)
            else:
                blocks = weight.shape[0] // scale.shape[0]  # 32 for 32x32 blocks, 1 for a scale row for each output
                rows = slice(self.columns.start // blocks, -(-self.columns.stop // blocks))
                self.store_codes(part, scale_bytes(scale)[rows])

    def keep_dense(self, weight: torch.Tensor | None) -> None:
        """Keep bf16 weights ``[N / P, K]``, in place where some are held: a captured graph then sees the new ones."""
        if weight is None or self._dense is None:
            self._dense = None if weight is None else weight.to(self.device, torch.bfloat16, copy=True).contiguous()
        else:
            self._dense.copy_(weight)

    @abstractmethod
    def store_codes(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        """Keep this rank's e4m3fn weights ``[N / P, K]`` and scale bytes."""

    @abstractmethod
    def project(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Fill ``out`` ``[T, N / P]``, T at least 1, from checked rows ``[T, C, D | W]``, by the codes."""

    def forward(self, rows: torch.Tensor, *, out: torch.Tensor | None = None, ahead: bool = False) -> torch.Tensor:
        tokens = self.check_rows(rows, out)
        share = self.columns.stop - self.columns.start
        with on(self.device):
            if not self.collective_in_forward:
                if out is None:
                    out = torch.empty(tokens, share, dtype=self.spec.dtype, device=self.device)
                if tokens:
                    self._fill(rows, out)
                return out
            if tokens == 0:  # on every rank: they hold the same tokens
                empty = torch.empty(0, self.kv_features, dtype=self.spec.dtype, device=self.device)
                return empty if out is None else out
            part = torch.empty(tokens, share, dtype=self.spec.dtype, device=self.device)
            self._fill(rows, part)
            whole = self.parallel.communicator(ahead).all_gather(part, 1)
            return whole if out is None else out.copy_(whole)

    def _fill(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        if self._dense is not None and self.dense_only:
            product(self.inputs(rows), self._dense, out)
        else:
            self.project(rows, out)

    @property
    def dense_only(self) -> bool:
        """Whether bf16 weights were loaded, and no codes."""
        return True

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """bf16 rows ``[T, C, D]`` as ``[T, K]``, dense in the last dimension."""
        flat = rows.reshape(rows.shape[0], -1)
        return flat if flat.stride(-1) == 1 else flat.contiguous()


def columns(spec: WkvSpec) -> slice:
    """The outputs that this rank computes: a pure function of what all ranks share."""
    group = spec.parallel.tensor
    if group.size == 1 or spec.parallel.sequence or spec.out_features % (group.size * BLOCK):
        return slice(0, spec.out_features)
    share = spec.out_features // group.size
    return slice(group.rank * share, (group.rank + 1) * share)
