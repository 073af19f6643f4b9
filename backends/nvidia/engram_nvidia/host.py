"""Host memory that a kernel reads over the bus: page-locked in place, at the address that the host has for it.

Registering what was allocated plainly costs its own size, where a page-locked allocation rounds up to a power of two (a
table of 94 GiB would take 128). On every system that CUDA 12 runs on, the device's address of it is the host's.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path
from typing import Any, Final

import torch

from engram_core.errors import TableError

_PORTABLE_AND_MAPPED: Final = 0x1 | 0x2
_MAPS: Final = Path("/proc/self/maps")


class Runtime:
    """The calls of the CUDA runtime that torch does not offer; ``library`` is the very one that torch has loaded."""

    def __init__(self, library: Any) -> None:
        self._library = library
        library.cudaGetErrorString.restype = ctypes.c_char_p

    @classmethod
    def loaded(cls) -> Runtime:
        """Raises :class:`TableError` where the process has no CUDA runtime."""
        for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[2]
            if Path(path).name.startswith("libcudart"):
                return cls(ctypes.CDLL(f"/{path}"))
        raise TableError("placement: tables in host memory need libcudart, and this process has not loaded it")

    def register(self, memory: torch.Tensor) -> None:
        """Page-lock a dense CPU tensor until it dies; raises :class:`TableError` with the runtime's word."""
        if memory.numel() == 0:
            return
        address, nbytes = memory.data_ptr(), memory.numel() * memory.element_size()
        code = self._library.cudaHostRegister(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE_AND_MAPPED)
        )
        if code:
            self._library.cudaGetLastError()  # left set, it would make the next launch fail, whatever that is
            said = self._library.cudaGetErrorString(ctypes.c_int(code))
            word = said.decode() if isinstance(said, bytes) else f"error {code}"
            raise TableError(
                f"placement: {nbytes} bytes of host memory can't be page-locked ({word}); more memory, or in a "
                f"container --ulimit memlock=-1, mends it"
            )
        # The storage, and not the tensor, which may die before its views; at exit the process gives everything back.
        weakref.finalize(memory.untyped_storage(), self._close, address).atexit = False

    def _close(self, address: int) -> None:
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # kernels may still read it
        self._library.cudaHostUnregister(ctypes.c_void_p(address))
        self._library.cudaGetLastError()
