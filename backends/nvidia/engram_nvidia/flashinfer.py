"""FlashInfer's MXFP8 product, found when it is needed and held to what its caller was written against.

Written against FlashInfer 0.7.4 (0.7.2 to 0.7.x are let in and checked by their signatures); never executed for want of
an SM100 card (docs/nvidia.md).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, Final

import torch

from engram_core.info import Reason

_FIX: Final = 'pip install "flashinfer-python>=0.7.2,<0.8"'
# "auto" may choose CUTLASS, whose workspace two streams would share below 0.7.4; cute-dsl has none.
GEMM_BACKEND: Final = "cute-dsl"
PARAMETERS: Final = ("a", "b", "a_descale", "b_descale", "out", "out_dtype", "use_8x4_sf_layout", "backend")
LEAST_N, LEAST_K, MULTIPLE_N, MULTIPLE_K = 128, 128, 8, 16


def reasons(n: int, k: int) -> tuple[Reason, ...]:
    """All reasons against a product of ``n`` outputs and ``k`` inputs; imports nothing."""
    found = []
    if find_spec("flashinfer") is None:
        found.append(Reason("flashinfer-missing", "SM100 and SM103 multiply through FlashInfer, not installed", _FIX))
    elif not re.match(r"0\.7\.([2-9]|\d\d)", version := _version()):
        found.append(Reason("flashinfer-version", f"FlashInfer is {version}; 0.7.2 to 0.7.x is needed", _FIX))
    if n < LEAST_N or k < LEAST_K or n % MULTIPLE_N or k % MULTIPLE_K:
        limit = f"N >= {LEAST_N}, K >= {LEAST_K}, N % {MULTIPLE_N} == 0 and K % {MULTIPLE_K} == 0"
        found.append(Reason("wkv-shape", f"this rank's WKV is [{n}, {k}]; its MXFP8 product needs {limit}"))
    return tuple(found)


def _version() -> str:
    for name in ("flashinfer-python", "flashinfer"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def signature_reasons(function: Callable[..., Any]) -> tuple[Reason, ...]:
    """Against a ``mm_mxfp8`` whose parameters are not those that :func:`mm` passes."""
    have = tuple(inspect.signature(function).parameters)
    if have[: len(PARAMETERS)] == PARAMETERS:
        return ()
    need = ", ".join(PARAMETERS)
    return (Reason("flashinfer-api", f"mm_mxfp8 takes ({', '.join(have)}); needed are ({need}) first", _FIX),)


def load() -> Callable[..., torch.Tensor]:
    """``flashinfer.mm_mxfp8``; raises ``ImportError`` where it is another."""
    function: Callable[..., torch.Tensor] = import_module("flashinfer").mm_mxfp8
    if against := signature_reasons(function):
        raise ImportError(f"flashinfer: {against[0]}")
    return function


def mm(
    function: Callable[..., torch.Tensor],
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """``out`` ``[T, N]`` bf16 = codes ``[T, K]`` times weight ``[N, K]``, both e4m3fn with scales in 128x4 order."""
    result = function(
        codes,
        weight.t(),
        scales,
        weight_scales,
        out=out,
        out_dtype=out.dtype,
        use_8x4_sf_layout=False,
        backend=GEMM_BACKEND,
    )
    if result.data_ptr() != out.data_ptr():
        out.copy_(result)


def tuning() -> AbstractContextManager[Any]:
    """Within it every size that is multiplied is tuned."""
    context: AbstractContextManager[Any] = import_module("flashinfer").autotune(True)
    return context
