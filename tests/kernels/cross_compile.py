"""Compiles for an NVIDIA GPU what the launchers would launch on it, on a machine without one; prints facts as JSON.

``python cross_compile.py 9.0``. The launchers run as they are, on CPU tensors of the published geometry (never
touched); a driver that only names its target takes the place of CUDA's, and a launch ends at the compiled kernel.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from engram_nvidia.arch import of_capability
from engram_nvidia.expand import expand
from engram_nvidia.operands import split_rows
from engram_nvidia.weights import PackedWeight
from engram_nvidia.wkv_few import wkv_few
from engram_nvidia.wkv_many import wkv_many
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from engram_core import EngramConfig, TokenBatch, TokenMap
from engram_core.kernels import gate as gate_module
from engram_core.kernels.gate import gate
from engram_core.kernels.hash import HashConstants, hash_ids
from engram_core.kernels.lookup import HotSet, lookup_rows
from engram_core.kernels.order import address_order
from engram_core.layout import HashLayout
from engram_core.specs import GateWeights

BF16 = torch.bfloat16
DIM, COPIES, K, COLUMNS, HEAD_DIM = 5120, 4, 6144, 24, 256
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Target:
    """Triton's active driver, as far as compiling asks it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def launches(capability: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """A name and a call for every launch worth proving."""
    chip = of_capability(*capability)
    weights = GateWeights(torch.empty(COPIES, DIM, dtype=BF16), torch.empty(COPIES, DIM, dtype=BF16), 1e-20)
    shape = gate_module._shape
    for stages in (0, 4):  # the loop over tokens is chosen by what the device says of itself
        hidden, kv = torch.empty(8, COPIES, DIM, dtype=BF16), torch.empty(8, (COPIES + 1) * DIM, dtype=BF16)
        gate_module._shape = lambda *_, stages=stages: (8, 4, stages)
        yield f"gate stages={stages}", functools.partial(gate, hidden, kv, weights, torch.empty(8, dtype=torch.bool))
    gate_module._shape = shape
    for tokens, n in ((1, 25600), (16, 25600), (1, 3200), (24, 12800)):
        rows, out = torch.empty(tokens, K, dtype=BF16), torch.empty(tokens, n, dtype=BF16)
        yield f"few T={tokens} N={n}", functools.partial(wkv_few, rows, packed(n), out, chip)
    for tokens, n in ((32, 25600), (64, 25600), (64, 3200), (128, 25600), (1024, 25600)):
        rows, out = torch.empty(tokens, K, dtype=BF16), torch.empty(tokens, n, dtype=BF16)
        yield f"many T={tokens} N={n}", functools.partial(wkv_many, rows, packed(n), out, chip)
    yield "expand", functools.partial(expand, packed(25600), torch.empty(25600, K, dtype=BF16), chip)
    table = torch.empty(1000, 264, dtype=torch.uint8)
    for tokens in (1, 4096):
        ids = torch.empty(tokens, COLUMNS, dtype=torch.int32)
        raw = torch.empty(tokens, COLUMNS, 264, dtype=torch.uint8)
        decoded = torch.empty(tokens, COLUMNS, HEAD_DIM, dtype=BF16)
        yield f"look-up T={tokens}", functools.partial(lookup_rows, table, ids, decoded)
        yield f"look-up packed T={tokens}", functools.partial(lookup_rows, table, ids, raw)
        yield f"look-up flat T={tokens}", functools.partial(lookup_rows, table, ids, decoded, in_flight=16)
        yield f"look-up flat packed T={tokens}", functools.partial(lookup_rows, table, ids, raw, in_flight=16)
        yield f"order T={tokens}", functools.partial(address_order, ids, 0, 384_006_168)
        order = torch.empty(tokens * COLUMNS, dtype=torch.int32)
        yield f"look-up ordered T={tokens}", functools.partial(lookup_rows, table, ids, decoded, order=order)
        words = torch.empty(16, dtype=torch.int64)
        hot = HotSet(table, words, words.to(torch.int32), torch.empty(2, 64, dtype=torch.int64))
        yield f"look-up hot T={tokens}", functools.partial(lookup_rows, table, ids, decoded, order=order, hot=hot)
        yield f"look-up hot packed T={tokens}", functools.partial(lookup_rows, table, ids, raw, hot=hot)
    yield "operands", functools.partial(split_rows, torch.empty(4, COLUMNS, 264, dtype=torch.uint8))
    config = EngramConfig.deepseek_v41()
    layout, identity = HashLayout.from_config(config), TokenMap.identity(config.compressed_vocab_size, 2)
    constants = HashConstants.of(layout, identity, torch.device("cpu"))
    for requests in (4, 400):
        tokens = torch.zeros(requests, dtype=torch.int64)
        batch = TokenBatch(tokens, tokens, torch.arange(requests + 1), torch.zeros(requests, 3, dtype=torch.int64))
        yield f"hash R={requests}", functools.partial(hash_ids, batch, constants)


def packed(n: int) -> PackedWeight:
    """Weights of the real shape that take no memory."""
    words = torch.empty(1, dtype=torch.int32).as_strided((K // 128, n // 16, 4, 128), (0, 0, 0, 0))
    return PackedWeight(words, torch.empty(n // 32, K // 32, dtype=torch.uint8), n, K, by_row=False, fast=True)


def compile_for(capability: tuple[int, int]) -> list[dict[str, Any]]:
    """Facts of each launch's kernels."""
    driver.set_active(Target(capability[0] * 10 + capability[1]))
    found: list[Any] = []
    run = JITFunction.run

    def record(self: Any, *args: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, warmup=True, **options)
        found.append(kernel)
        return kernel

    JITFunction.run = record
    facts = []
    for name, launch in launches(capability):
        found.clear()
        launch()
        facts += [{"name": name, "kernel": kernel.metadata.name, **_facts(kernel)} for kernel in found]
    return facts


def _facts(kernel: Any) -> dict[str, Any]:
    ptx = kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        sass = subprocess.run(
            [str(TOOLS / "nvdisasm"), "-c", file.name], capture_output=True, text=True, check=True
        ).stdout
    stack = [int(size) for size in re.findall(r"STACK:(\d+)", usage)]
    return {
        "registers": max(int(count) for count in re.findall(r"REG:(\d+)", usage)),
        "stack": max(stack),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "shared": kernel.metadata.shared,
        "matrix": sorted(set(re.findall(r"\b(?:wgmma|mma\.sync|tcgen05\.mma)", ptx))),
        "flushed": len(re.findall(r"(?:mul|fma|add|cvt)\S*\.ftz\.f32", ptx)),
        "decoded": len(re.findall(r"fma\.rn\.bf16x2", ptx)),
        "waits": ptx.count("wgmma.wait_group.sync.aligned 0; mov"),
        "loop_shuffles": _shuffles_in_loop(sass),
    }


def _shuffles_in_loop(sass: str) -> int:
    """Shuffles between the largest backward branch and its target: an operand that is not where it should be."""
    labels, body, best = {}, [], (0, 0)
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(body)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            body.append(instruction[1])
            jump = re.search(r"BRA `\(?(\.L_x_\d+)", instruction[1])
            if jump and jump[1] in labels and len(body) - labels[jump[1]] > best[1] - best[0]:
                best = (labels[jump[1]], len(body))
    return sum("SHFL" in text for text in body[slice(*best)])


if __name__ == "__main__":
    major, minor = sys.argv[1].split(".")
    print(json.dumps({"triton": triton.__version__, "kernels": compile_for((int(major), int(minor)))}))
