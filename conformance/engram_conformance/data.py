"""Seeded random data, made in NumPy from bytes: rows, weights, hidden states, token batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases.geometry import Geometry, geometry
from engram_conformance.oracle.numbers import F64, I64, U8, U16, Mask
from engram_core.tokens import TokenMap

# Non-negative finite codes in order of value, to encode by nearest value.
_POSITIVE: F64 = oracle.decode_e4m3fn(np.arange(0x7F, dtype=np.uint8))

_POOL = 1_000_003


def encode_e4m3fn(x: F64) -> U8:
    """Codes of the values nearest to ``x``, saturating; for making data, not for judging any."""
    middle = (_POSITIVE[1:] + _POSITIVE[:-1]) / 2
    code: U8 = np.searchsorted(middle, np.abs(x)).astype(np.uint8)
    code[np.signbit(x)] |= 0x80
    return code


def random_rows(rng: np.random.Generator, count: int, head_dim: int, center: int = 127) -> U8:
    """Packed rows ``[count, W]`` with scale bytes around ``center``."""
    codes = encode_e4m3fn(rng.standard_normal((count, head_dim), dtype=np.float32).astype(np.float64))
    scales = rng.integers(center - 2, center + 3, (count, head_dim // 32), dtype=np.uint8)
    return np.concatenate([codes, scales], axis=1)


def random_weight(rng: np.random.Generator, n: int, k: int, scale_rows: int | None = None) -> tuple[U8, U8]:
    """Codes ``[N, K]`` and scale bytes ``[scale_rows, K/32]`` (N/32 by default), so that ``kv`` is about 1."""
    # A draw for each of 157 M codes would take minutes: a pool of prime length is repeated, so that no two rows agree.
    pool = encode_e4m3fn(rng.standard_normal(min(n * k, _POOL)) * 8)
    codes = np.resize(pool, (n, k))
    middle = 127 - 3 - round(np.log2(k) / 2)
    scales = rng.integers(middle - 1, middle + 2, (n // 32 if scale_rows is None else scale_rows, k // 32))
    return codes, scales.astype(np.uint8)


def random_hidden(rng: np.random.Generator, tokens: int, copies: int, dim: int) -> U16:
    """bf16 bits ``[T, H, dim]`` of normal values."""
    return oracle.to_bf16(rng.standard_normal((tokens, copies, dim)))


def random_gate(rng: np.random.Generator, copies: int, dim: int) -> tuple[U16, U16]:
    """q and k weights as bf16 bits ``[H, dim]``, around 1."""
    q, k = (oracle.to_bf16(1 + 0.3 * rng.standard_normal((copies, dim))) for _ in range(2))
    return q, k


@dataclass(frozen=True)
class LayerData:
    """One layer's weights: ``packed`` rows, WKV ``codes`` and ``scales``, gate ``q`` and ``k`` bits."""

    packed: U8
    codes: U8
    scales: U8
    q: U16
    k: U16

    @cached_property
    def weight(self) -> oracle.Weight:
        """The WKV weight as the oracle reads it."""
        return oracle.Weight(self.codes, self.scales)


@dataclass(frozen=True)
class Model:
    """A geometry with random weights and a random token map."""

    geometry: Geometry
    layers: dict[int, LayerData]
    map_ids: I64

    @classmethod
    def make(cls, shape: Geometry, seed: int) -> Model:
        """The same model for the same arguments."""
        layers = {}
        for index, layer_id in enumerate(shape.layers):
            rng = np.random.default_rng([seed, layer_id])
            codes, scales = random_weight(rng, shape.n, shape.k, shape.n if shape.n % 32 else None)
            q, k = random_gate(rng, shape.copies, shape.hidden)
            layers[layer_id] = LayerData(
                random_rows(rng, shape.numbers.rows[index], shape.head_dim), codes, scales, q, k
            )
        return cls(shape, layers, random_map(np.random.default_rng(seed), shape.vocab, shape.compressed))

    def token_map(self) -> TokenMap:
        """As ``engram_core`` takes it."""
        return TokenMap(self.map_ids, self.geometry.pad)

    def weights(
        self, layer_ids: tuple[int, ...] | None = None, rows: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors under the checkpoint's names."""
        for layer_id in layer_ids or self.geometry.layers:
            layer, name = self.layers[layer_id], f"model.layers.{layer_id}.engram."
            dim = self.geometry.head_dim
            if rows:
                yield name + "embed.weight", bridge.fp8(layer.packed[:, :dim])
                yield name + "embed.scale", bridge.e8m0(layer.packed[:, dim:])
            yield name + "wkv.weight", bridge.fp8(layer.codes)
            yield name + "wkv.scale", bridge.e8m0(layer.scales)
            yield name + "q_weight", bridge.bf16(layer.q)
            yield name + "k_weight", bridge.bf16(layer.k)

    def hash_sequence(self, tokens: I64, dead: Mask | None = None) -> I64:
        """The oracle's ids ``[T, L, C]`` of one whole sequence."""
        return oracle.hash_sequence(
            self.geometry.numbers,
            self.map_ids,
            self.geometry.pad,
            tokens.tolist(),
            None if dead is None else dead.tolist(),
        )

    def rows(self, layer_id: int, ids: I64) -> U16:
        """The oracle's rows ``[T, C, D]`` (bits) of ids ``[T, L, C]``."""
        return oracle.lookup_rows(self.layers[layer_id].packed, ids[:, self.geometry.layers.index(layer_id)])

    def expect(self, layer_id: int, hidden: U16, ids: I64) -> oracle.GateBounds:
        """What the whole layer may give for ``hidden`` bits ``[T, H, dim]`` and ids ``[T, L, C]``."""
        layer = self.layers[layer_id]
        read = oracle.bf16_to_f64
        rows = read(self.rows(layer_id, ids))
        return oracle.layer(read(hidden), rows, layer.weight, read(layer.q), read(layer.k), self.geometry.eps)


def random_map(rng: np.random.Generator, vocab: int, compressed: int) -> I64:
    """A token map onto all of ``range(compressed)``, in no order."""
    ids = np.concatenate([np.arange(compressed), rng.integers(0, compressed, vocab - compressed)])
    return rng.permutation(ids).astype(np.int64)


@lru_cache(maxsize=4)
def model(name: str, seed: int = 1) -> Model:
    """The model of a geometry's name; kept, since the real one takes seconds to make."""
    return Model.make(geometry(name), seed)
