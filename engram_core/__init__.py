"""engram-core: the DeepSeek-V4.1 Engram layer on any accelerator.

Names are resolved on first use, so that ``import engram_core`` loads neither torch nor pydantic: a process that only
lists backends, or a plugin module that describes one, pays for neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from engram_core._version import __version__

if TYPE_CHECKING:
    from engram_core.backend import (
        EngramBackend as EngramBackend,
    )
    from engram_core.backend import (
        GateWeights as GateWeights,
    )
    from engram_core.backend import (
        Prefetch as Prefetch,
    )
    from engram_core.backend import (
        Problem as Problem,
    )
    from engram_core.backend import (
        TableSpec as TableSpec,
    )
    from engram_core.backend import (
        Wkv as Wkv,
    )
    from engram_core.backend import (
        WkvSpec as WkvSpec,
    )
    from engram_core.config import EngramConfig as EngramConfig
    from engram_core.errors import EngramError as EngramError
    from engram_core.hashing import NgramHasher as NgramHasher
    from engram_core.hashing import TokenBatch as TokenBatch
    from engram_core.hookspecs import hookimpl as hookimpl
    from engram_core.hot import HotRows as HotRows
    from engram_core.info import (
        API_VERSION as API_VERSION,
    )
    from engram_core.info import (
        BackendInfo as BackendInfo,
    )
    from engram_core.info import (
        Capability as Capability,
    )
    from engram_core.info import (
        Reason as Reason,
    )
    from engram_core.layer import Engram as Engram
    from engram_core.layout import HashLayout as HashLayout
    from engram_core.memory import EngramMemory as EngramMemory
    from engram_core.parallel import (
        Collectives as Collectives,
    )
    from engram_core.parallel import (
        Parallel as Parallel,
    )
    from engram_core.parallel import (
        TorchCollectives as TorchCollectives,
    )
    from engram_core.registry import (
        get_backend as get_backend,
    )
    from engram_core.registry import (
        list_backends as list_backends,
    )
    from engram_core.registry import (
        use_backend as use_backend,
    )
    from engram_core.step import EngramStep as EngramStep
    from engram_core.table import EngramTable as EngramTable
    from engram_core.tokens import TokenMap as TokenMap

_HOME = {
    "API_VERSION": "info",
    "BackendInfo": "info",
    "Capability": "info",
    "Collectives": "parallel",
    "Engram": "layer",
    "EngramBackend": "backend",
    "EngramConfig": "config",
    "EngramError": "errors",
    "EngramMemory": "memory",
    "EngramStep": "step",
    "EngramTable": "table",
    "GateWeights": "backend",
    "HashLayout": "layout",
    "HotRows": "hot",
    "NgramHasher": "hashing",
    "Parallel": "parallel",
    "Prefetch": "backend",
    "Problem": "backend",
    "Reason": "info",
    "TableSpec": "backend",
    "TokenBatch": "hashing",
    "TokenMap": "tokens",
    "TorchCollectives": "parallel",
    "Wkv": "backend",
    "WkvSpec": "backend",
    "get_backend": "registry",
    "hookimpl": "hookspecs",
    "list_backends": "registry",
    "use_backend": "registry",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
