"""Seeded random weights for any geometry: what runs, tests and measurements use where no checkpoint is at hand.

Every tensor is a pure function of the seed, the layer and its place, so a judge can make the same numbers again instead
of reading them back from the code that it judges, and no second copy need be kept in memory.

Codes are drawn from all finite e4m3fn codes, subnormals and both zeros included; scales are such that rows, projections
and gates are of order 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from numpy.typing import NDArray

from engram_core.errors import InvalidArgumentError
from engram_core.formats import BLOCK, E8M0, FP8

if TYPE_CHECKING:
    from engram_core.config import EngramConfig
    from engram_core.memory import EngramMemory

# Uniform finite codes have a root mean square of about 103, nearly 2**7.
_CODE_EXPONENT: Final = 7
# Exponents of the scales vary by this many powers of two, so that a scale taken from a neighbour is noticed.
_SPREAD: Final = 3
# Rows drawn together, and weight rows drawn together: any range can be made without what lies before it.
_ROW_BLOCK: Final = 4096
_STRIP: Final = 1024
_HIDDEN_BLOCK: Final = 64

_TABLE, _WKV, _GATE, _HIDDEN = range(4)


@dataclass(frozen=True)
class Synthetic:
    """Random weights and hidden states of ``config``, functions of ``seed`` (0 or more) alone."""

    config: EngramConfig
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise InvalidArgumentError("seed", repr(self.seed), "an int from 0 on, below 2**63")

    def rows(self, layer_id: int, start: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """``count`` rows of a table from ``start`` on: codes ``[count, D]`` e4m3fn, scales ``[count, D/32]`` uint8."""
        first, last = start // _ROW_BLOCK, -(-(start + count) // _ROW_BLOCK)
        blocks = [self._block(layer_id, block) for block in range(first, last)]
        here = slice(start - first * _ROW_BLOCK, start - first * _ROW_BLOCK + count)
        dim = self.config.head_dim
        if not blocks:
            return torch.empty(0, dim, dtype=FP8), torch.empty(0, dim // BLOCK, dtype=torch.uint8)
        codes = np.concatenate([codes for codes, _ in blocks])[here]
        scales = np.concatenate([scales for _, scales in blocks])[here]
        return torch.from_numpy(codes).view(FP8), torch.from_numpy(scales)

    def rows_at(self, layer_id: int, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The packed rows ``[n, D + D/32]`` of sorted ``ids`` ``[n]``, as bytes; only their blocks are drawn."""
        width = self.config.head_dim + self.config.head_dim // BLOCK
        result = np.empty((len(ids), width), dtype=np.uint8)
        blocks, starts = np.unique(ids // _ROW_BLOCK, return_index=True)
        for block, begin, end in zip(blocks, starts, [*starts[1:], len(ids)], strict=True):
            codes, scales = self._block(layer_id, int(block))
            local = ids[begin:end] % _ROW_BLOCK
            result[begin:end, : self.config.head_dim] = codes[local]
            result[begin:end, self.config.head_dim :] = scales[local]
        return result

    def wkv(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight ``[N, K]`` e4m3fn and scale ``[N/32, K/32]`` e8m0 (``[N, K/32]`` where 32 does not divide N)."""
        n, k = self.config.wkv_out_features, self.config.wkv_in_features
        weight = np.empty((n, k), dtype=np.uint8)
        for begin in range(0, n, _STRIP):
            strip = weight[begin : begin + _STRIP]
            strip[:] = _codes(self._draw(_WKV, layer_id, begin), strip.shape)
        # Codes of 2**7 over K terms of order 1: an output of order 1 needs 2**-7 / sqrt(K).
        exponent = -_CODE_EXPONENT - round(float(np.log2(k)) / 2)
        shape = (n // BLOCK if n % BLOCK == 0 else n, k // BLOCK)
        scale = _scales(self._draw(_WKV, layer_id, n), shape, exponent)
        return torch.from_numpy(weight).view(FP8), torch.from_numpy(scale).view(E8M0)

    def gate(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's gate: ``q_weight`` and ``k_weight`` ``[H, dim]`` bf16, around 1."""
        draw = self._draw(_GATE, layer_id)
        shape = (self.config.hc_mult, self.config.hidden_size)
        q, k = (torch.from_numpy(1 + 0.5 * draw.standard_normal(shape, dtype=np.float32)).bfloat16() for _ in range(2))
        return q, k

    def hidden_states(self, start: int, count: int) -> torch.Tensor:
        """Residual streams of positions ``[start, start + count)``: ``[count, H, dim]`` bf16."""
        first, last = start // _HIDDEN_BLOCK, -(-(start + count) // _HIDDEN_BLOCK)
        shape = (_HIDDEN_BLOCK, self.config.hc_mult, self.config.hidden_size)
        blocks = [
            torch.from_numpy(self._draw(_HIDDEN, 0, block).standard_normal(shape, dtype=np.float32)).bfloat16()
            for block in range(first, last)
        ]
        if not blocks:
            return torch.empty(0, *shape[1:], dtype=torch.bfloat16)
        begin = start - first * _HIDDEN_BLOCK
        return torch.cat(blocks)[begin : begin + count]

    def tensors(self, layer_id: int) -> Iterator[tuple[str, torch.Tensor]]:
        """A layer's WKV and gate under the checkpoint's names, for :meth:`EngramMemory.load_weights`."""
        name = f"layers.{layer_id}.engram"
        weight, scale = self.wkv(layer_id)
        yield f"{name}.wkv.weight", weight
        yield f"{name}.wkv.scale", scale
        yield from zip((f"{name}.q_weight", f"{name}.k_weight"), self.gate(layer_id), strict=True)

    def load(self, memory: EngramMemory) -> None:
        """Fill all tables and weights of ``memory``, a block at a time (a table of placement "file" is left alone)."""
        for layer_id, layer in memory.layers.items():
            memory.load_weights(self.tensors(layer_id))
            if layer.table.spec.placement == "file":
                continue
            mine = layer.table.stored_rows
            for start in mine[::_ROW_BLOCK]:
                layer.table.load(*self.rows(layer_id, start, min(_ROW_BLOCK, mine.stop - start)), start)
        memory.load_weights(())  # with shared tables: no rank reads before its node's writer has come to the end

    def _block(self, layer_id: int, block: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        draw = self._draw(_TABLE, layer_id, block)
        dim = self.config.head_dim
        return _codes(draw, (_ROW_BLOCK, dim)), _scales(draw, (_ROW_BLOCK, dim // BLOCK), -_CODE_EXPONENT)

    def _draw(self, *place: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64([self.seed, *place]))


def _codes(draw: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Uniform over the finite codes but for +-448, which come twice as often: 0x7f and 0xff are NaN."""
    codes = np.frombuffer(bytearray(draw.bytes(int(np.prod(shape)))), dtype=np.uint8).reshape(shape)
    codes -= ((codes & 0x7F) == 0x7F).view(np.uint8)
    return codes


def _scales(draw: np.random.Generator, shape: tuple[int, ...], exponent: int) -> NDArray[np.uint8]:
    least = 127 + exponent - _SPREAD // 2
    return draw.integers(least, least + _SPREAD, size=shape, dtype=np.uint8)
