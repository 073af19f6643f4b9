"""Checks of arguments before anything is launched: shapes, dtypes and devices, never values on a device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engram_core.errors import InvalidArgumentError

INDEX_DTYPES = (torch.int32, torch.int64)


def describe(value: object) -> str:
    """A value as an error names it: a tensor by shape, dtype and device."""
    if isinstance(value, torch.Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')} on {value.device}"
    return f"{value!r} ({type(value).__name__})"


def check_tensor(
    argument: str,
    value: object,
    shape: Sequence[int | str],
    dtypes: Sequence[torch.dtype],
    device: torch.device | None = None,
    dense_last: bool = False,
) -> torch.Tensor:
    """``value`` as a tensor of this shape (a string stands for any size), one of these dtypes, on this device.

    Raises :class:`InvalidArgumentError` with the argument, what came and what is needed.
    """
    names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
    need = f"[{', '.join(str(s) for s in shape)}] {names}" + (f" on {device}" if device is not None else "")
    if not isinstance(value, torch.Tensor):
        raise InvalidArgumentError(argument, describe(value), f"a tensor {need}")
    fits = value.dim() == len(shape) and all(
        isinstance(want, str) or have == want for have, want in zip(value.shape, shape, strict=True)
    )
    if not fits or value.dtype not in dtypes or (device is not None and value.device != device):
        raise InvalidArgumentError(argument, describe(value), need)
    if dense_last and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise InvalidArgumentError(argument, f"a last dimension of stride {value.stride(-1)}", "a dense last dimension (stride 1)")
    return value


def check_disjoint(argument: str, out: torch.Tensor, **inputs: torch.Tensor | None) -> None:
    """Refuse an output that overlaps an input: inputs are never written."""
    if out.numel() == 0:
        return
    begin, end = _extent(out)
    for name, value in inputs.items():
        if value is None or value.numel() == 0 or value.device != out.device:
            continue
        first, last = _extent(value)
        if begin < last and first < end:
            raise InvalidArgumentError(argument, f"memory that overlaps {name}", "memory of its own (inputs are never written)")


def _extent(x: torch.Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + span * x.element_size()
