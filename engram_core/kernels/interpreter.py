"""Makes Triton's CPU interpreter exact for bf16 and fp8, so that CI executes the real kernels.

Seen in Triton 3.6.0 to 3.9.0: float32 -> bf16 truncates; float32 -> fp8 rounds half away from zero, wraps on overflow
and breaks subnormals and NaN; fp8 NaN decodes to 480; arithmetic and ``tl.dot`` of bf16 run on the raw bit patterns.
:func:`repair` replaces the four builder methods concerned; torch's casts give the values. Unary operations, fma and
``tl.sum`` on raw bf16 are left as they are: kernels convert to float32 first. It also has launches run in lockstep
(``lockstep.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter as upstream

from engram_core.kernels import lockstep

_TORCH: Final[dict[Any, torch.dtype]] = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.float8e4b8: torch.float8_e4m3fnuz,
    tl.float8e5b16: torch.float8_e5m2fnuz,
}
# fp8 casts saturate, as cvt.rn.satfinite does.
_LARGEST: Final[dict[Any, float]] = {
    tl.float8e4nv: 448.0,
    tl.float8e5: 57344.0,
    tl.float8e4b8: 240.0,
    tl.float8e5b16: 57344.0,
}


def _bits(dtype: Any) -> Any:
    """The integer type that numpy views a narrow float as, in terms that torch also knows."""
    return np.int16 if dtype == tl.bfloat16 else np.uint8


def _decode(handle: Any) -> Any:
    """A handle's data; of a narrow float its exact float32 values."""
    dtype = handle.dtype.scalar
    if dtype not in _TORCH:
        return handle.data
    raw = np.require(handle.data, requirements=("C", "W")).view(_bits(dtype))
    return torch.from_numpy(raw).view(_TORCH[dtype]).float().numpy()


def _encode(values: Any, dtype: Any) -> Any:
    """float32 values to the storage of a narrow float, rounded to nearest even, NaN kept."""
    x = torch.from_numpy(np.require(values, np.float32, ("C", "W")))
    if dtype in _LARGEST:
        x = x.clamp(-_LARGEST[dtype], _LARGEST[dtype])
    integer = torch.int16 if dtype == tl.bfloat16 else torch.uint8
    return x.to(_TORCH[dtype]).view(integer).numpy().view(upstream._get_np_dtype(dtype))


def _cast(self: Any, src: Any, dst_type: Any, *_: Any) -> Any:
    dtype = dst_type.scalar
    values = _decode(src)
    if dtype in _TORCH:
        return upstream.TensorHandle(_encode(values, dtype), dtype)
    return upstream.TensorHandle(values.astype(upstream._get_np_dtype(dtype)), dtype)


def _binary(original: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        dtype = lhs.dtype.scalar
        if dtype not in _TORCH:
            return original(self, lhs, rhs, op)
        result = op(_decode(lhs), _decode(rhs))
        if result.dtype == bool:
            return upstream.TensorHandle(result, tl.int1)
        return upstream.TensorHandle(_encode(result, dtype), dtype)

    return binary_op


def _dot(original: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        if d.data.dtype.kind in "iu":
            return original(self, a, b, d, input_precision, max_num_imprecise_acc)
        product = np.matmul(_decode(a).astype(np.float32, copy=False), _decode(b).astype(np.float32, copy=False))
        return upstream.TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    return create_dot


def _quiet(original: Callable[..., Any]) -> Callable[..., Any]:
    """A device overflows to infinity without a word; so does the interpreter, also where warnings are errors."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with np.errstate(all="ignore"):
            return original(self, *args, **kwargs)

    return method


def _scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    """Scalars are arrays of one element there, or of one a program; numpy 2.4 no longer turns either into an int."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(lockstep.agreed(self)))
        scope.set_attr(tensor, "__bool__", lambda self: lockstep.truth(self))
        scope.set_attr(tensor, "T", property(lambda self: tl.trans(self)))

    return patch


def repair() -> None:
    """Patch the interpreter once; calling it again changes nothing."""
    builder = upstream.InterpreterBuilder
    if getattr(builder, "_engram_repaired", False):
        return
    builder.cast_impl = _cast
    builder.create_fp_to_fp = _cast
    builder.binary_op = _binary(builder.binary_op)
    builder.create_dot = _dot(builder.create_dot)
    # Checks of integer overflow whose result is asserted in debug mode only, which this is not: a tenth of the time.
    quick = dataclasses.replace(upstream.interpreter_builder.options, sanitize_overflow=False)
    upstream.interpreter_builder.options = quick
    upstream.GridExecutor.__call__ = _quiet(lockstep.launch(upstream.GridExecutor.__call__))
    upstream._patch_lang = lockstep.patched_once(upstream._patch_lang)
    upstream._patch_lang_tensor = _scalars(upstream._patch_lang_tensor)
    builder._engram_repaired = True
