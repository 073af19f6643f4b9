"""Kernels of vLLM and SGLang, taken out of their released files when the benchmark runs; none of their code is here.

``folder`` holds the two wheels unpacked, or at least the files named below.
"""

from __future__ import annotations

import ast
import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton

from engram_core.specs import GateWeights

_SGLANG = "sglang/sglang/kernels/ops/embeddings"
_VLLM = "vllm/vllm/models/deepseek_v41/common/engram.py"
_VLLM_KERNELS = ("_hash_ids_kernel", "_engram_lookup_kernel", "_fused_engram_post_wkv_kernel")


class Peers:
    """The peers' kernels behind our shapes; a missing file is a missing peer, said by name in ``missing``."""

    def __init__(self, folder: Path) -> None:
        self.missing: list[str] = []
        self._gather = self._module(folder / _SGLANG / "engram_gather.py")
        self._gate = self._module(folder / _SGLANG / "engram_gate.py")
        self._hash = self._module(folder / _SGLANG / "engram_hash.py")
        self._vllm = self._kernels(folder / _VLLM)

    def _module(self, path: Path) -> ModuleType | None:
        if not path.is_file():
            self.missing.append(str(path))
            return None
        spec = importlib.util.spec_from_file_location(f"peer_{path.stem}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _kernels(self, path: Path) -> ModuleType | None:
        """The kernels' own source, cut out of a module that would import its whole engine."""
        if not path.is_file():
            self.missing.append(str(path))
            return None
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        parts = ["import triton", "import triton.language as tl", "_SORTED_IS_CONSTEXPR = tl.constexpr(True)"]
        for node in ast.parse(source).body:
            if isinstance(node, ast.FunctionDef) and node.name in _VLLM_KERNELS:
                first = min(node.lineno, *(d.lineno for d in node.decorator_list))
                parts.append("\n".join(lines[first - 1 : node.end_lineno]))
        cut = Path(tempfile.mkdtemp()) / "peer_vllm.py"
        cut.write_text("\n\n".join(parts), encoding="utf-8")
        return self._module(cut)

    def gates(self, hidden: torch.Tensor, kv: torch.Tensor, w: GateWeights) -> dict[str, Callable[[], object]]:
        """Calls of the gate by peer."""
        calls: dict[str, Callable[[], object]] = {}
        tokens, copies, dim = hidden.shape
        if self._gate is not None:
            fused = self._gate.fused_engram_gate
            calls["sglang"] = lambda: fused(hidden, kv, w.q_weight, w.k_weight, w.eps, w.clamp)
        if self._vllm is not None:
            kernel = self._vllm._fused_engram_post_wkv_kernel
            out = torch.empty_like(hidden)
            calls["vllm"] = lambda: kernel[(tokens * copies,)](
                hidden, kv, w.q_weight, w.k_weight, hidden, out, tokens, *hidden.stride(), *kv.stride(),
                *w.q_weight.stride(), *w.k_weight.stride(), 0, *out.stride(), w.eps, w.clamp, DIM=dim, HC_MULT=copies,
                BLOCK_SIZE=triton.next_power_of_2(dim), HAS_MASK=False, num_warps=8,
            )  # fmt: skip
        return calls

    def lookups(self, memory: torch.Tensor, rows: int, ids: torch.Tensor) -> dict[str, Callable[[], object]]:
        """Calls of the look-up by peer: two arrays, values then scales, laid over our table's memory (its values are
        random bytes either way).
        """
        calls: dict[str, Callable[[], object]] = {}
        tokens, columns = ids.shape
        out = torch.empty(tokens * columns, 256, dtype=torch.bfloat16, device=ids.device)
        flat = memory.view(-1)
        if self._gather is not None:
            gather, base = self._gather.engram_gather, memory.data_ptr()
            calls["sglang"] = lambda: gather(base, base + rows * 256, ids.view(-1), out, 256, 32)
        if self._vllm is not None:
            kernel = self._vllm._engram_lookup_kernel
            values = flat[: rows * 256].view(torch.float8_e4m3fn)
            scales = flat[rows * 256 :]
            count = tokens * columns
            grid = min(triton.cdiv(count, 16), torch.cuda.get_device_properties(ids.device).multi_processor_count)
            calls["vllm"] = lambda: kernel[(grid,)](
                values, scales, ids, ids, out, 0, rows, count, *ids.stride(), HEAD_START=0, LOCAL_HEADS=columns,
                TOTAL_HEADS=columns, DIM=256, QUANT_BLOCK=32, BLOCK_R=16, GRID=grid, SORTED=False, PACKED=False,
                OUT_STRIDE=columns * 256,
            )  # fmt: skip
        return calls

    def hashes(self, batch: Any, c: Any) -> dict[str, Callable[[], object]]:
        """Calls of the hash by peer, one token a request (decode)."""
        calls: dict[str, Callable[[], object]] = {}
        layers, n = c.multipliers.shape
        primes = c.primes.view(layers, n - 1, c.heads)
        ids, lookback = batch.input_ids, batch.lookback.int().contiguous()
        tokens = ids.shape[0]
        if self._hash is not None:
            decode, mode = self._hash.engram_hash_ids, self._hash.MODE_DECODE
            calls["sglang"] = lambda: decode(
                ids, batch.positions, mode=mode, history=lookback, token_map=c.token_map, multipliers=c.multipliers,
                primes=primes, offsets=c.offsets, pad_id=c.pad_id,
            )  # fmt: skip
        if self._vllm is not None:
            kernel = self._vllm._hash_ids_kernel
            out = torch.empty(tokens, layers, primes[0].numel(), dtype=torch.int32, device=ids.device)
            dead = torch.zeros(tokens, dtype=torch.bool, device=ids.device)
            gone = torch.zeros_like(lookback, dtype=torch.bool)
            start, where = batch.query_start, batch.positions
            calls["vllm"] = lambda: kernel[(triton.cdiv(tokens, 32), layers)](
                ids, c.token_map, dead, where, None, start, c.multipliers, primes, c.offsets, None, lookback, gone, out,
                tokens, 0, c.pad_id, input_stride=1, mask_stride=1, position_stride=1, table_stride=0,
                table_col_stride=0, query_stride=1, num_query_rows=start.numel() - 1, num_table_rows=0, max_blocks=0,
                cache_block_size=1, MAX_NGRAM=n, num_heads=c.heads, BLOCK_T=32,
                BLOCK_H=triton.next_power_of_2(c.heads), dead_id=-1, lookback_depth=n - 1,
                lookback_row_stride=lookback.stride(0), lookback_col_stride=1, lookback_mask_row_stride=gone.stride(0),
                lookback_mask_col_stride=1, num_warps=4,
            )  # fmt: skip
        return calls
