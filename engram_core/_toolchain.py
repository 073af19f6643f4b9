"""What Triton backends need besides a device: a torch build, Triton itself, and a C compiler for its launchers.

Shared by the probes of the vendors. Nothing here imports Triton: its version is read from its source file, since ROCm's
build comes under other distribution names.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from engram_core.info import Reason

TRITON_NEEDED: Final = (3, 4)
GET_TORCH: Final = "https://pytorch.org/get-started/locally"

_DOTTED = ".".join(map(str, TRITON_NEEDED))
_VERSION = re.compile(r"^__version__\s*=\s*['\"](\d+)\.(\d+)([^'\"]*)['\"]", re.MULTILINE)


def torch_build() -> tuple[str, str | None, str | None]:
    """torch's version, its CUDA version and its HIP version."""
    import torch

    return str(torch.__version__), torch.version.cuda, torch.version.hip


def triton_version() -> str | None:
    """Version of the Triton that would be imported; ``None`` where there is none."""
    try:
        spec = find_spec("triton")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:  # a mere folder named "triton" on the path has no origin
        return None
    found = _VERSION.search(Path(spec.origin).read_text(encoding="utf-8", errors="replace"))
    return "".join((found[1], ".", found[2], found[3])) if found else "unknown"


def triton_reasons(install: str) -> tuple[Reason, ...]:
    """Against the installed Triton; ``install``: the command that brings the right one."""
    version = triton_version()
    if version is None:
        where = "" if sys.platform == "linux" else f"; on {sys.platform} there are no official wheels, Linux has them"
        return (Reason("triton-missing", f"triton is not installed; triton >= {_DOTTED} is needed{where}", install),)
    digits = tuple(int(n) for n in version.split(".")[:2]) if version != "unknown" else TRITON_NEEDED
    if digits < TRITON_NEEDED:
        return (Reason("triton-version", f"triton {version} is too old; triton >= {_DOTTED} is needed", install),)
    return ()


def compiler() -> str | None:
    """The C compiler that Triton would take: ``$CC``, else gcc, else clang."""
    chosen = os.environ.get("CC")
    if chosen is None:
        return shutil.which("gcc") or shutil.which("clang")
    words = shlex.split(chosen)
    return shutil.which(words[0]) if words else None


def python_header() -> Path:
    """Python.h where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a local folder without headers; Triton takes the plain one there.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme=scheme)["include"]) / "Python.h"


def compiler_reasons() -> tuple[Reason, ...]:
    """Against building Triton's launchers, which it does with the system's C compiler on first use."""
    reasons: list[Reason] = []
    if compiler() is None:
        named = f"CC={os.environ['CC']} is no command" if "CC" in os.environ else "neither gcc nor clang is on the PATH"
        fix = "apt-get install gcc libc6-dev, or CC=/path/to/cc"
        reasons.append(Reason("no-compiler", f"{named}; a C compiler is needed for Triton's launchers", fix))
    header = python_header()
    if not header.exists():
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        message = f"{header} is missing; Python's headers are needed for Triton's launchers"
        reasons.append(Reason("no-python-header", message, f"apt-get install python{version}-dev"))
    return tuple(reasons)


def facts() -> dict[str, str]:
    """The same, for the doctor."""
    header = python_header()
    return {
        "triton": triton_version() or "not installed",
        "C compiler": compiler() or "none",
        "Python.h": str(header) if header.exists() else f"missing: {header}",
    }
