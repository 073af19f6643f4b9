"""Token batches and their n-gram hash ids (docs/contract.md, "Hash")."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from engram_core.checks import INDEX_DTYPES, check_tensor, describe
from engram_core.errors import InvalidArgumentError, TokenMapError
from engram_core.layout import HashLayout

if TYPE_CHECKING:
    from engram_core.backend import EngramBackend
    from engram_core.config import EngramConfig
    from engram_core.tokens import TokenMap


@dataclass(frozen=True, eq=False)  # tensors compare element by element
class TokenBatch:
    """The tokens of one step: R requests packed one after another.

    ``input_ids``, ``positions``: ``[T]``; ``query_start``: ``[R+1]``, where each request's tokens begin, the last entry
    their end (tokens past it are padding and get the id -1). ``lookback``: ``[R, n-1]`` raw ids of the tokens before
    each request's chunk, newest first, -1 where dead or unknown; entries before position 0 are ignored; ``[R, 0]`` if
    every request begins at position 0. ``dead``: ``[T]`` bool, True: the token takes part in no n-gram. All integers
    are int32 or int64, all tensors on one device. ``host``: the same batch in CPU tensors, for a table gathered there.

    Positions in a request are consecutive. Values are never read back from a device to be checked.
    Raises :class:`InvalidArgumentError` for a wrong shape, dtype or device.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    query_start: torch.Tensor
    lookback: torch.Tensor
    dead: torch.Tensor | None = None
    host: TokenBatch | None = None

    def __post_init__(self) -> None:
        ids = check_tensor("input_ids", self.input_ids, ("T",), INDEX_DTYPES)
        check_tensor("positions", self.positions, (ids.shape[0],), INDEX_DTYPES, ids.device)
        start = check_tensor("query_start", self.query_start, ("R+1",), INDEX_DTYPES, ids.device)
        if start.shape[0] == 0:
            raise InvalidArgumentError("query_start", describe(start), "[R+1] entries, at least one")
        check_tensor("lookback", self.lookback, (start.shape[0] - 1, "n-1"), INDEX_DTYPES, ids.device)
        if self.dead is not None:
            check_tensor("dead", self.dead, (ids.shape[0],), (torch.bool,), ids.device)
        if self.host is not None:
            if not isinstance(self.host, TokenBatch) or self.host.device.type != "cpu":
                raise InvalidArgumentError("host", describe(self.host), "the same batch in CPU tensors")
            if (len(self.host), self.host.requests) != (len(self), self.requests):
                raise InvalidArgumentError(
                    "host",
                    f"{len(self.host)} tokens of {self.host.requests} requests",
                    f"the same batch: {len(self)} tokens of {self.requests} requests",
                )

    @classmethod
    def single(cls, ids: torch.Tensor, dead: torch.Tensor | None = None) -> TokenBatch:
        """One whole sequence ``[T]`` from position 0."""
        ids = check_tensor("ids", ids, ("T",), INDEX_DTYPES)
        return cls(
            input_ids=ids,
            positions=torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device),
            query_start=torch.tensor([0, ids.shape[0]], dtype=ids.dtype, device=ids.device),
            lookback=ids.new_empty((1, 0)),
            dead=dead,
        )

    def __len__(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def requests(self) -> int:
        """R."""
        return int(self.query_start.shape[0]) - 1

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.input_ids.device

    def to(self, device: torch.device | str) -> TokenBatch:
        """The batch on ``device``; where that is not the CPU and this one is, this one becomes its ``host``."""
        target = torch.device(device)
        if self.device == target:
            return self
        host = self if self.device.type == "cpu" else self.host
        return TokenBatch(
            self.input_ids.to(target),
            self.positions.to(target),
            self.query_start.to(target),
            self.lookback.to(target),
            None if self.dead is None else self.dead.to(target),
            None if target.type == "cpu" else host,
        )


class NgramHasher:
    """Hash ids ``[T, L, C]`` (int32; int64 where a table has 2**31 rows or more) of a batch, on a backend.

    Raises :class:`TokenMapError` if the map's size is not the configuration's.
    """

    def __init__(self, config: EngramConfig, token_map: TokenMap, backend: EngramBackend) -> None:
        check_token_map(config, token_map)
        self.layout = HashLayout.from_config(config)
        self.token_map = token_map
        self.device = backend.device
        self._hash: Callable[[TokenBatch], torch.Tensor] = backend.create_hasher(self.layout, token_map)

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        """Raises :class:`InvalidArgumentError` for a batch on another device or a lookback of another width."""
        if not isinstance(batch, TokenBatch):
            raise InvalidArgumentError("batch", describe(batch), "a TokenBatch")
        if batch.device != self.device:
            raise InvalidArgumentError(
                "batch", f"tensors on {batch.device}", f"tensors on {self.device} (batch.to does it)"
            )
        return self._hash(with_lookback(batch, self.layout.max_ngram_size - 1))


def check_token_map(config: EngramConfig, token_map: TokenMap) -> None:
    """Refuse a map whose size is not the one the model's rows were hashed with."""
    if token_map.size != config.compressed_vocab_size:
        raise TokenMapError(
            f"token_map: has {token_map.size} compressed ids; the configuration's engram_compressed_vocab_size is "
            f"{config.compressed_vocab_size}; this is another model's tokenizer"
        )
    if token_map.pad_token_id != config.pad_token_id:
        raise TokenMapError(
            f"token_map: pads with token {token_map.pad_token_id}; the configuration's engram_pad_token_id is "
            f"{config.pad_token_id}"
        )


def with_lookback(batch: TokenBatch, width: int) -> TokenBatch:
    """The batch with a lookback of exactly ``width``: none given means that nothing before the chunk is known."""
    have = int(batch.lookback.shape[1])
    if have == width:
        return batch
    if have:
        raise InvalidArgumentError(
            "lookback", describe(batch.lookback), f"[{batch.requests}, {width}], n-1 tokens a request"
        )
    return replace(batch, lookback=batch.input_ids.new_full((batch.requests, width), -1))


class TorchHasher:
    """The definition, in torch operations that never read a value back; the default of every backend."""

    def __init__(self, layout: HashLayout, token_map: TokenMap, device: torch.device) -> None:
        def long(numbers: object) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        self._n = layout.max_ngram_size
        self._map = token_map.ids.to(device=device, dtype=torch.int64)
        self._pad = token_map.pad_id
        self._multipliers = long(layout.multipliers)  # [L, n]
        self._primes = long(layout.primes)  # [L, n-1, heads]
        self._offsets = long(layout.offsets).view_as(self._primes)
        self._dtype = torch.int64 if layout.needs_int64 else torch.int32

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        ids, start = batch.input_ids.to(torch.int64), batch.query_start.to(torch.int64).contiguous()
        tokens, requests = len(batch), batch.requests
        layers, sizes, heads = self._primes.shape
        if tokens == 0 or requests == 0:
            return torch.full((tokens, layers, sizes * heads), -1, dtype=self._dtype, device=ids.device)
        index = torch.arange(tokens, device=ids.device)
        request = (torch.searchsorted(start, index, right=True) - 1).clamp(0, requests - 1)
        in_chunk = index - start[request]  # j: the token's place in its request's chunk
        lookback = batch.lookback.to(torch.int64)
        blocked = torch.zeros(tokens, dtype=torch.bool, device=ids.device)
        roll = torch.zeros(tokens, layers, dtype=torch.int64, device=ids.device)
        rolls = []
        for s in range(self._n):
            here = in_chunk >= s
            source = (index - s).clamp_min(0)
            before = lookback[request, (s - 1 - in_chunk).clamp(0, self._n - 2)]
            token = torch.where(here, ids[source], before)
            bad = (batch.positions < s) | (token < 0) | (token >= self._map.shape[0])
            if batch.dead is not None:
                bad |= here & batch.dead[source]
            blocked = blocked | bad  # cumulative: whatever is older than a blocked token is blocked too
            value = self._map[token.clamp(0, self._map.shape[0] - 1)].masked_fill(blocked, self._pad)
            roll = roll ^ (value[:, None] * self._multipliers[:, s])
            if s:
                rolls.append(roll)
        # One division for all columns: on a CPU it is most of the time, and runs on as many threads as it has work for.
        hashed = torch.stack(rolls, 2)[..., None].remainder(self._primes).add_(self._offsets).flatten(2)
        return hashed.masked_fill_((index >= start[-1])[:, None, None], -1).to(self._dtype)
