"""The WKV projection, from weights dequantised to float32 once, when they are loaded.

A decode step has few tokens, and then the time is that of reading the weights. A BLAS matrix product repacks the
weights at every call, which costs several times the reading; so few tokens are done as matrix-vector products, on
strips of the weights that stay in cache from one token to the next.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from acme_engram.numbers import BLOCK, CODES, SCALES, Floats, decode, narrow, octets, widen, words
from acme_engram.threads import spread
from engram_core.backend import Wkv, WkvSpec
from engram_core.checks import check_disjoint

# At V4.1's size the two ways cost the same at 16 tokens (README.md says on which machine).
_FEW: Final = 12
_STRIP_BYTES: Final = 3 << 20


class AcmeWkv(Wkv):
    """One rank, the whole projection; ``kv`` is as the contract writes it."""

    accepts_packed = True
    side_stream_safe = True

    def __init__(self, spec: WkvSpec, device: torch.device) -> None:
        super().__init__(spec, device)
        self._matrix: Floats | None = None

    def store(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        # A new array: a chain in flight keeps the old one, and its result is dropped for its version.
        self._matrix = widen(words(weight.cpu())) if scale is None else _dequantize(weight.cpu(), scale.cpu())

    def forward(self, rows: torch.Tensor, *, out: torch.Tensor | None = None, ahead: bool = False) -> torch.Tensor:
        tokens = self.check_rows(rows, out)
        if out is None:
            out = torch.empty(tokens, self.kv_features, dtype=self.spec.dtype, device=self.device)
        else:
            check_disjoint("out", out, rows=rows)
        if tokens == 0:
            return out
        matrix = self._matrix
        assert matrix is not None  # check_rows refuses a projection without weights
        with np.errstate(all="ignore"):  # NaN and infinity are values here
            result = _project(matrix, self._inputs(rows))
            target = words(out)
            for token in range(tokens):
                narrow(result[token], target[token])
        return out

    def _inputs(self, rows: torch.Tensor) -> Floats:
        """``[T, K]`` float32, contiguous whatever the strides were, so that equal rows give equal bits."""
        if rows.dtype == torch.uint8:
            packed = octets(rows)
            values = np.empty((*packed.shape[:2], packed.shape[2] * BLOCK // (BLOCK + 1)), np.uint16)
            decode(packed, values)
        else:
            values = words(rows)
        return widen(values).reshape(len(values), -1)


def _project(matrix: Floats, inputs: Floats) -> Floats:
    """``inputs @ matrix.T``."""
    if len(inputs) > _FEW:
        return inputs @ matrix.T
    result = np.empty((len(inputs), len(matrix)), np.float32)
    strip = max(1, _STRIP_BYTES // matrix[0].nbytes)
    for begin in range(0, len(matrix), strip):
        weights = matrix[begin : begin + strip]
        for token, values in enumerate(inputs):
            np.matmul(weights, values, out=result[token, begin : begin + strip])
    return result


def _dequantize(weight: torch.Tensor, scale: torch.Tensor) -> Floats:
    """``[N, K]`` e4m3fn with scales ``[N/32, K/32]`` or ``[N, K/32]`` to float32."""
    codes, scales = octets(weight), octets(scale)
    each = len(codes) // len(scales)
    matrix = np.empty(codes.shape, np.float32)

    def convert(parts: slice) -> None:
        with np.errstate(all="ignore"):
            for part in range(parts.start, parts.stop):
                here = matrix[part * each : (part + 1) * each]
                CODES.take(codes[part * each : (part + 1) * each], out=here, mode="clip")
                here *= np.repeat(SCALES[scales[part]], BLOCK)

    spread(convert, len(scales), BLOCK)
    return matrix
