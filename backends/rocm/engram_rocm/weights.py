"""A rank's part of the WKV weight on its device: dequantised to bf16 once, or codes and scales as they are.

Only the rank's rows are copied, piece by piece, so neither the device nor the host ever holds more than its part (and a
strip of float32 while dequantising). Weights of the form loaded before are overwritten in place: a captured graph sees
the new ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from engram_core.formats import BLOCK, FP8, code_bytes, dequantize_weight, scale_bytes
from engram_rocm.split import Split

# 1024 rows of 6144 float32 are 25 MB.
_STRIP: Final = 1024
# Scale bytes between which every finite code's value is a normal bf16, and 2**(byte - 127 + 120) a float32.
_LEAST, _MOST = 10, 134


@dataclass(frozen=True)
class CodedWeight:
    """``codes`` ``[n, K]`` uint8 e4m3fn; ``scales`` ``[n / scale_rows, K/32]`` uint8, ``scale_rows`` 32 or 1.

    ``fast``: no NaN code, and every value is zero or a normal bf16 number, so that its bits may be cut, not rounded.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    scale_rows: int
    fast: bool


def take_bf16(
    weight: torch.Tensor, scale: torch.Tensor | None, split: Split, device: torch.device, into: torch.Tensor | None
) -> torch.Tensor:
    """This rank's rows of a checkpoint's weight as bf16 ``[n, K]``; ``into``: an older one to overwrite."""
    held = into if into is not None else _empty(split, weight.shape[1], torch.bfloat16, device)
    target, source = held.view(split.outputs, split.width, -1), split.take(weight)
    scales = None if scale is None else split.take(scale_bytes(scale))
    for output in range(split.outputs):
        for first in range(0, split.width, _STRIP):
            strip = slice(first, min(first + _STRIP, split.width))
            rows = source[output, strip].to(device)
            if scales is not None:
                each = split.width // scales.shape[1]  # rows that share a scale: 32, or 1 where N/32 is no whole number
                own = scales[output, strip.start // each : -(-strip.stop // each)].to(device)
                rows = dequantize_weight(rows, own)
            target[output, strip].copy_(rows)
    return held


def take_codes(
    weight: torch.Tensor, scale: torch.Tensor, split: Split, device: torch.device, into: CodedWeight | None
) -> CodedWeight:
    """This rank's codes and scales on ``device``; ``into``: older ones to overwrite. Reads two flags back."""
    source, scales = split.take(code_bytes(weight)), split.take(scale_bytes(scale))
    rows = split.width // scales.shape[1]
    nan = any(bool(((part & 0x7F) == 0x7F).any()) for part in source)
    fast = not nan and int(scales.min()) >= _LEAST and int(scales.max()) <= _MOST
    # A graph has captured the kernel of the old form: other forms get memory of their own.
    if into is None or (into.scale_rows, into.fast) != (rows, fast):
        codes = _empty(split, weight.shape[1], torch.uint8, device)
        held = torch.empty(split.features // rows, weight.shape[1] // BLOCK, dtype=torch.uint8, device=device)
        into = CodedWeight(codes, held, rows, fast)
    into.codes.view(source.shape).copy_(source)
    into.scales.view(scales.shape).copy_(scales)
    return into


def is_coded(weight: torch.Tensor) -> bool:
    """Whether a checkpoint's weight is e4m3fn with scales, and not bf16."""
    return weight.dtype == FP8


def _empty(split: Split, k: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty(split.features, k, dtype=dtype, device=device)
