"""The four calls of a vendor's runtime that torch does not offer, and tensors over memory that it did not allocate.

A kernel reads a table in host memory through the *device's* address of it, which need not be the host's; the one that
is given back at the end is the host's. Both stay together in a :class:`Registration`, so that neither is mistaken for
the other. Everything that touches the runtime is here, so that a fake one can stand in for it where there is no card.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engram_core.errors import TableError
from engram_core.table import is_capturing

# Usable by every device of the process, and mapped into their address space.
_PORTABLE_AND_MAPPED: Final = 0x1 | 0x2
_MAPS: Final = Path("/proc/self/maps")


class HostRuntime:
    """Registers host memory with the GPU through ``library``, whose functions start with ``prefix``.

    ``read_only``: the flag for memory that is mapped without the right to write ("shared", of a reader).
    """

    def __init__(self, library: Any, prefix: str, read_only: int) -> None:
        self._register = getattr(library, f"{prefix}HostRegister")
        self._unregister = getattr(library, f"{prefix}HostUnregister")
        self._device_pointer = getattr(library, f"{prefix}HostGetDevicePointer")
        self._last_error = getattr(library, f"{prefix}GetLastError")
        self._describe = getattr(library, f"{prefix}GetErrorString")
        self._describe.restype = ctypes.c_char_p
        self._read_only = read_only

    @classmethod
    def loaded(cls, name: str, prefix: str, read_only: int = 0) -> HostRuntime:
        """The very library that torch has loaded: a second copy would know none of its devices."""
        for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
            path = line.partition("/")[2]
            if Path(path).name.startswith(name):
                return cls(ctypes.CDLL(f"/{path}"), prefix, read_only)
        raise TableError(f"placement: tables in host memory need {name}, and this process has not loaded it")

    def register(self, memory: torch.Tensor, writable: bool = True) -> Registration:
        """Page-lock a dense CPU tensor and map it; raises :class:`TableError` with the runtime's word."""
        address, nbytes = memory.data_ptr(), memory.numel() * memory.element_size()
        flags = _PORTABLE_AND_MAPPED | (0 if writable else self._read_only)
        self._check(
            self._register(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(flags)),
            f"{nbytes} bytes of host memory can't be page-locked",
            "more memory for this machine or container, in a container --ulimit memlock=-1, or placement 'file'",
        )
        pointer = ctypes.c_void_p()
        try:
            self._check(
                self._device_pointer(ctypes.byref(pointer), ctypes.c_void_p(address), ctypes.c_uint(0)),
                f"the device has no address for {nbytes} registered bytes",
                "placement 'device'",
            )
            if not pointer.value:
                raise TableError("placement: the runtime gave no device address for registered host memory")
        except TableError:
            with contextlib.suppress(TableError):  # the first error is the one that tells
                self.unregister(address)
            raise
        return Registration(self, memory, pointer.value)

    def unregister(self, address: int) -> None:
        """Give the memory back, by its host address."""
        self._check(self._unregister(ctypes.c_void_p(address)), "host memory can't be unregistered", "")

    def _check(self, code: int, what: str, fix: str) -> None:
        if code != 0:
            # Left set, the error would make the next launch fail, whatever it is.
            self._last_error()
            said = self._describe(ctypes.c_int(code))
            word = said.decode() if isinstance(said, bytes) else f"error {code}"
            raise TableError(f"placement: {what} ({word})" + (f"; {fix} mends it" if fix else ""))


@dataclass(frozen=True, eq=False)
class Registration:
    """Registered ``memory``, and the device's ``pointer`` to it."""

    runtime: HostRuntime
    memory: torch.Tensor
    pointer: int

    def view(self, device: torch.device) -> torch.Tensor:
        """The memory as the device sees it, a tensor on ``device`` of the same shape and dtype.

        Memory and registration live as long as this tensor or a view of it, in that order: kernels that still read are
        waited for, then the registration is given back, then the memory. The end of the process gives back everything.
        """
        memory = self.memory
        storage = torch._C._construct_storage_from_data_pointer(
            self.pointer, device, memory.numel() * memory.element_size()
        )
        seen = torch.empty(0, dtype=memory.dtype, device=device).set_(storage, 0, memory.shape, memory.stride())
        weakref.finalize(seen.untyped_storage(), self._close, device).atexit = False
        return seen

    def _close(self, device: torch.device) -> None:
        _closing.append((self, device))
        if is_capturing(device):
            return  # to wait would spoil the capture; whichever is closed next closes this one too
        while _closing:
            held, device = _closing[-1]
            # Whether giving memory back waits for kernels that read it is the runtime's own affair, and not documented.
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize(device)
            held.runtime.unregister(held.memory.data_ptr())
            _closing.pop()  # only now: memory whose kernels could not be waited for is kept


_closing: Final[list[tuple[Registration, torch.device]]] = []
