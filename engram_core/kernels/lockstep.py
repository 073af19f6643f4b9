"""Triton's CPU interpreter with all programs of a launch side by side.

The interpreter's time goes into every operation's own handling, 50 to 100 us each whatever the block's size, and one
program is run after the other. Here the programs along the grid's first axis run in lockstep: every value has a leading
dimension, of one element where all programs agree and of one a program where they differ, so that an operation is done
once for all of them. The kernels and their launches are the ones that a GPU gets.

Programs that part ways (a branch, or the bounds of a loop), and operations that have no form here, end the lockstep:
what the programs had stored is taken back, and they and all after them run one by one, as Triton does it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as upstream

Program = tuple[int, int, int]

# More programs at a time would only push each other's values out of the cache.
_LANES: Final = 256
_handle: Final = upstream.TensorHandle
# Operations of the builder that numpy does element by element, whatever dimension leads.
_ELEMENTWISE: Final = frozenset(
    name
    for line in (
        "add addptr and approx_divf ashr assume bitcast ceil clampf cos erf exp exp2 fabs fadd fdiv floor fma fmul",
        "fneg fp_ext fp_to_fp fp_to_si fp_to_ui fp_trunc frem fsub iabs idiv int_cast int_to_ptr log log2 lshr",
        "maximumf maxnumf maxsi maxui minimumf minnumf minsi minui mul or precise_divf precise_sqrt ptr_to_int rsqrt",
        "sdiv select shl si_to_fp sin sqrt srem sub udiv ui_to_fp umulhi urem xor",
    )
    for name in line.split()
)
# Those of upstream's that are made of others, or that numpy does for any leading dimension.
_KEPT: Final = frozenset({"load", "store", "dot", "get_num_programs"})


class Apart(BaseException):
    """The programs can't go on together. Not an Exception: the interpreter wraps those on their way."""


class Alone(upstream.InterpreterBuilder):  # type: ignore[misc]
    """Triton's own builder on chosen ``programs``: those that could not go in lockstep."""

    def __init__(self, programs: list[Program]) -> None:
        super().__init__()
        self.options = upstream.interpreter_builder.options
        self._programs = programs

    def plan(self, dims: Sequence[int]) -> int:
        """Set the grid's dimensions; how many times the kernel is to be called."""
        self.grid_dim = (*dims, 1, 1)[:3]
        return len(self._programs)

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        """Known from ``plan``: the interpreter's loop counts calls."""

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        self.grid_idx = self._programs[x]

    # A scalar mask spread over a block is made of integers, which the loads of Triton 3.9 refuse.

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return super().create_masked_load(ptrs, _handle(mask.data.astype(bool, copy=False), tl.int1), *rest, **named)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return super().create_masked_store(ptrs, value, _handle(mask.data.astype(bool, copy=False), tl.int1), *rest)


class Lockstep(upstream.InterpreterBuilder):  # type: ignore[misc]
    """The builder whose values have a leading dimension of programs."""

    def __init__(self) -> None:
        super().__init__()
        self.options = upstream.interpreter_builder.options
        self._groups: list[list[Program]] = []
        self._current = 0
        self._stored: list[tuple[Any, Any, Any]] = []

    def plan(self, dims: Sequence[int]) -> int:
        """Set the grid's dimensions; how many times the kernel is to be called."""
        self.grid_dim = nx, ny, nz = (*dims, 1, 1)[:3]
        self._groups = [
            [(x, y, z) for x in range(first, min(first + _LANES, nx))]
            for first in range(0, nx, _LANES)
            for y in range(ny)
            for z in range(nz)
        ]
        return len(self._groups)

    def rest(self) -> list[Program]:
        """Programs of the call that came apart, its stores undone, and of those that were to follow."""
        for ptrs, old, mask in reversed(self._stored):
            upstream._interpreter.store(ptrs, old, mask)
        return [program for group in self._groups[self._current :] for program in group]

    def set_grid_dim(self, nx: int, ny: int, nz: int) -> None:
        """Known from ``plan``: the interpreter's loop counts calls."""

    def set_grid_idx(self, x: int, y: int, z: int) -> None:
        self._current = x
        self._stored.clear()

    def create_get_program_id(self, axis: int) -> Any:
        group = self._groups[self._current]
        ids = sorted({program[axis] for program in group})  # one, but for the axis along which a group lies
        return _handle(np.array(ids, dtype=np.int32), tl.int32)

    # Scalars: what is the same in all programs after all (the tile of tokens, where there is one) is kept once, and
    # with it every block that follows from it.

    def binary_op(self, lhs: Any, rhs: Any, op: Callable[..., Any]) -> Any:
        return _once(super().binary_op(lhs, rhs, op))

    def create_idiv(self, lhs: Any, rhs: Any) -> Any:
        return _once(super().create_idiv(lhs, rhs))

    # Memory.

    def create_masked_load(self, ptrs: Any, mask: Any, other: Any, *_: Any) -> Any:
        dtype = ptrs.get_element_ty()
        kind = upstream._get_np_dtype(dtype)
        default = np.zeros(1, kind) if other is None else other.data
        at, chosen, default = np.broadcast_arrays(ptrs.data, mask.data.astype(bool, copy=False), default)
        return _handle(upstream._interpreter.load(at, chosen, default, kind), dtype)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *_: Any) -> Any:
        at, data, chosen = np.broadcast_arrays(ptrs.data, value.data, mask.data.astype(bool, copy=False))
        old = upstream._interpreter.load(at, chosen, np.zeros_like(data), data.dtype)
        self._stored.append((at, old, chosen))
        return upstream._interpreter.store(at, data, chosen)

    # Shapes.

    def create_make_range(self, ret_ty: Any, start: int, stop: int) -> Any:
        return _handle(np.arange(start, stop, dtype=np.int32)[None], tl.int32)

    def create_splat(self, ret_ty: Any, arg: Any) -> Any:
        data = arg.data.astype(upstream._get_np_dtype(arg.dtype), copy=False)
        shape = tuple(ret_ty.shape)
        data = data.reshape(-1, *(1 for _ in shape))
        return _handle(np.broadcast_to(data, (data.shape[0], *shape)), arg.dtype.scalar)

    def create_unsplat(self, arg: Any) -> Any:
        return _handle(arg.data.reshape(-1), arg.dtype.scalar)

    def create_broadcast(self, arg: Any, shape: Sequence[int]) -> Any:
        return _handle(np.broadcast_to(arg.data, (arg.data.shape[0], *shape)), arg.dtype.scalar)

    def create_expand_dims(self, arg: Any, axis: int) -> Any:
        return _handle(np.expand_dims(arg.data, axis + 1), arg.dtype.scalar)

    def create_reshape(self, arg: Any, shape: Sequence[int], allow_reorder: bool) -> Any:
        return _handle(arg.data.reshape(arg.data.shape[0], *shape), arg.dtype.scalar)

    def create_trans(self, arg: Any, perm: Sequence[int]) -> Any:
        return _handle(np.transpose(arg.data, (0, *(axis + 1 for axis in perm))), arg.dtype.scalar)

    def create_join(self, lhs: Any, rhs: Any) -> Any:
        return _handle(np.stack(np.broadcast_arrays(lhs.data, rhs.data), axis=-1), lhs.dtype.scalar)

    def create_split(self, val: Any) -> Any:
        return _handle(val.data[..., 0], val.dtype.scalar), _handle(val.data[..., 1], val.dtype.scalar)


def _once(handle: Any) -> Any:
    data = handle.data
    return _handle(data[:1], handle.dtype) if data.ndim == 1 and (data == data[0]).all() else handle


def _apart(*_: Any, **__: Any) -> Any:
    raise Apart


for _name in dir(upstream.InterpreterBuilder):
    _what = _name.removeprefix("create_")
    _fits = _what in _ELEMENTWISE | _KEPT or _what.startswith(("icmp", "fcmp")) or _name in vars(Lockstep)
    if _name.startswith("create_") and not _fits:
        setattr(Lockstep, _name, _apart)


class _Reduce(upstream.ReduceOps):  # type: ignore[misc]
    """Sums, minima and maxima; what a kernel combines by a function of its own is done one by one."""

    axis: Any
    generic_reduce = _apart

    def apply_impl(self, tensors: tuple[Any, ...]) -> Any:
        if self.axis is None:
            if self.keep_dims:
                raise Apart
            tensors = tuple(self.to_tensor(x.handle.data.reshape(len(x.handle.data), -1), x.dtype) for x in tensors)
            self.axis = 0
        self.axis = self.axis % len(tensors[0].shape) + 1
        return super().apply_impl(tensors)

    def to_tensor(self, ret: Any, dtype: Any) -> Any:
        data = np.asarray(ret).astype(upstream._get_np_dtype(dtype), copy=False)
        kind = tl.block_type(dtype, list(data.shape[1:])) if data.ndim > 1 else dtype
        return tl.core.tensor(_handle(data, dtype.scalar), kind)


class _Scan(upstream.ScanOps):  # type: ignore[misc]
    apply_impl = _apart


def agreed(tensor: Any) -> Any:
    """The one value of a scalar; raises :class:`Apart` where programs differ."""
    data = np.asarray(tensor.handle.data).reshape(-1)
    if (data != data[0]).any():
        raise Apart
    return data[0]


def truth(tensor: Any) -> bool:
    """``bool(tensor)`` in a kernel; of a block of several elements always True, as upstream has it."""
    if int(tensor.numel) > 1:
        return True
    try:
        return bool(agreed(tensor))
    except Apart:
        # Triton's own code asks in this way whether an argument was given at all.
        if sys._getframe(2).f_globals.get("__name__") == "triton.language.semantic":
            return True
        raise


def launch(original: Callable[..., Any]) -> Callable[..., Any]:
    """``GridExecutor.__call__`` in lockstep, as far as it goes."""

    def call(self: Any, *args: Any, **kwargs: Any) -> None:
        dims = self.grid

        def run(builder: Any, **instead: Any) -> None:
            self.grid = lambda known: (builder.plan(dims(known) if callable(dims) else dims),)
            semantic = TritonSemantic(builder)
            with _replaced(interpreter_builder=builder, interpreter_semantic=semantic, **instead):
                original(self, *args, **kwargs)

        together = Lockstep()
        try:
            run(together, ReduceOps=_Reduce, ScanOps=_Scan)
        except Apart:
            run(Alone(together.rest()))
        finally:
            self.grid = dims

    return call


@contextlib.contextmanager
def _replaced(**names: Any) -> Iterator[None]:
    before = {name: getattr(upstream, name) for name in names}
    vars(upstream).update(names)
    try:
        yield
    finally:
        vars(upstream).update(before)


def patched_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """``_patch_lang``, once for a launch and module: upstream does it again for every call of a device function, at
    0.8 ms, and never takes that back, so that a later launch would find an earlier one's builder.
    """
    open_scopes: list[Any] = []
    seen: set[tuple[int, ...]] = set()

    def patch(fn: Any) -> Any:
        key = tuple(sorted({id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}))
        if open_scopes and key in seen:
            return open_scopes[0]
        seen.add(key)
        scope = original(fn)
        open_scopes.append(scope)
        if len(open_scopes) > 1:
            return scope
        own = scope.restore

        def restore() -> None:
            for inner in reversed(open_scopes[1:]):
                inner.restore()
            own()
            open_scopes.clear()
            seen.clear()

        scope.restore = restore
        return scope

    return patch
