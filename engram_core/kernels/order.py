"""In which order to read rows that lie in host memory: by address, column after column.

Every row of a table in host memory costs the bus an address translation of its own (about 25 ns on an H200's host,
whatever the page size of the process), and neighbours share most of it. Hash columns lie one after another in the
table, so sorting each column by itself sorts the whole: one program a column and 4,096 tokens, in registers, where a
general sort of all ids takes several passes.

One key is 31 bits: the token in the lower ones, the upper bits of the address above. Rows within one step of those
upper bits (about 190 KB of a table of 94 GiB at 4,096 tokens) stay in the order of their tokens.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from engram_core.checks import INDEX_DTYPES, check_tensor

MOST_TOKENS: Final = 4096
"""Tokens sorted together; more are sorted in parts, one after another."""


@triton.jit(do_not_specialize=["tokens", "columns", "start", "stop"])
def _order_kernel(
    ids,
    order,
    tokens,
    columns,
    start,
    stop,
    stride_t,
    stride_c,
    SHIFT: tl.constexpr,
    BITS: tl.constexpr,
):
    column = tl.program_id(0)
    first = tl.program_id(1) * (1 << BITS)
    here = tl.minimum(tokens - first, 1 << BITS)
    t = tl.arange(0, 1 << BITS)
    inside = t < here
    index = tl.load(
        ids + (first + t).to(tl.int64) * stride_t + column.to(tl.int64) * stride_c, mask=inside, other=-1
    ).to(tl.int64)
    local = tl.where((index >= start) & (index < stop), index - start, 0)
    # The largest key sorts what is no token behind all tokens.
    key = tl.where(inside, ((local >> SHIFT).to(tl.int32) << BITS) | t, 0x7FFFFFFF)
    token = tl.sort(key) & ((1 << BITS) - 1)
    tl.store(order + first * columns + column * here + t, (first + token) * columns + column, mask=inside)


def address_order(ids: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Positions ``t * C + c`` of ``ids`` ``[T, C]`` (int32 or int64, any strides) by address: int32 ``[T * C]``.

    ``[start, stop)``: the rows of the whole table that lie here; an id outside it sorts first. T * C below 2**31.
    """
    check_tensor("hash_ids", ids, ("T", "C"), INDEX_DTYPES)
    tokens, columns = (int(n) for n in ids.shape)
    order = torch.empty(tokens * columns, dtype=torch.int32, device=ids.device)
    if tokens == 0 or columns == 0:
        return order
    bits = max(4, (min(tokens, MOST_TOKENS) - 1).bit_length())
    _order_kernel[(columns, triton.cdiv(tokens, 1 << bits))](
        ids,
        order,
        tokens,
        columns,
        start,
        stop,
        ids.stride(0),
        ids.stride(1),
        SHIFT=max(0, (stop - start).bit_length() - (31 - bits)),
        BITS=bits,
        num_warps=32 if bits > 11 else 8 if bits > 7 else 4,
    )
    return order
