"""The one pluggy hook. pluggy finds backends; the object that ``BackendInfo.factory`` names does the work."""

from __future__ import annotations

import pluggy

from engram_core.info import BackendInfo

PROJECT = "engram_core"
ENTRY_POINT_GROUP = "engram_core.backends"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def engram_backend() -> BackendInfo:  # type: ignore[empty-body]
    """Describe one backend. Must not import torch or a vendor SDK, touch a device or read the environment."""
