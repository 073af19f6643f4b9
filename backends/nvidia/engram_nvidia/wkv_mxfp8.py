"""WKV of SM100 and SM103: the table's own codes times the checkpoint's, block-scaled in the tensor core.

Rows stay packed from the table to the product; nothing is dequantised and nothing quantised. Bytes at few tokens: N * K
codes and N * K / 32 scales, 162 MB for 25600 x 6144. Never executed for want of such a card (docs/nvidia.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch

from engram_core.backend import WkvSpec
from engram_core.formats import BLOCK, code_bytes, pack_rows, quantize_mxfp8, rows_to_bf16, swizzle_128x4
from engram_nvidia import flashinfer
from engram_nvidia.operands import split_rows
from engram_nvidia.wkv import ColumnWkv


class Mxfp8Wkv(ColumnWkv):
    """Takes packed rows; bf16 rows are quantised first, by the rule of docs/contract.md."""

    accepts_packed = True

    def __init__(self, spec: WkvSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._codes: torch.Tensor | None = None
        self._scales: torch.Tensor | None = None

    @cached_property
    def _mm(self) -> Callable[..., torch.Tensor]:
        return flashinfer.load()

    @property
    def dense_only(self) -> bool:
        return self._codes is None

    def keep_dense(self, weight: torch.Tensor | None) -> None:
        if self._codes is not None and self._scales is not None:
            self._scales.fill_(255)  # NaN: what a captured graph still reads is no number of the old weights
            self._codes = self._scales = None
        super().keep_dense(weight)

    def store_codes(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        if scale.shape[0] != weight.shape[0]:
            scale = scale.repeat_interleave(BLOCK, dim=0)
        scales = swizzle_128x4(scale.to(self.device))
        if self._codes is not None and self._scales is not None:
            self._codes.view(torch.uint8).copy_(code_bytes(weight))
            self._scales.copy_(scales)
        else:
            self._codes = code_bytes(weight).to(self.device, copy=True).contiguous().view(torch.float8_e4m3fn)
            self._scales = scales
        if self._dense is not None:
            self._dense.fill_(float("nan"))
            self._dense = None

    def project(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        assert self._codes is not None  # ``dense_only`` sends everything else elsewhere
        assert self._scales is not None
        if rows.dtype != torch.uint8:
            rows = pack_rows(*quantize_mxfp8(rows))
        codes, scales = split_rows(rows if rows.stride(-1) == 1 else rows.contiguous())
        flashinfer.mm(self._mm, codes, scales, self._codes, self._scales, out)

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        return super().inputs(rows_to_bf16(rows) if rows.dtype == torch.uint8 else rows)
