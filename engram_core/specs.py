"""The data that crosses the interface: frozen, checked at construction, no behaviour of a backend."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from engram_core.checks import check_tensor, describe
from engram_core.errors import InvalidArgumentError
from engram_core.formats import BLOCK, packed_width

if TYPE_CHECKING:
    from engram_core.config import EngramConfig
    from engram_core.parallel import Parallel

PLACEMENTS: Final = ("device", "host", "shared", "file")
HC_MULTS: Final = (1, 2, 4, 8)


def _positive(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise InvalidArgumentError(name, describe(value), "a positive int")


def _check_cache(cache_bytes: object, placement: str) -> None:
    if isinstance(cache_bytes, bool) or not isinstance(cache_bytes, int) or cache_bytes < 0:
        raise InvalidArgumentError("cache_bytes", describe(cache_bytes), "an int of at least 0")
    if cache_bytes and placement not in ("host", "shared"):
        raise InvalidArgumentError(
            "cache_bytes", str(cache_bytes), f"0 for placement {placement!r}: hot rows are those of 'host' or 'shared'"
        )


@dataclass(frozen=True, eq=False)  # tensors compare element by element
class GateWeights:
    """Weights of the gate: ``q_weight`` and ``k_weight`` ``[H, dim]`` bf16 or float32, dense, on one device.

    ``eps``: the model's rms_norm_eps (1e-20 for V4.1, so never through fp16). ``clamp``: a constant of the model.
    """

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    clamp: float = 1e-6

    def __post_init__(self) -> None:
        dtypes = (torch.bfloat16, torch.float32)
        q = check_tensor("q_weight", self.q_weight, ("H", "dim"), dtypes, dense_last=True)
        if q.shape[0] not in HC_MULTS or q.shape[1] == 0:
            raise InvalidArgumentError("q_weight", describe(q), "[H, dim] with H 1, 2, 4 or 8")
        check_tensor("k_weight", self.k_weight, q.shape, (q.dtype,), q.device, dense_last=True)
        for name, least in (("eps", 0.0), ("clamp", 0.0)):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not math.isfinite(value) or value < least:
                raise InvalidArgumentError(name, describe(value), "a finite number of at least 0")

    @property
    def hc_mult(self) -> int:
        """H, the residual copies."""
        return int(self.q_weight.shape[0])

    @property
    def dim(self) -> int:
        """The hidden size."""
        return int(self.q_weight.shape[1])

    def load(self, q_weight: torch.Tensor | None = None, k_weight: torch.Tensor | None = None) -> None:
        """Copy new weights in place (captured graphs see them)."""
        for name, new in (("q_weight", q_weight), ("k_weight", k_weight)):
            if new is not None:
                check_tensor(name, new, self.q_weight.shape, (torch.bfloat16, torch.float32))
        for held, new in ((self.q_weight, q_weight), (self.k_weight, k_weight)):
            if new is not None:
                held.copy_(new)


@dataclass(frozen=True)
class WkvSpec:
    """One WKV projection: K = ``in_features`` (C * D), N = (``hc_mult`` + 1) * ``dim``.

    ``dtype``: of rows and kv. ``keep_bf16``: a second, dequantised copy of the weights may be held for speed.
    """

    in_features: int
    dim: int
    hc_mult: int
    parallel: Parallel
    dtype: torch.dtype = torch.bfloat16
    keep_bf16: bool = False

    def __post_init__(self) -> None:
        _positive(in_features=self.in_features, dim=self.dim, hc_mult=self.hc_mult)
        if self.in_features % BLOCK:
            raise InvalidArgumentError(
                "in_features", str(self.in_features), "a multiple of 32 (one scale for 32 values)"
            )
        if self.hc_mult not in HC_MULTS:
            raise InvalidArgumentError("hc_mult", str(self.hc_mult), "1, 2, 4 or 8")

    @property
    def out_features(self) -> int:
        """N: one key for each residual copy, then the value."""
        return (self.hc_mult + 1) * self.dim


@dataclass(frozen=True)
class TableSpec:
    """One layer's table: ``rows`` of ``head_dim`` values, ``head_sizes`` rows for each hash column, in column order.

    ``placement``: "device", "host", "shared" or "file" (then ``path``: the packed rows one after another, all ranks'
    rows, nothing else). ``cache_bytes``: device memory for hot rows of a table in host memory. ``parallel``: the ranks
    that share the table.
    """

    rows: int
    head_dim: int
    head_sizes: tuple[int, ...]
    placement: str
    parallel: Parallel
    path: str | Path | None = None
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "head_sizes", tuple(self.head_sizes))
        _positive(rows=self.rows, head_dim=self.head_dim)
        for size in self.head_sizes:
            _positive(head_sizes=size)
        if self.head_dim % BLOCK:
            raise InvalidArgumentError("head_dim", str(self.head_dim), "a multiple of 32 (one scale for 32 values)")
        if not self.head_sizes:
            raise InvalidArgumentError("head_sizes", "none", "the rows of each hash column")
        if sum(self.head_sizes) > self.rows:
            raise InvalidArgumentError(
                "rows", str(self.rows), f"at least {sum(self.head_sizes)}, the sum of head_sizes"
            )
        if self.placement not in PLACEMENTS:
            raise InvalidArgumentError("placement", describe(self.placement), "device, host, shared or file")
        if (self.placement == "file") != (self.path is not None):
            raise InvalidArgumentError("path", describe(self.path), "a file for placement 'file', and only for that")
        _check_cache(self.cache_bytes, self.placement)

    @property
    def exchange(self) -> Parallel:
        """The ranks between which looked-up rows travel: all that share the table.

        Of placement "shared" the tensor ranks alone: a data-parallel rank reads the node's copy itself.
        """
        if self.placement != "shared":
            return self.parallel
        return replace(self.parallel, data=None)

    @property
    def columns(self) -> int:
        """Hash columns, C."""
        return len(self.head_sizes)

    @property
    def width(self) -> int:
        """Bytes of a packed row, W."""
        return packed_width(self.head_dim)


@dataclass(frozen=True)
class Problem:
    """What a memory will ask of a backend, for :meth:`EngramBackend.supports` to judge before anything is created."""

    config: EngramConfig
    parallel: Parallel
    placement: str = "device"
    dtype: torch.dtype = torch.bfloat16
    max_tokens: int = 8192
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise InvalidArgumentError("placement", describe(self.placement), "device, host, shared or file")
        _check_cache(self.cache_bytes, self.placement)
