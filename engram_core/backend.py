"""The interface of a backend: three hooks that every backend writes, and a few with a correct default in the core.

Shapes: T tokens, L Engram layers, C hash columns, D head_dim, W = D + D/32 bytes of a packed row, H residual copies
(hc_mult), dim the hidden size, P ranks. pluggy finds a backend once; these are plain methods of the object that was
found, since a hook call costs forty times a method call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from engram_core import limits
from engram_core.checks import check_disjoint, check_tensor, describe
from engram_core.errors import InvalidArgumentError, StepError
from engram_core.formats import BLOCK, E8M0, FP8
from engram_core.info import BackendInfo, Reason
from engram_core.specs import GateWeights, Problem, TableSpec, WkvSpec

if TYPE_CHECKING:
    from engram_core.hashing import TokenBatch
    from engram_core.layer import Engram
    from engram_core.layout import HashLayout
    from engram_core.parallel import Parallel
    from engram_core.table import EngramTable
    from engram_core.tokens import TokenMap

__all__ = ["EngramBackend", "GateWeights", "Prefetch", "Problem", "TableSpec", "Wkv", "WkvSpec"]


class Wkv(nn.Module, ABC):
    """The projection of a token's rows to one key for each residual copy and one shared value.

    A backend subclasses it, writes :meth:`forward` and :meth:`store`, and sets the traits that differ. What ``kv``
    looks like is the backend's own affair: only its own ``post_wkv`` reads it.
    """

    accepts_packed: bool = False
    """Takes rows ``[T, C, W]`` uint8 as they lie in the table, and not only bf16."""
    side_stream_safe: bool = False
    """May run beside other matrix products of the process."""
    collective_in_forward: bool = False
    """:meth:`forward` exchanges between ranks; it then takes ``ahead=True`` to do so on ``Parallel.ahead``."""
    collective_in_post: bool = False
    """``post_wkv`` exchanges between ranks."""
    kv_layout: str = "full"
    """"full": the whole projection on every rank; "dim_slice": this rank's slice of every key and of the value."""

    def __init__(self, spec: WkvSpec, device: torch.device) -> None:
        super().__init__()
        self.spec = spec
        self.device = device
        self.parallel: Parallel = spec.parallel
        self.version = 0
        """Counts loads, so that a result started before a reload is not taken for one of the new weights."""

    @property
    def kv_features(self) -> int:
        """Width of ``kv``."""
        return self.spec.out_features

    def load(self, weight: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """Take the checkpoint's form; may be called again with new weights.

        ``weight``: ``[N, K]`` e4m3fn with ``scale`` ``[N/32, K/32]`` or ``[N, K/32]`` (e8m0, or its bytes as uint8); or
        bf16 without a scale. N = (hc_mult + 1) * dim. Raises :class:`InvalidArgumentError` before anything is stored.
        """
        n, k = self.spec.out_features, self.spec.in_features
        check_tensor("weight", weight, (n, k), (FP8, torch.bfloat16))
        if weight.dtype == FP8:
            rows = (n // BLOCK, n) if n % BLOCK == 0 else (n,)
            if scale is None or scale.dim() != 2 or scale.shape[0] not in rows or scale.shape[1] != k // BLOCK:
                need = " or ".join(f"[{r}, {k // BLOCK}]" for r in rows)
                raise InvalidArgumentError(
                    "scale", "None" if scale is None else describe(scale), f"{need} float8_e8m0fnu or uint8"
                )
            check_tensor("scale", scale, (scale.shape[0], k // BLOCK), (E8M0, torch.uint8))
        elif scale is not None:
            raise InvalidArgumentError("scale", describe(scale), "None: bf16 weights have no scale")
        self.store(weight, scale)
        self.version += 1

    @abstractmethod
    def store(self, weight: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Keep checked weights in the backend's own form. Called by :meth:`load`; copies, never keeps the caller's."""

    @abstractmethod
    def forward(self, rows: torch.Tensor, *, out: torch.Tensor | None = None, ahead: bool = False) -> torch.Tensor:
        """``rows`` ``[T, C, D]`` bf16 (or ``[T, C, W]`` uint8) to ``kv`` ``[T, kv_features]``.

        ``ahead`` is passed only where ``collective_in_forward``. T=0 makes no matrix product.
        """

    def check_rows(self, rows: torch.Tensor, out: torch.Tensor | None) -> int:
        """Check the operands of :meth:`forward` and return T; for a backend to call first."""
        if self.version == 0:
            raise StepError("wkv: no weights were loaded; call Wkv.load(weight, scale) first")
        k = self.spec.in_features
        dtypes = (self.spec.dtype, torch.uint8) if self.accepts_packed else (self.spec.dtype,)
        check_tensor("rows", rows, ("T", "C", "D"), dtypes, self.device)
        width = rows.shape[1] * rows.shape[2]
        packed = rows.dtype == torch.uint8
        if width * (BLOCK if packed else 1) != k * (BLOCK + 1 if packed else 1):
            raise InvalidArgumentError("rows", describe(rows), f"C * D = {k} values a token (in_features)")
        if out is not None:
            check_tensor(
                "out", out, (rows.shape[0], self.kv_features), (self.spec.dtype,), self.device, dense_last=True
            )
            check_disjoint("out", out, rows=rows)
        return int(rows.shape[0])


class Prefetch(ABC):
    """WKV chains of several layers, started ahead of the layers that need them."""

    @abstractmethod
    def start(self, num_tokens: int) -> None:
        """Start the chain of every layer whose staged rows hold ``num_tokens``; more than ``max_rows``: none."""

    def defer(self, num_tokens: int) -> None:
        """As :meth:`start`, but chains wait for :meth:`start_layer`; a hint: by default all are started here."""
        self.start(num_tokens)

    def start_layer(self, layer: Engram) -> None:  # noqa: B027 (a hint, see above)
        """Start the chain of ``layer`` that was deferred, behind what the current stream holds; others: nothing."""

    @abstractmethod
    def wait(self, layer: Engram) -> None:
        """Make the current stream wait for ``layer``'s chain, where one was started."""

    @abstractmethod
    def apply(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None
    ) -> torch.Tensor:
        """The gate of ``layer`` on the chain waited for, or the whole layer where none was started."""

    @abstractmethod
    def join(self) -> None:
        """Wait for every chain that no layer waited for; after it nothing of the step is in flight."""

    @abstractmethod
    def started(self, layer: Engram) -> bool:
        """Whether a chain of ``layer`` was started, and neither applied nor overtaken by a reload."""

    def forward(
        self, layer: Engram, hidden_states: torch.Tensor, hash_ids: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As ``layer(hidden_states, hash_ids, token_mask)``, bit for bit, on the WKV started ahead if there is one."""
        self.wait(layer)
        return self.apply(layer, hidden_states, hash_ids, token_mask)


class EngramBackend(ABC):
    """One way of running Engram on one device."""

    info: ClassVar[BackendInfo]

    def __init__(self, device: torch.device) -> None:
        """``device``: resolved to an index; every launch runs under it."""
        self.device = torch.device(device)

    def supports(self, problem: Problem) -> tuple[Reason, ...]:
        """All reasons against ``problem`` on this device; empty: it runs.

        The default judges by the declared capabilities; a backend with further limits adds its own to
        ``super().supports(problem)``.
        """
        return limits.declared(self.info, problem)

    @abstractmethod
    def create_wkv(self, spec: WkvSpec) -> Wkv:
        """A projection without weights. Raises :class:`UnsupportedConfigError` for a shape it can't do."""

    @abstractmethod
    def post_wkv(
        self,
        hidden_states: torch.Tensor,
        kv: torch.Tensor,
        gate: GateWeights,
        *,
        wkv: Wkv | None = None,
        token_mask: torch.Tensor | None = None,
        num_kv_tokens: int | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The gate: ``bf16(h + gate * value)`` for each token and residual copy (docs/contract.md, "Gate").

        ``hidden_states`` ``[T, H, dim]`` bf16, last dimension dense; ``kv`` ``[T, kv_features]`` bf16; ``token_mask``
        ``[T]`` bool, False: the row comes out as it went in; ``num_kv_tokens``: rows at or past it likewise. ``wkv``:
        the one that made ``kv`` (its layout, its ranks); None: ``kv`` is whole. Inputs are never written.
        Raises :class:`InvalidArgumentError` before anything is launched.
        """

    @abstractmethod
    def prefetch(self, layers: Sequence[Engram], max_rows: int) -> Prefetch:
        """Chains for ``layers`` (those for which :meth:`prefetchable` is empty) of at most ``max_rows`` tokens."""

    def prefetchable(self, layer: Engram) -> tuple[Reason, ...]:
        """All reasons why ``layer``'s WKV can't run ahead; a layer with reasons runs plainly."""
        return limits.prefetchable(layer)

    def create_table(self, spec: TableSpec) -> EngramTable:
        """A table of zero rows (``file``: the file's rows) in the placement asked for."""
        from engram_core.table import EngramTable

        return EngramTable(spec, self.device)

    def create_hasher(self, layout: HashLayout, token_map: TokenMap) -> Callable[[TokenBatch], torch.Tensor]:
        """A function from a checked batch, its lookback ``[R, n-1]``, to hash ids ``[T, L, C]``."""
        from engram_core.hashing import TorchHasher

        return TorchHasher(layout, token_map, self.device)

    def lookup_stream(self) -> torch.Stream | None:
        """Where row look-ups run; None: in line."""
        return None

    def warmup(self, layers: Sequence[Engram], token_counts: Sequence[int]) -> None:
        """Compile and tune these very sizes before capture. Collective: every rank calls it with the same counts."""
        for layer in layers:
            for count in token_counts:
                layer.dry_run(count)
        # A communicator connects on its first exchange, which must not happen while a graph is captured.
        found = {id(layer.parallel.ahead): layer.parallel.ahead for layer in layers}
        for ahead in (group for group in found.values() if group is not None):
            ahead.all_gather(torch.zeros(1, dtype=torch.uint8, device=self.device), 0)
