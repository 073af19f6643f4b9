"""The ROCm backend on a GPU that is none of AMD's, for tests of its kernels alone: what it is, without loading it.

Three backends, the same code told which architecture to take the device for. They are in no distribution: a process
finds them only where the folder that ``on_cuda.py`` makes is on its path, so neither a user nor the automatic choice of
an installed engram-core can reach them.
"""

from __future__ import annotations

from dataclasses import replace

from engram_rocm.plugin import INFO

from engram_core.hookspecs import hookimpl
from engram_core.info import BackendInfo, Reason


def probe() -> tuple[Reason, ...]:
    """None: it is asked for on purpose, on a machine that the ROCm backend's own probe refuses."""
    return ()


class Plugin:
    """What an entry point names: one a form."""

    def __init__(self, name: str, factory: str) -> None:
        self.info = replace(
            INFO,
            name=name,
            summary="A test: the ROCm backend's kernels on another GPU.",
            priority=-100,
            probe=f"{__name__}:probe",
            factory=f"rocm_override_backend:{factory}",
        )

    @hookimpl
    def engram_backend(self) -> BackendInfo:
        return self.info


gfx942 = Plugin("rocm-as-gfx942", "Gfx942")
gfx942_fp8 = Plugin("rocm-as-gfx942-fp8", "Gfx942Fp8")
gfx950 = Plugin("rocm-as-gfx950", "Gfx950")
ENTRIES = {p.info.name: f"{__name__}:{attribute}" for attribute, p in list(globals().items()) if isinstance(p, Plugin)}
