"""The WKV projection of this rank: the whole of it, or its slice of dim of every key and of the value.

Nothing is exchanged here: what a slice lacks is summed by the gate (``gate.py``). Weights are bf16 where the matrix
cores take nothing else (gfx942: dequantised once, at load), or codes and scales as the checkpoint has them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from engram_core.backend import Wkv, WkvSpec
from engram_core.kernels.device import on
from engram_rocm.arch import Architecture
from engram_rocm.split import Split
from engram_rocm.unpack import unpack_rows
from engram_rocm.weights import CodedWeight, is_coded, take_bf16, take_codes
from engram_rocm.wkv_scaled import wkv_scaled
from engram_rocm.wkv_w8a16 import wkv_w8a16

WeightForm: TypeAlias = Literal["bf16", "fp8"]


class RocmWkv(Wkv):
    """``form``: of e4m3fn weights in memory, "bf16" (two bytes a weight) or "fp8" (one); bf16 weights stay bf16."""

    accepts_packed = True
    side_stream_safe = True

    def __init__(self, spec: WkvSpec, device: torch.device, architecture: Architecture, form: WeightForm) -> None:
        super().__init__(spec, device)
        self.split = Split.plan(spec, architecture.slices)
        self.collective_in_post = self.split.sliced
        self.kv_layout = "dim_slice" if self.split.sliced else "full"
        self._scaled = architecture.scaled
        self._form = form
        self._weight: torch.Tensor | CodedWeight | None = None

    @property
    def kv_features(self) -> int:
        """Keys of copy 0 .. H-1, then the value: of each this rank's slice of dim."""
        return self.split.features

    def store(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        held = self._weight
        with on(self.device):
            if scale is not None and is_coded(weight) and self._form == "fp8":
                into = held if isinstance(held, CodedWeight) else None
                self._weight = take_codes(weight, scale, self.split, self.device, into)
            else:
                plain = held if isinstance(held, torch.Tensor) else None
                self._weight = take_bf16(weight, scale, self.split, self.device, plain)

    def forward(self, rows: torch.Tensor, *, out: torch.Tensor | None = None, ahead: bool = False) -> torch.Tensor:
        tokens = self.check_rows(rows, out)
        if out is None:
            out = torch.empty(tokens, self.kv_features, dtype=self.spec.dtype, device=self.device)
        if tokens == 0:
            return out
        weight = self._weight
        assert weight is not None  # check_rows refuses a projection without weights
        packed = rows.dtype == torch.uint8
        with on(self.device):
            rows = rows if rows.stride(-1) == 1 else rows.contiguous()
            if packed and self._scaled and isinstance(weight, CodedWeight):
                return wkv_scaled(rows, weight, out)
            inputs = unpack_rows(rows) if packed else rows.flatten(1)
            if isinstance(weight, CodedWeight):
                return wkv_w8a16(inputs, weight, out)
            return _product(inputs, weight, out)


def _product(inputs: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if inputs.device.type == "cpu":  # interpreted: bf16 products of CPUs flush subnormals, and no kernel is tested here
        return out.copy_(inputs.float() @ weight.float().T)
    return torch.mm(inputs, weight.T, out=out)
