"""The four calls of the HIP runtime that torch does not offer, and tensors over memory that it did not allocate.

A kernel reads a table in host memory through the *device's* address of it, which need not be the host's; the one that
is given back at the end is the host's. Both stay together in a :class:`Registration`, so that neither is mistaken for
the other. Everything that touches the runtime is here, so that a fake one can stand in for it where there is no card.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from engram_core.errors import TableError

# Usable by every device of the process, and mapped into their address space.
_PORTABLE_AND_MAPPED: Final = 0x1 | 0x2
_MAPS: Final = Path("/proc/self/maps")


class HostRuntime:
    """Registers host memory with the GPU through ``library``, whose functions start with ``prefix``."""

    def __init__(self, library: Any, prefix: str = "hip") -> None:
        self._register = getattr(library, f"{prefix}HostRegister")
        self._unregister = getattr(library, f"{prefix}HostUnregister")
        self._device_pointer = getattr(library, f"{prefix}HostGetDevicePointer")
        self._last_error = getattr(library, f"{prefix}GetLastError")
        self._describe = getattr(library, f"{prefix}GetErrorString")
        self._describe.restype = ctypes.c_char_p

    @classmethod
    def loaded(cls, name: str = "libamdhip64.so", prefix: str = "hip") -> HostRuntime:
        """The very library that torch has loaded: a second copy would know none of its devices."""
        for line in _MAPS.read_text().splitlines():
            path = line.partition("/")[2]
            if Path(path).name.startswith(name):
                return cls(ctypes.CDLL(f"/{path}"), prefix)
        raise TableError(f"placement: tables in host memory need {name}, and this process has not loaded it")

    def register(self, address: int, nbytes: int) -> Registration:
        """Page-lock ``nbytes`` from ``address`` on and map them; raises :class:`TableError` with the runtime's word."""
        self._check(
            self._register(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_uint(_PORTABLE_AND_MAPPED)),
            f"{nbytes} bytes of host memory can't be page-locked",
            "more memory, or in a container --ulimit memlock=-1",
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
            self.unregister(address)
            raise
        return Registration(self, address, nbytes, pointer.value)

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


@dataclass(frozen=True)
class Registration:
    """Registered memory: ``address`` of the host, ``pointer`` of the device."""

    runtime: HostRuntime
    address: int
    nbytes: int
    pointer: int

    def rows(self, width: int, device: torch.device) -> torch.Tensor:
        """The memory as the device sees it: ``[rows, width]`` uint8 on ``device``. It owns nothing."""
        storage = torch._C._construct_storage_from_data_pointer(self.pointer, device, self.nbytes)
        seen = torch.empty(0, dtype=torch.uint8, device=device)
        return seen.set_(storage, 0, (self.nbytes // width, width), (width, 1))

    def close(self) -> None:
        """Wait for kernels that still read it, then give it back."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        self.runtime.unregister(self.address)
