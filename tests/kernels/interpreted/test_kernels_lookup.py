"""The look-up kernel, bit for bit: every code under every scale byte, windows, strides, packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engram_core import formats
from engram_core.errors import InvalidArgumentError
from engram_core.kernels import lookup
from engram_core.kernels.lookup import lookup_rows

BF16 = torch.bfloat16


def bits(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns, all NaN alike."""
    return x.view(torch.int16).masked_fill(x.isnan(), 0x7FC0)


def table(rows: int, dim: int) -> torch.Tensor:
    torch.manual_seed(dim)
    return torch.randint(0, 256, (rows, dim + dim // 32), dtype=torch.uint8)


def test_every_code_under_every_scale_byte() -> None:
    byte = torch.arange(256, dtype=torch.uint8)
    rows = torch.cat([byte.repeat(256, 1), byte[:, None].expand(256, 8)], dim=1).contiguous()
    out = lookup_rows(rows, torch.arange(256).view(64, 4), torch.empty(64, 4, 256, dtype=BF16))
    assert torch.equal(bits(out.view(256, 256)), bits(formats.rows_to_bf16(rows)))


@pytest.mark.parametrize("dim", [32, 96, 256])
@pytest.mark.parametrize("bounds", [{}, {"max_programs": 4}, {"in_flight": 1}, {"in_flight": 33}])
def test_windows_and_strides(dim: int, bounds: dict[str, int]) -> None:
    """Rows [100, 140) of a larger table; ids strided, of both widths, some outside; out strided."""
    rows = table(40, dim)
    ids = torch.randint(90, 150, (5, 14))[:, ::2]
    ids[0, 0], ids[0, 1], ids[1, 0], ids[1, 1] = 2**40, -(2**40), 100, 139
    room = torch.zeros(5, 9, dim, dtype=BF16)
    raw = torch.zeros(5, 9, dim + dim // 32, dtype=torch.uint8)
    owned = (ids >= 100) & (ids < 140)
    want = rows[(ids - 100).masked_fill(~owned, 0)].masked_fill_(~owned[..., None], 0)
    lookup_rows(rows, ids, room[:, 1:8], 100, **bounds)
    assert torch.equal(bits(room[:, 1:8]), bits(formats.rows_to_bf16(want)))
    assert not room[:, ::8].any()
    lookup_rows(rows, ids.to(torch.int32) if abs(int(ids.max())) < 2**31 else ids, raw[:, 1:8], 100, **bounds)
    assert torch.equal(raw[:, 1:8], want)
    assert not raw[:, ::8].any()


def test_nothing_to_do_and_an_empty_window() -> None:
    rows = table(4, 32)
    assert lookup_rows(rows, torch.empty(0, 3, dtype=torch.int64), torch.empty(0, 3, 32, dtype=BF16)).shape == (
        0,
        3,
        32,
    )
    out = torch.ones(2, 3, 32, dtype=BF16)
    assert not lookup_rows(rows[:0], torch.zeros(2, 3, dtype=torch.int64), out).any()


@pytest.mark.parametrize(
    ("bounds", "programs"),
    [({}, (40, 4)), ({"in_flight": 280}, (40, 4)), ({"in_flight": 279}, (17, 1)), ({"in_flight": 33}, (2, 1))],
)
def test_rows_in_flight_are_what_the_programs_read_at_a_time(
    bounds: dict[str, int], programs: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """280 rows, 16 a program where they are counted, in order 32."""
    launched: list[Any] = []

    class Recorder:
        def __getitem__(self, grid: Any) -> Any:
            launched.append(grid)
            return kernel[grid]

    kernel = lookup._lookup_kernel
    monkeypatch.setattr(lookup, "_lookup_kernel", Recorder())
    rows, ids = table(40, 32), torch.randint(0, 40, (40, 7))
    out = torch.empty(40, 7, 32, dtype=BF16)
    assert torch.equal(bits(lookup_rows(rows, ids, out, **bounds)), bits(formats.rows_to_bf16(rows[ids])))
    order = torch.arange(280, dtype=torch.int32)
    assert torch.equal(bits(lookup_rows(rows, ids, out, order=order, **bounds)), bits(formats.rows_to_bf16(rows[ids])))
    of_32 = {None: 9, 280: 8, 279: 8, 33: 1}[bounds.get("in_flight")]
    assert launched == [programs, (of_32, 1)]


def test_refusals() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(InvalidArgumentError, match="^max_programs: got 4; need None with in_flight or order"):
        lookup_rows(table(4, 32), ids, torch.empty(2, 3, 32, dtype=BF16), 0, 4, in_flight=16)
    with pytest.raises(InvalidArgumentError, match="^table"):
        lookup_rows(table(4, 32)[:, :-1], ids, torch.empty(2, 3, 32, dtype=BF16))
    with pytest.raises(InvalidArgumentError, match="^hash_ids"):
        lookup_rows(table(4, 32), ids.float(), torch.empty(2, 3, 32, dtype=BF16))
    with pytest.raises(InvalidArgumentError, match="^out"):
        lookup_rows(table(4, 32), ids, torch.empty(2, 3, 64, dtype=BF16))
