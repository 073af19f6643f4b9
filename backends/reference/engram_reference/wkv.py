"""The WKV projection in float32, from weights kept as they lie in the checkpoint.

bf16 matrix products on CPUs flush subnormals, so everything is multiplied in float32, a strip of outputs at a time: the
dequantised weight never exists whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from engram_core.backend import Wkv, WkvSpec
from engram_core.formats import BLOCK, dequantize_weight, rows_to_bf16, scale_bytes

# 32 rows of the weight share scales; 1024 rows of 6144 float32 are 25 MB.
_STRIP: Final = 1024


class ReferenceWkv(Wkv):
    """Column-parallel: each rank computes ``N / P`` outputs and all gather them, where ``N / P`` is a multiple of 32.

    Under sequence parallelism, and where the split is none, each rank computes the whole projection of its own tokens.
    """

    accepts_packed = True
    side_stream_safe = True

    def __init__(self, spec: WkvSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        ranks = spec.parallel.tensor.size
        split = ranks > 1 and not spec.parallel.sequence and spec.out_features % (ranks * BLOCK) == 0
        self.collective_in_forward = split
        each = spec.out_features // ranks if split else spec.out_features
        first = spec.parallel.tensor.rank * each if split else 0
        self._columns = slice(first, first + each)
        self._weight: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None

    def store(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        self._weight = weight[self._columns].to(device=self.device, copy=True)
        if scale is None:
            self._scale = None
            return
        blocks = weight.shape[0] // scale.shape[0]  # 32 for 32x32 blocks, 1 for a scale row for each output
        rows = slice(self._columns.start // blocks, self._columns.stop // blocks)
        self._scale = scale_bytes(scale)[rows].to(device=self.device, copy=True)

    def forward(self, rows: torch.Tensor, *, out: torch.Tensor | None = None, ahead: bool = False) -> torch.Tensor:
        tokens = self.check_rows(rows, out)
        if out is None:
            out = torch.empty(tokens, self.kv_features, dtype=self.spec.dtype, device=self.device)
        if tokens == 0:
            return out
        inputs = (rows_to_bf16(rows) if rows.dtype == torch.uint8 else rows).flatten(1).float()
        if not self.collective_in_forward:
            self._project(inputs, out)
            return out
        part = out.new_empty(tokens, self._columns.stop - self._columns.start)
        self._project(inputs, part)
        out.copy_(self.parallel.communicator(ahead).all_gather(part, 1))
        return out

    def _project(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        assert self._weight is not None  # check_rows refuses a projection without weights
        with _float32_products():
            for begin in range(0, out.shape[1], _STRIP):
                strip = slice(begin, min(begin + _STRIP, out.shape[1]))
                out[:, strip] = (inputs @ self._strip(strip).T).to(out.dtype)

    def _strip(self, strip: slice) -> torch.Tensor:
        assert self._weight is not None
        weight = self._weight[strip]
        if self._scale is None:
            return weight.float()
        blocks = self._weight.shape[0] // self._scale.shape[0]
        return dequantize_weight(weight, self._scale[strip.start // blocks : -(-strip.stop // blocks)])


@contextmanager
def _float32_products() -> Iterator[None]:
    """Full float32 products, whatever the process allows (TF32 keeps ten bits of a factor)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
