"""Whether this machine can run the reference: wherever torch can be imported."""

from __future__ import annotations

from engram_core.info import Reason


def probe() -> tuple[Reason, ...]:
    """All reasons against this machine."""
    try:
        import torch  # noqa: F401
    except Exception as exc:  # a damaged install raises OSError and others besides ImportError
        return (Reason("torch-missing", f"torch can't be imported: {type(exc).__name__}: {exc}", "pip install torch"),)
    return ()


def facts() -> dict[str, str]:
    """What the doctor shows."""
    import torch

    return {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
