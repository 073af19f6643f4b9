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
    if dense_last and value.numel() and value.shape[-1] > 1 and value.stride(-1) != 1:
        raise InvalidArgumentError(
            argument, f"a last dimension of stride {value.stride(-1)}", "a dense last dimension (stride 1)"
        )
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
            raise InvalidArgumentError(
                argument, f"memory that overlaps {name}", "memory of its own (inputs are never written)"
            )


def _extent(x: torch.Tensor) -> tuple[int, int]:
    span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) + 1
    return x.data_ptr(), x.data_ptr() + span * x.element_size()


def check_gate_operands(
    hidden_states: torch.Tensor,
    kv: torch.Tensor,
    hc_mult: int,
    dim: int,
    kv_features: int,
    token_mask: torch.Tensor | None,
    num_kv_tokens: int | None,
    out: torch.Tensor | None,
    device: torch.device,
) -> tuple[torch.Tensor, int]:
    """Check what ``post_wkv`` was given; return the output to fill (a new one where None) and the real tokens."""
    dtypes = (torch.bfloat16,)
    check_tensor("hidden_states", hidden_states, ("T", hc_mult, dim), dtypes, device, dense_last=True)
    tokens = int(hidden_states.shape[0])
    check_tensor("kv", kv, (tokens, kv_features), dtypes, device, dense_last=True)
    if token_mask is not None:
        check_tensor("token_mask", token_mask, (tokens,), (torch.bool,), device)
    if num_kv_tokens is None:
        num_kv_tokens = tokens
    elif isinstance(num_kv_tokens, bool) or not isinstance(num_kv_tokens, int) or not 0 <= num_kv_tokens <= tokens:
        raise InvalidArgumentError("num_kv_tokens", describe(num_kv_tokens), f"an int from 0 to T = {tokens}")
    if out is None:
        return torch.empty((tokens, hc_mult, dim), dtype=hidden_states.dtype, device=device), num_kv_tokens
    check_tensor("out", out, (tokens, hc_mult, dim), dtypes, device, dense_last=True)
    check_disjoint("out", out, hidden_states=hidden_states, kv=kv, token_mask=token_mask)
    return out, num_kv_tokens
