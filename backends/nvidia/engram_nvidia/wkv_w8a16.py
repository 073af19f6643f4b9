"""WKV of SM80 to SM90 and SM120: e4m3 weights, bf16 tokens; own kernels, and cuBLAS where tokens are many.

Three ways, by the number of tokens: ``wkv_few`` streams the weights past a few tokens; ``wkv_many`` decodes them in the
main loop; beyond that they are expanded to a bf16 workspace that cuBLAS reads, which costs one pass of memory and no
standing copy. With ``keep_bf16`` the copy stands and cuBLAS takes over earlier. Where each begins was measured on an
H200 for N = 25600, 12800, 6400 and 3200 (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from typing import Final

import torch

from engram_core.backend import WkvSpec
from engram_core.formats import dequantize_weight
from engram_nvidia.arch import Chip
from engram_nvidia.dense import product
from engram_nvidia.expand import expand
from engram_nvidia.weights import PackedWeight, pack_weight
from engram_nvidia.wkv import ColumnWkv
from engram_nvidia.wkv_few import wkv_few
from engram_nvidia.wkv_many import wkv_many

# More tokens than this: a workspace and cuBLAS (N = 25600, 512: 322 us against 337; 768: 467, 471; 1024: 598, 566).
_WORKSPACE_TOKENS: Final = 768
# Scale bytes that make no number: NaN, and for the fast decode the first that overflows to infinity.
_NAN: Final = 255
_INFINITE: Final = 135


class W8A16Wkv(ColumnWkv):
    """``chip``: of the device."""

    def __init__(self, spec: WkvSpec, device: torch.device, chip: Chip) -> None:
        super().__init__(spec, device)
        self._chip = chip
        self._packed: PackedWeight | None = None
        self._retired: list[PackedWeight] = []

    @property
    def dense_only(self) -> bool:
        return self._packed is None

    def keep_dense(self, weight: torch.Tensor | None) -> None:
        if self._packed is not None and not self.spec.keep_bf16:
            self._retire()
        super().keep_dense(weight)

    def store_codes(self, weight: torch.Tensor, scale: torch.Tensor) -> None:
        new, held = pack_weight(weight, scale, self.device), self._packed
        if held is not None and (held.by_row, held.fast) == (new.by_row, new.fast):
            held.words.copy_(new.words)
            held.scales.copy_(new.scales)
        else:
            self._retire()
            self._packed = new
        super().keep_dense(_dequantized(weight, scale) if self.spec.keep_bf16 else None)

    def _retire(self) -> None:
        """What a captured graph may still read gives no number of the old weights any more."""
        if self._packed is not None:
            self._packed.scales.fill_(_INFINITE if self._packed.fast else _NAN)
            self._retired.append(self._packed)
            self._packed = None

    def project(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        weight = self._packed
        assert weight is not None  # ``dense_only`` sends everything else elsewhere
        inputs, tokens = self.inputs(rows), int(rows.shape[0])
        if self._dense is not None and tokens > copy_tokens(weight.n):
            product(inputs, self._dense, out)
        elif tokens <= few_tokens(weight.n):
            wkv_few(inputs, weight, out, self._chip)
        elif tokens <= _WORKSPACE_TOKENS:
            wkv_many(inputs, weight, out, self._chip)
        else:
            whole = torch.empty(weight.n, weight.k, dtype=torch.bfloat16, device=out.device)
            product(inputs, expand(weight, whole, self._chip), out)


def few_tokens(n: int) -> int:
    """The most tokens that ``wkv_few`` takes at ``n`` outputs."""
    return 16 if n > 12800 else 32


def copy_tokens(n: int) -> int:
    """The most tokens that are not multiplied by the bf16 copy, where there is one, at ``n`` outputs."""
    return 64 if n > 12800 else 32 if n > 6400 else 16


def _dequantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """bf16, a strip of outputs at a time: the float32 weight never exists whole."""
    out = torch.empty(weight.shape, dtype=torch.bfloat16, device=weight.device)
    blocks = -(-weight.shape[0] // scale.shape[0])
    for begin in range(0, weight.shape[0], 1024):
        strip = slice(begin, min(begin + 1024, weight.shape[0]))
        out[strip] = dequantize_weight(weight[strip], scale[begin // blocks : -(-strip.stop // blocks)])
    return out
