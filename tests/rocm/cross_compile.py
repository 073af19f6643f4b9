"""Compiles for an AMD GPU what the launchers would launch on it, on a machine without one; prints facts as JSON.

``python cross_compile.py gfx942``. The launchers run as they are, on CPU tensors of the published geometry (never
touched); a driver that only names its target takes the place of HIP's, and a launch ends at the compiled kernel. So the
signatures, tiles and options are the launchers' own and can't drift from what is proven here.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

import torch
import triton
from engram_rocm.arch import KNOWN
from engram_rocm.gate_finish import finish_gate
from engram_rocm.gate_pack import pack_slice, row_width
from engram_rocm.split import Split
from engram_rocm.unpack import unpack_rows
from engram_rocm.weights import CodedWeight
from engram_rocm.wkv_scaled import wkv_scaled
from engram_rocm.wkv_w8a16 import wkv_w8a16
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engram_core import EngramConfig, Parallel, TokenBatch, TokenMap
from engram_core.backend import GateWeights, WkvSpec
from engram_core.kernels.gate import gate
from engram_core.kernels.hash import HashConstants, hash_ids
from engram_core.kernels.lookup import HotSet, lookup_rows
from engram_core.kernels.order import address_order
from engram_core.layout import HashLayout

BF16 = torch.bfloat16
DIM, COPIES, K, COLUMNS, HEAD_DIM = 5120, 4, 6144, 24, 256


class Target:
    """Triton's active driver, as far as compiling asks it."""

    def __init__(self, arch: str) -> None:
        self._target = GPUTarget("hip", arch, 64)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _Seat:
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_gather(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError

    all_to_all = all_gather


def split(ranks: int, copies: int = COPIES, dim: int = DIM) -> Split:
    return Split.plan(WkvSpec(K, dim, copies, Parallel(_Seat(ranks - 1, ranks))), slices=True)


def launches(arch: str) -> Iterator[tuple[str, Any]]:
    """A name and a call for every launch worth proving."""
    known = KNOWN[arch]
    for copies, dim in ((4, 5120), (8, 4096), (1, 96)):
        weights = GateWeights(torch.empty(copies, dim, dtype=BF16), torch.empty(copies, dim, dtype=BF16), 1e-20)
        for tokens in (2, 4096):
            hidden = torch.empty(tokens, copies, dim, dtype=BF16)
            mask = torch.empty(tokens, dtype=torch.bool)
            kv = torch.empty(tokens, (copies + 1) * dim, dtype=BF16)
            yield f"gate H={copies} dim={dim} T={tokens}", functools.partial(gate, hidden, kv, weights, mask)
        for ranks in (2, 3, 4, 8) if known.slices else ():
            here = split(ranks, copies, dim)
            if not here.sliced:
                continue
            name = f"H={copies} dim={dim} P={ranks}"
            kv = torch.empty(tokens, here.features, dtype=BF16)
            yield f"pack {name}", functools.partial(pack_slice, hidden, kv, weights, here)
            gathered = torch.empty(ranks * tokens, row_width(here), dtype=BF16)
            out = torch.empty_like(hidden)
            yield f"finish {name}", functools.partial(finish_gate, hidden, gathered, weights, here, mask, tokens, out)
    # One batch for every tile that is chosen.
    for tokens in (1, 24, 64, 1024):
        packed = torch.empty(tokens, COLUMNS, HEAD_DIM * 33 // 32, dtype=torch.uint8)
        yield f"unpack T={tokens}", functools.partial(unpack_rows, packed)
        for ranks in (1, 8):
            n = 5 * DIM // ranks
            out = torch.empty(tokens, n, dtype=BF16)
            for rows, fast in ((32, True), (32, False), (1, True))[: 3 if ranks == 8 else 1]:
                scales = torch.empty(n // rows, K // 32, dtype=torch.uint8)
                weight = CodedWeight(torch.empty(n, K, dtype=torch.uint8), scales, rows, fast)
                name = f"T={tokens} N={n} scale rows={rows}"
                plain = torch.empty(tokens, K, dtype=BF16)
                yield f"w8a16 {name} fast={fast}", functools.partial(wkv_w8a16, plain, weight, out)
                if known.scaled and fast:
                    yield f"scaled {name}", functools.partial(wkv_scaled, packed, weight, out)
        ids = torch.empty(tokens, COLUMNS, dtype=torch.int32)
        table = torch.empty(1000, HEAD_DIM * 33 // 32, dtype=torch.uint8)
        yield f"look-up packed T={tokens}", functools.partial(lookup_rows, table, ids, packed)
        decoded = torch.empty(tokens, COLUMNS, HEAD_DIM, dtype=BF16)
        yield f"look-up T={tokens}", functools.partial(lookup_rows, table, ids, decoded)
        yield f"look-up flat T={tokens}", functools.partial(lookup_rows, table, ids, decoded, in_flight=16)
        yield f"look-up flat packed T={tokens}", functools.partial(lookup_rows, table, ids, packed, in_flight=16)
        yield f"order T={tokens}", functools.partial(address_order, ids, 0, 384_006_168)
        order = torch.empty(tokens * COLUMNS, dtype=torch.int32)
        words = torch.empty(16, dtype=torch.int64)
        hot = HotSet(table, words, words.to(torch.int32), torch.empty(2, 64, dtype=torch.int64))
        yield f"look-up hot T={tokens}", functools.partial(lookup_rows, table, ids, decoded, order=order, hot=hot)
        config = EngramConfig.deepseek_v41()
        constants = HashConstants.of(
            HashLayout.from_config(config), TokenMap.identity(config.compressed_vocab_size, 2), torch.device("cpu")
        )
        batch = TokenBatch(
            torch.zeros(tokens, dtype=torch.int64),
            torch.zeros(tokens, dtype=torch.int64),
            torch.tensor([0, tokens]),
            torch.zeros(1, 3, dtype=torch.int64),
        )
        yield f"hash T={tokens}", functools.partial(hash_ids, batch, constants)


def compile_for(arch: str) -> list[dict[str, Any]]:
    """Facts of each launch's kernel: matrix instructions, spills, scratch, LDS, wave size, widths of loads."""
    driver.set_active(Target(arch))
    found: list[Any] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, warmup=True, **options)
        found.append(kernel)
        return kernel

    JITFunction.run = record
    facts = []
    for name, launch in launches(arch):
        found.clear()
        launch()
        (kernel,) = found
        facts.append({"name": name, **_facts(kernel)})
    return facts


def _facts(kernel: Any) -> dict[str, Any]:
    text = kernel.asm["amdgcn"]

    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

    return {
        "kernel": kernel.metadata.name,
        "matrix": sorted(set(re.findall(r"v_mfma_\w+", text))),
        "vgprs": number("vgpr_count"),
        "vgpr_spills": number("vgpr_spill_count"),
        "sgpr_spills": number("sgpr_spill_count"),
        "scratch": number("private_segment_fixed_size"),
        "wave": number("wavefront_size"),
        "lds": max(kernel.metadata.shared, number("group_segment_fixed_size")),
        "denormals": int(re.search(r"\.amdhsa_float_denorm_mode_32 (\d)", text)[1]),
        "loads": sorted(set(re.findall(r"(?:global|buffer)_load_\w+", text))),
        "stores": sorted(set(re.findall(r"(?:global|buffer)_store_\w+", text))),
    }


if __name__ == "__main__":
    print(json.dumps({"triton": triton.__version__, "kernels": compile_for(sys.argv[1])}))
