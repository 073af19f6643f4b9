"""N-gram hash ids of a flattened batch, one launch, nothing read back to the host.

Bytes: at T tokens 4T ids + 4T positions + n map entries a token in, 4 * L * C out (192 a token for two layers of 24
columns); so it is bound by latency: the chain query_start -> token -> map -> product is three dependent loads. A
request is therefore found by counting the ends at or before the token, one wide load, where a bisection (kept for
batches of very many requests) adds a dependent load for every doubling of R. ``roll % prime`` is exact without a
division: ``q = mulhi(roll, 2**64 // prime)`` is the quotient or one less for any roll below 2**63, so one conditional
subtraction mends it.

Follows docs/contract.md, "Hash"; ``engram_core.hashing.TorchHasher`` is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from engram_core.checks import INDEX_DTYPES, check_tensor
from engram_core.hashing import TokenBatch
from engram_core.kernels.device import on

if TYPE_CHECKING:
    from engram_core.layout import HashLayout
    from engram_core.tokens import TokenMap

_COUNTED = 256


@triton.jit(do_not_specialize=["num_tokens", "num_requests", "map_size", "pad_id"])
def _hash_kernel(
    ids,
    positions,
    query_start,
    lookback,
    dead,
    token_map,
    multipliers,
    primes,
    reciprocals,
    offsets,
    out,
    num_tokens,
    num_requests,
    map_size,
    pad_id,
    ids_stride,
    position_stride,
    start_stride,
    lookback_stride_r,
    lookback_stride_s,
    dead_stride,
    N: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_DEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    COLUMNS: tl.constexpr = (N - 1) * HEADS
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    layer = tl.program_id(1)
    inside = t < num_tokens

    # The request is the number of ends at or before the token: empty requests count too, so it is the right one.
    if BLOCK_R > 0:
        r = tl.arange(0, BLOCK_R)
        ends = tl.load(query_start + (r + 1) * start_stride, mask=r < num_requests, other=0).to(tl.int64)
        passed = (ends[None, :] <= t[:, None]) & (r[None, :] < num_requests)
        request = tl.sum(passed.to(tl.int32), axis=1)
    else:
        request = tl.zeros([BLOCK_T], tl.int32)
        above = request + num_requests
        while tl.max(above - request, 0) > 0:
            middle = (request + above) // 2
            searching = request < above
            end = tl.load(query_start + (middle + 1) * start_stride, mask=searching, other=0).to(tl.int64)
            right = searching & (end <= t)
            above = tl.where(searching & (right == 0), middle, above)
            request = tl.where(right, middle + 1, request)
    live = inside & (request < num_requests)
    request = tl.where(live, request, 0).to(tl.int64)
    start = tl.load(query_start + request * start_stride, mask=live, other=0).to(tl.int32)
    place = t - start
    # Tokens before the first request's start belong to none; a step never holds any, and their look-ups stay in bounds.
    place = tl.maximum(place, 0)
    position = tl.load(positions + t.to(tl.int64) * position_stride, mask=live, other=0).to(tl.int64)

    h = tl.arange(0, BLOCK_H)
    blocked = t < 0
    roll = tl.zeros([BLOCK_T], tl.int64)
    for s in tl.static_range(N):
        here = live & (place >= s)
        source = tl.maximum(t - s, 0).to(tl.int64)
        token = tl.load(ids + source * ids_stride, mask=here, other=-1).to(tl.int64)
        if HAS_DEAD:
            gone = tl.load(dead + source * dead_stride, mask=here, other=0)
            token = tl.where(gone != 0, -1, token)
        if s > 0:
            before = live & (place < s)
            past = tl.where(before, s - 1 - place, 0).to(tl.int64)
            earlier = tl.load(
                lookback + request * lookback_stride_r + past * lookback_stride_s, mask=before, other=-1
            ).to(tl.int64)
            token = tl.where(before, earlier, token)
        known = (token >= 0) & (token < map_size)
        blocked = blocked | (position < s) | (known == 0)
        compressed = tl.load(token_map + tl.where(known, token, 0), mask=known, other=0).to(tl.int64)
        value = tl.where(blocked, pad_id.to(tl.int64), compressed)
        roll = roll ^ (value * tl.load(multipliers + layer * N + s))
        if s > 0:
            column = (s - 1) * HEADS + h
            at = layer * COLUMNS + column
            prime = tl.load(primes + at, mask=h < HEADS, other=1)
            reciprocal = tl.load(reciprocals + at, mask=h < HEADS, other=0)
            offset = tl.load(offsets + at, mask=h < HEADS, other=0)
            dividend = tl.broadcast_to(roll[:, None], [BLOCK_T, BLOCK_H])
            factor = tl.broadcast_to(reciprocal[None, :], [BLOCK_T, BLOCK_H])
            quotient = tl.umulhi(dividend.to(tl.uint64), factor.to(tl.uint64)).to(tl.int64)
            rest = dividend - quotient * prime[None, :]
            rest = tl.where(rest >= prime[None, :], rest - prime[None, :], rest)
            hashed = tl.where(live[:, None], rest + offset[None, :], -1)
            to = (t.to(tl.int64) * tl.num_programs(1) + layer)[:, None] * COLUMNS + column[None, :]
            tl.store(out + to, hashed.to(out.dtype.element_ty), mask=inside[:, None] & (h < HEADS)[None, :])


@dataclass(frozen=True)
class HashConstants:
    """A layout's numbers and a token map on a device, uploaded once.

    ``token_map`` int32 ``[V]``; ``multipliers`` ``[L, n]``, ``primes``, ``reciprocals`` (``2**64 // prime``, as the
    bits of an unsigned number) and ``offsets`` ``[L, C]``, all int64; ``dtype``: of the ids.
    """

    token_map: torch.Tensor
    pad_id: int
    multipliers: torch.Tensor
    primes: torch.Tensor
    reciprocals: torch.Tensor
    offsets: torch.Tensor
    heads: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layout: HashLayout, token_map: TokenMap, device: torch.device) -> HashConstants:
        """Upload; the one synchronising copy of a hasher's life."""

        def long(numbers: object) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        flat = [[p for size in layer for p in size] for layer in layout.primes]
        return cls(
            token_map=token_map.ids.to(device=device, dtype=torch.int32).contiguous(),
            pad_id=token_map.pad_id,
            multipliers=long(layout.multipliers),
            primes=long(flat),
            reciprocals=long([[_signed(2**64 // p) for p in layer] for layer in flat]),
            offsets=long(layout.offsets),
            heads=layout.n_heads,
            dtype=torch.int64 if layout.needs_int64 else torch.int32,
        )


def _signed(bits: int) -> int:
    return bits - 2**64 if bits >= 2**63 else bits


def hash_ids(batch: TokenBatch, constants: HashConstants, out: torch.Tensor | None = None) -> torch.Tensor:
    """Hash ids ``[T, L, C]`` of ``batch``, whose lookback is ``[R, n-1]``; ``out`` is contiguous where given.

    Raises :class:`~engram_core.errors.InvalidArgumentError` for a wrong shape, dtype or device.
    """
    c = constants
    layers, n = c.multipliers.shape
    device = c.token_map.device
    ids = check_tensor("input_ids", batch.input_ids, ("T",), INDEX_DTYPES, device)
    lookback = check_tensor("lookback", batch.lookback, (batch.requests, n - 1), INDEX_DTYPES, device)
    tokens = len(batch)
    shape = (tokens, layers, c.primes.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=c.dtype, device=device)
    else:
        check_tensor("out", out, shape, (c.dtype,), device)
    if tokens == 0:
        return out
    few = tokens <= 256
    block_t = 4 if few else 16
    dead = batch.dead
    _hash_kernel[(triton.cdiv(tokens, block_t), layers)](
        ids,
        batch.positions,
        batch.query_start,
        lookback,
        dead if dead is not None else ids,
        c.token_map,
        c.multipliers,
        c.primes,
        c.reciprocals,
        c.offsets,
        out,
        tokens,
        batch.requests,
        c.token_map.shape[0],
        c.pad_id,
        ids.stride(0),
        batch.positions.stride(0),
        batch.query_start.stride(0),
        lookback.stride(0),
        lookback.stride(1),
        dead.stride(0) if dead is not None else 0,
        N=n,
        HEADS=c.heads,
        HAS_DEAD=dead is not None,
        BLOCK_T=block_t,
        BLOCK_H=triton.next_power_of_2(c.heads),
        BLOCK_R=max(16, triton.next_power_of_2(batch.requests)) if batch.requests <= _COUNTED else 0,
        num_warps=1 if few else 4,
    )
    return out


class KernelHasher:
    """What a GPU backend's ``create_hasher`` returns: the kernel on one device, its constants uploaded once."""

    def __init__(self, layout: HashLayout, token_map: TokenMap, device: torch.device) -> None:
        self._constants = HashConstants.of(layout, token_map, device)
        self._device = device

    def __call__(self, batch: TokenBatch) -> torch.Tensor:
        with on(self._device):
            return hash_ids(batch, self._constants)
