"""Rows of a packed table by id, decoded to bf16 or left as they lie.

Bytes a row: 264 read at random (5 or 6 HBM atoms of 64), 512 written as bf16 or 264 packed; T=4096 tokens of 24 columns
write 50 MB, a floor of 18 us at 4.3 TB/s. A row is one piece, so it costs one address translation; its stride of
264 = 33 * 8 bytes allows loads of 8 bytes, which is exactly one warp for the 256 codes.

The value is computed in float32 from the code's bits (the same on every vendor, no fp8 type needed): the seven lower
bits moved to 26..20 are the value times 2**-120, subnormal codes included, so two exact products give
``code * 2**(scale - 127)`` with float32's own overflow and subnormals, and one rounding to bf16 follows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from engram_core.checks import INDEX_DTYPES, check_tensor
from engram_core.errors import InvalidArgumentError
from engram_core.formats import BLOCK, packed_width

# Rows a program reads at a time and its warps, where rows in flight are counted, in any order and in a given one. Many
# in few programs: work beside them often wants whole multiprocessors, and waits for those that hold a program.
_FLAT_SHAPE: Final = (16, 8)
_ORDERED_SHAPE: Final = (32, 16)


@triton.jit
def decode_e4m3fn(code):
    """float32 values of e4m3fn code bytes, NaN included."""
    b = code.to(tl.int32)
    bits = ((b & 0x80) << 24) | ((b & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0  # 2**120
    return tl.where((b & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e8m0(scale):
    """float32 values of e8m0 bytes: 2**(byte - 127), byte 0 is 2**-127 and byte 255 is NaN."""
    s = scale.to(tl.int32)
    bits = tl.where(s == 0, 0x00400000, tl.where(s == 255, 0x7FC00000, s << 23))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _ones(x):
    """How many bits of an int64 are set; bit 63 is not."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    return (x + (x >> 32)) & 0x7F


@triton.jit
def _hot_offset(offset, local, owned, hot_at, bits, ranks, counts, WIDTH: tl.constexpr):
    """``offset`` where the row is not cached, and that of its place in the cache where it is; both are counted."""
    word = local >> 6
    set_bits = tl.load(bits + word, mask=owned, other=0)
    rank = tl.load(ranks + word, mask=owned, other=0).to(tl.int64)
    bit = local & 63
    hit = owned & (((set_bits >> bit) & 1) != 0)
    one = tl.full([], 1, tl.int64)
    slot = tl.where(hit, rank + _ones(set_bits & ((one << bit) - 1)), 0)
    lane = (tl.program_id(0) + tl.program_id(1)) % 64
    tl.atomic_add(counts + lane, tl.sum(hit.to(tl.int64)), sem="relaxed")
    tl.atomic_add(counts + 64 + lane, tl.sum(owned.to(tl.int64)), sem="relaxed")
    return tl.where(hit, tl.cast(hot_at, tl.int64) + slot * WIDTH, offset)


@triton.jit
def _rows(
    token,
    column,
    inside,
    table,
    ids,
    out,
    hot_at,
    hot_bits,
    hot_ranks,
    hot_counts,
    start,
    stop,
    ids_stride_t,
    ids_stride_c,
    out_stride_t,
    out_stride_c,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WORD: tl.constexpr,
    HOT: tl.constexpr,
):
    index = tl.load(ids + token * ids_stride_t + column * ids_stride_c, mask=inside, other=-1).to(tl.int64)
    owned = (index >= start) & (index < stop)
    # Clamped as well as masked: an address beyond the table is never formed.
    local = tl.where(owned, index - start, 0)
    to = token * out_stride_t + column.to(tl.int64) * out_stride_c
    offset = local * WIDTH
    if HOT:
        # An offset from the table and not a choice of pointers, which Triton does not compile for AMD targets.
        offset = _hot_offset(offset, local, owned, hot_at, hot_bits, hot_ranks, hot_counts, WIDTH)
    source = table + offset
    if WORD > 0:
        word: tl.constexpr = tl.int64 if WORD == 8 else tl.int32 if WORD == 4 else tl.uint8
        source = source.to(tl.pointer_type(word))
        target = out.to(tl.pointer_type(word)) + to
        d = tl.arange(0, BLOCK_D)
        here = inside[:, None] & (d < WIDTH // WORD)[None, :]
        words = tl.load(source[:, None] + d[None, :], mask=owned[:, None] & here, other=0)
        tl.store(target[:, None] + d[None, :], words, mask=here)
    else:
        target = out + to
        block = tl.arange(0, BLOCK_D // 32)
        lane = tl.arange(0, 32)
        d = block[:, None] * 32 + lane[None, :]
        real = d[None, :, :] < DIM
        code = tl.load(source[:, None, None] + d[None, :, :], mask=owned[:, None, None] & real, other=0)
        scale = tl.load(
            source[:, None] + DIM + block[None, :], mask=owned[:, None] & (block * 32 < DIM)[None, :], other=127
        )
        value = (decode_e4m3fn(code) * decode_e8m0(scale)[:, :, None]).to(tl.bfloat16)
        tl.store(target[:, None, None] + d[None, :, :], value, mask=inside[:, None, None] & real)


@triton.jit(do_not_specialize=["tokens", "columns", "start", "stop"])
def _lookup_kernel(
    table,
    ids,
    order,
    out,
    hot_at,
    hot_bits,
    hot_ranks,
    hot_counts,
    tokens,
    columns,
    start,
    stop,
    ids_stride_t,
    ids_stride_c,
    out_stride_t,
    out_stride_c,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WORD: tl.constexpr,
    FLAT: tl.constexpr,
    ORDERED: tl.constexpr,
    HOT: tl.constexpr,
    LOOP: tl.constexpr,
):
    if FLAT:
        total = tokens * columns
        for part in range(tl.program_id(0), tl.cdiv(total, BLOCK_C), tl.num_programs(0)):
            place = part * BLOCK_C + tl.arange(0, BLOCK_C)
            inside = place < total
            position = tl.load(order + place, mask=inside, other=0) if ORDERED else place
            _rows(
                (position // columns).to(tl.int64), position % columns, inside, table, ids, out,
                hot_at, hot_bits, hot_ranks, hot_counts, start, stop,
                ids_stride_t, ids_stride_c, out_stride_t, out_stride_c, DIM, WIDTH, BLOCK_D, WORD, HOT,
            )  # fmt: skip
    else:
        column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
        if LOOP:
            for t in range(tl.program_id(0), tokens, tl.num_programs(0)):
                _rows(
                    tl.cast(t, tl.int64), column, column < columns, table, ids, out,
                    hot_at, hot_bits, hot_ranks, hot_counts, start, stop,
                    ids_stride_t, ids_stride_c, out_stride_t, out_stride_c, DIM, WIDTH, BLOCK_D, WORD, HOT,
                )  # fmt: skip
        else:
            _rows(
                tl.cast(tl.program_id(0), tl.int64), column, column < columns, table, ids, out,
                hot_at, hot_bits, hot_ranks, hot_counts, start, stop,
                ids_stride_t, ids_stride_c, out_stride_t, out_stride_c, DIM, WIDTH, BLOCK_D, WORD, HOT,
            )  # fmt: skip


@dataclass(frozen=True, eq=False)
class HotSet:
    """Rows of a table that also lie in device memory, and which they are.

    ``rows`` ``[slots, W]`` uint8, in the order of their ids. ``bits`` int64 ``[ceil(rows / 64)]``: bit ``i % 64`` of
    word ``i // 64`` is set where row ``i`` of the table (from its own first row on) is cached; ``ranks`` int32, as
    many: cached rows before the word, so a row's slot is two loads beside each other and a count of bits. ``counts``
    int64 ``[2, 64]``: look-ups served from here, and all that the table served, spread so that atomics don't queue.
    """

    rows: torch.Tensor
    bits: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor


def lookup_rows(
    table: torch.Tensor,
    ids: torch.Tensor,
    out: torch.Tensor,
    start: int = 0,
    max_programs: int | None = None,
    *,
    in_flight: int | None = None,
    order: torch.Tensor | None = None,
    hot: HotSet | None = None,
) -> torch.Tensor:
    """Fill ``out`` ``[T, C, D]`` bf16 or ``[T, C, W]`` uint8 with the rows named by ``ids`` ``[T, C]``.

    ``table`` ``[rows, W]`` uint8, contiguous: rows ``[start, start + rows)`` of the whole table, in memory that the
    device can read. ``ids`` int32 or int64 of any strides; one outside the window gives zero bits, and nothing is read.
    ``max_programs`` bounds the grid, about, where other work runs beside it. Instead of that, for memory that is far
    away: ``in_flight``, rows read at a time, about, by few programs; and ``order`` int32 ``[T * C]``, the positions
    ``t * C + c`` in the order in which to read them (:func:`engram_core.kernels.order.address_order`). ``hot``: rows to
    read from there instead, bit for bit the same.
    Raises :class:`InvalidArgumentError` for a wrong shape, dtype, layout or device.
    """
    check_tensor("hash_ids", ids, ("T", "C"), INDEX_DTYPES)
    check_tensor("table", table, ("rows", "W"), (torch.uint8,), ids.device)
    width = int(table.shape[1])
    dim = width * BLOCK // (BLOCK + 1)
    if not table.is_contiguous() or packed_width(dim) != width or dim % BLOCK:
        raise InvalidArgumentError("table", f"rows of {width} bytes", "dense rows of D codes and D/32 scales")
    if max_programs is not None and (in_flight is not None or order is not None):
        raise InvalidArgumentError("max_programs", str(max_programs), "None with in_flight or order")
    tokens, columns = (int(n) for n in ids.shape)
    packed = out.dtype == torch.uint8
    shape = (tokens, columns, width if packed else dim)
    check_tensor("out", out, shape, (torch.uint8, torch.bfloat16), ids.device, True)
    if order is not None:
        check_tensor("order", order, (tokens * columns,), (torch.int32,), ids.device)
    if tokens == 0 or columns == 0:
        return out
    stop = start + int(table.shape[0])
    if table.shape[0] == 0:
        return out.zero_()
    # Packed rows move as whole words, of the widest size that divides every address; 0: decoded, strides in elements.
    word = 0
    strides = (out.stride(0), out.stride(1))
    if packed:
        apart = math.gcd(width, *strides, table.data_ptr(), out.data_ptr(), hot.rows.data_ptr() if hot else 0)
        word = 8 if apart % 8 == 0 else 4 if apart % 4 == 0 else 1
        strides = (strides[0] // word, strides[1] // word)
    flat = order is not None or (in_flight is not None and tokens * columns > in_flight)
    each, warps = _ORDERED_SHAPE if order is not None else _FLAT_SHAPE if flat else _shape(tokens * columns)
    if flat:
        whole = triton.cdiv(tokens * columns, each)
        grid = (whole if in_flight is None else max(1, min(whole, in_flight // each)), 1)
    else:
        parts = triton.cdiv(columns, each)
        grid = (tokens if max_programs is None else max(1, min(tokens, max_programs // parts)), parts)
    _lookup_kernel[grid](
        table,
        ids,
        ids if order is None else order,
        out,
        0 if hot is None else hot.rows.data_ptr() - table.data_ptr(),
        *((ids, ids, ids) if hot is None else (hot.bits, hot.ranks, hot.counts)),
        tokens,
        columns,
        start,
        stop,
        ids.stride(0),
        ids.stride(1),
        strides[0],
        strides[1],
        DIM=dim,
        WIDTH=width,
        BLOCK_D=triton.next_power_of_2(width // word if packed else dim),
        BLOCK_C=each,
        WORD=word,
        FLAT=flat,
        ORDERED=order is not None,
        HOT=hot is not None,
        LOOP=not flat and grid[0] < tokens,
        num_warps=warps,
    )
    return out


def _shape(rows: int) -> tuple[int, int]:
    """Columns a program and its warps: the fastest measured on an H200 (benchmarks/RESULTS.md)."""
    return (2, 4) if rows <= 512 else (4, 4) if rows <= 8192 else (4, 2)
