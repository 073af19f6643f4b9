"""gfx950's projection: packed rows by ``tl.dot_scaled``, which Triton's interpreter has from 3.8 on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engram_conformance import bridge, oracle
from engram_rocm.arch import KNOWN
from engram_rocm.weights import CodedWeight
from engram_rocm.wkv_scaled import wkv_scaled
from test_rocm_wkv import Checkpoint, made, packed_rows

from engram_core.errors import InvalidArgumentError
from engram_core.formats import rows_to_bf16

pytest.importorskip("triton", minversion="3.8")


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("tokens", "columns", "head_dim"), [(1, 2, 256), (5, 3, 32), (17, 5, 96), (70, 2, 64)])
def test_packed_rows_give_the_projection(tokens: int, columns: int, head_dim: int, by_row: bool) -> None:
    """Rows of one column and of several in a step; inputs that no step divides; every tile."""
    k = columns * head_dim
    checkpoint = Checkpoint(320, k, by_row)
    packed = packed_rows(tokens, columns, head_dim)
    wkv = checkpoint.load(made("fp8", k=k, architecture=KNOWN["gfx950"]))
    checkpoint.judge(wkv(packed), rows_to_bf16(packed))


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_and_strides(ranks: int) -> None:
    checkpoint = Checkpoint(640, 128)
    packed = packed_rows(4, 4, 32)
    holder = torch.zeros(8, 6, packed.shape[-1] + 3, dtype=torch.uint8)
    holder[::2, 1:5, 2:-1] = packed
    for rank in range(ranks):
        wkv = checkpoint.load(made("fp8", 128, k=128, rank=rank, ranks=ranks, architecture=KNOWN["gfx950"]))
        mine = np.arange(640).reshape(5, ranks, -1)[:, rank].ravel()
        for rows in (packed, holder[::2, 1:5, 2:-1], rows_to_bf16(packed)):
            checkpoint.judge(wkv(rows), rows_to_bf16(packed), mine)


def test_extreme_scales_and_nan_stay_with_their_token() -> None:
    checkpoint = Checkpoint(64, 64)
    packed = packed_rows(6, 2, 32)
    packed[0, 0, 32] = 255
    packed[1, 1, 5] = 0x7F
    packed[2, :, 32] = 0
    packed[3, :, 32] = 20
    weight = CodedWeight(bridge.tensor(checkpoint.codes), bridge.tensor(checkpoint.scales), 32, True)
    out = torch.empty(6, 64, dtype=torch.bfloat16)
    with np.errstate(invalid="ignore"):  # the interpreter's own product warns of the NaN that it is given
        wkv_scaled(packed, weight, out)
    assert out[:2].isnan().all()
    read = bridge.values(rows_to_bf16(packed[2:])).reshape(4, -1)
    ref, size = oracle.wkv(read, checkpoint.weight)
    found = oracle.check_wkv(bridge.bits(out[2:]), ref, size, 64)
    assert found.passed, found.message


def test_wrong_operands_are_refused() -> None:
    weight = CodedWeight(torch.zeros(64, 96, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.uint8), 32, True)
    out = torch.zeros(2, 64, dtype=torch.bfloat16)
    byte = torch.uint8
    for wrong in (torch.zeros(2, 3, 34, dtype=byte), torch.zeros(2, 2, 33, dtype=byte), torch.zeros(2, 3, 33)):
        with pytest.raises(InvalidArgumentError, match="^rows"):
            wkv_scaled(wrong, weight, out)
    with pytest.raises(InvalidArgumentError, match="^out"):
        wkv_scaled(torch.zeros(3, 3, 33, dtype=torch.uint8), weight, out)
