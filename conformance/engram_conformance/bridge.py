"""Between torch tensors and the oracle's arrays: bits cross, values are never converted."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from engram_conformance.oracle.numbers import F64, U8, U16, bf16_to_f64


def bits(x: torch.Tensor) -> U16:
    """bf16 tensor to its bits."""
    if x.dtype != torch.bfloat16:
        raise AssertionError(f"a bf16 tensor is needed; the backend returned {x.dtype}")
    return x.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def values(x: torch.Tensor) -> F64:
    """bf16 tensor to float64."""
    return bf16_to_f64(bits(x))


def bf16(array: U16, device: torch.device | str = "cpu") -> torch.Tensor:
    """Bits to a bf16 tensor of its own memory."""
    return torch.from_numpy(np.array(array, dtype=np.uint16).view(np.int16)).view(torch.bfloat16).to(device)


def tensor(array: Any, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> torch.Tensor:
    """A copy of ``array`` on ``device``."""
    made = torch.from_numpy(np.array(array))
    return made.to(device=device, dtype=dtype if dtype is not None else made.dtype)


def fp8(array: U8, device: torch.device | str = "cpu") -> torch.Tensor:
    """Code bytes to an e4m3fn tensor."""
    return tensor(array, device).view(torch.float8_e4m3fn)


def e8m0(array: U8, device: torch.device | str = "cpu") -> torch.Tensor:
    """Scale bytes to an e8m0 tensor."""
    return tensor(array, device).view(torch.float8_e8m0fnu)


def array(x: torch.Tensor) -> NDArray[Any]:
    """Integers or bytes to NumPy."""
    return x.detach().cpu().numpy()
