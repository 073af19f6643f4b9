"""Ranks: how a model's tensor-, data- and sequence-parallel ranks exchange rows and projections.

Every transfer goes through a :class:`Collectives`, which an engine may satisfy with its own; :class:`TorchCollectives`
does it with a ``torch.distributed`` group that the caller owns. There is no transport of our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from engram_core.errors import CollectiveError, InvalidArgumentError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@runtime_checkable
class Collectives(Protocol):
    """What the layer needs of a group of ranks. Every rank calls the same operations in the same order."""

    @property
    def rank(self) -> int:
        """This process's position in the group."""

    @property
    def size(self) -> int:
        """Ranks in the group."""

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Every rank's ``x`` (one shape and dtype on all, any strides), joined along ``dim`` in rank order."""

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """``x [size, ...]``: slice i goes to rank i; slice j of the result came from rank j. Any strides."""


class _Alone:
    """A group of one rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        return x


class TorchCollectives:
    """:class:`Collectives` over a ``torch.distributed`` process group (gloo, NCCL, RCCL); ``None``: the default group.

    Raises :class:`CollectiveError` if ``torch.distributed`` is not initialised, if this process is not in the group, or
    (on use) if the group's size is no longer what it was at construction.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            raise CollectiveError("group: torch.distributed is not initialised; call init_process_group first")
        self._dist = dist
        # torch renamed it (2.13 warns at the old name), and 2.9 to 2.12 know the old name alone.
        self._gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self._group)
        self.size = dist.get_world_size(self._group)
        if self.rank < 0:
            raise CollectiveError("group: this process is not a member; every rank passes a group that holds it")

    def _check(self) -> None:
        size = self._dist.get_world_size(self._group)
        if size != self.size:
            raise CollectiveError(f"group: has {size} ranks, had {self.size} at construction; build the memory anew")

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """See :meth:`Collectives.all_gather`."""
        self._check()
        dim = _axis("dim", dim, x)
        if self.size == 1:
            return x
        gathered = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._gather(gathered, x.contiguous(), group=self._group)
        return gathered.view(self.size, *x.shape).movedim(0, dim).flatten(dim, dim + 1)

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """See :meth:`Collectives.all_to_all`."""
        self._check()
        if x.dim() == 0 or x.shape[0] != self.size:
            raise InvalidArgumentError("x", f"shape {list(x.shape)}", f"[{self.size}, ...], one slice for each rank")
        if self.size == 1:
            return x
        source = x.contiguous()
        result = torch.empty_like(source)
        self._dist.all_to_all_single(result, source, group=self._group)
        return result


def _axis(argument: str, dim: int, x: torch.Tensor) -> int:
    if not -x.dim() <= dim < x.dim():
        raise InvalidArgumentError(argument, str(dim), f"a dimension of shape {list(x.shape)}")
    return dim % x.dim()


@dataclass(frozen=True, slots=True)
class Parallel:
    """The ranks that share a model's Engram layers.

    ``tensor``: ranks that hold the same tokens. ``data``: ranks that hold different tokens and share the tables; None:
    every data-parallel replica has its own. ``sequence``: each tensor rank keeps one window of the tokens after the
    look-up. ``ahead``: a second communicator over the tensor ranks for collectives on a side stream (one communicator
    serialises its operations, so sharing the decoder's would make it wait for the look-up).
    """

    tensor: Collectives
    data: Collectives | None = None
    sequence: bool = False
    ahead: Collectives | None = None

    def __post_init__(self) -> None:
        for name in ("tensor", "data", "ahead"):
            value = getattr(self, name)
            if value is None and name != "tensor":
                continue
            if not isinstance(value, Collectives):
                raise InvalidArgumentError(
                    name, type(value).__name__, "rank, size, all_gather and all_to_all (Collectives)"
                )
            if not 0 <= value.rank < value.size:
                raise InvalidArgumentError(name, f"rank {value.rank} of {value.size}", "a rank below the size")
        if self.ahead is not None and (self.ahead.rank, self.ahead.size) != (self.tensor.rank, self.tensor.size):
            raise InvalidArgumentError(
                "ahead",
                f"rank {self.ahead.rank} of {self.ahead.size}",
                f"the tensor ranks again: rank {self.tensor.rank} of {self.tensor.size}",
            )

    @classmethod
    def single(cls) -> Parallel:
        """One rank, no collectives."""
        return cls(tensor=_Alone())

    @property
    def data_size(self) -> int:
        """Data-parallel ranks over which tables are sharded."""
        return 1 if self.data is None else self.data.size

    @property
    def shards(self) -> int:
        """Parts into which a table is cut."""
        return self.tensor.size * self.data_size

    @property
    def shard(self) -> int:
        """This rank's part: tensor rank major, so that a gather over data, then over tensor, restores the order."""
        return self.tensor.rank * self.data_size + (0 if self.data is None else self.data.rank)

    def communicator(self, ahead: bool) -> Collectives:
        """The tensor ranks: the decoder's communicator, or the one for a side stream."""
        if not ahead or self.tensor.size == 1:
            return self.tensor
        if self.ahead is None:
            raise CollectiveError("ahead: no communicator for the side stream was given; pass Parallel(ahead=...)")
        return self.ahead
