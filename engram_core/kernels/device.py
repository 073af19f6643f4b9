"""Which device launches run on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside run on ``device``, whichever one is current."""
    return nullcontext() if device.type == "cpu" else torch.cuda.device(device)
