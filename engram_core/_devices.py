"""Which accelerators this machine shows, without starting one.

A process that has initialised CUDA can't use it in its forked children, and servers fork their workers. So devices are
counted through NVML or AMD SMI, the kernel's topology files and device nodes; never through the CUDA or HIP runtime,
which is what ``torch.cuda.is_available()`` does, and ``torch.cuda.device_count()`` too where NVML gives no answer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from engram_core.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

DEV = Path("/dev")
KFD_TOPOLOGY = Path("/sys/class/kfd/kfd/topology/nodes")

NVIDIA_NODES: Final = ("nvidiactl", "nvidia[0-9]*")
AMD_NODES: Final = ("kfd",)
ASCEND_NODES: Final = ("davinci[0-9]*",)

# Nodes, and the variables that hide the devices behind them: what a user has hidden is not visible.
_FAMILIES: Final = (
    (NVIDIA_NODES, ("CUDA_VISIBLE_DEVICES",)),
    (AMD_NODES, ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")),
    (ASCEND_NODES, ("ASCEND_RT_VISIBLE_DEVICES",)),
)


def nodes(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Device nodes of these patterns, as paths."""
    return tuple(str(path) for pattern in patterns for path in sorted(DEV.glob(pattern)))


def hidden_by(variables: tuple[str, ...]) -> str:
    """``"NAME=value"`` of the first variable that hides all devices; empty where none does."""
    for variable in variables:
        value = os.environ.get(variable)
        if value is not None and value.strip() in ("", "-1", "NoDevFiles"):
            return f"{variable}={value}"
    return ""


def cuda_count() -> int:
    """Devices of torch's "cuda" type (CUDA or HIP), counted without initialising it."""
    import torch

    if not (torch.version.cuda or torch.version.hip):
        return 0
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return torch.cuda.device_count()
    amd = bool(torch.version.hip)
    ask = getattr(torch.cuda, "_device_count_amdsmi" if amd else "_device_count_nvml", None)
    count = -1
    if ask is not None:
        try:
            count = int(ask())
        except Exception:  # a management library that is there and does not work is as good as none
            count = -1
    if count >= 0:
        return count
    return _count_by_nodes(amd)


def _count_by_nodes(amd: bool) -> int:
    if hidden_by(_FAMILIES[1 if amd else 0][1]):
        return 0
    visible = os.environ.get("HIP_VISIBLE_DEVICES" if amd else "CUDA_VISIBLE_DEVICES")
    present = _kfd_gpus() if amd else len(nodes(NVIDIA_NODES[1:]))
    if not present or visible is None:
        return present
    listed = len(visible.split(","))
    # One GPU may be cut into several MIG slices, each of them a device.
    return listed if visible.startswith("MIG-") else min(present, listed)


def _kfd_gpus() -> int:
    # A node of the topology is a GPU when it has SIMD units; the CPUs are nodes too.
    count = 0
    for properties in KFD_TOPOLOGY.glob("*/properties"):
        try:
            fields = dict(line.split(maxsplit=1) for line in properties.read_text().splitlines() if " " in line)
        except OSError:
            continue
        count += int(fields.get("simd_count", "0")) > 0
    return count


def accelerator() -> torch.device | None:
    """The type of accelerator that this build of torch can use here; ``None`` where it sees no device."""
    import torch

    device = torch.accelerator.current_accelerator()
    return device if device is not None and _count(device.type) else None


def first(device_type: str) -> torch.device | None:
    """The type as a device; ``None`` where torch does not know it, or sees none of it."""
    import torch

    try:
        device = torch.device(device_type)
    except RuntimeError:  # a type of a torch extension that is not loaded
        return None
    return device if _count(device_type) != 0 else None


def _count(device_type: str) -> int | None:
    """Devices of a type; ``None`` where torch has no module that could say."""
    import torch

    if device_type == "cuda":
        return cuda_count()
    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        return None
    count = getattr(module, "device_count", None)
    return None if count is None else int(count())


def visible() -> str:
    """What shows an accelerator, in words; empty where nothing does."""
    signs = []
    device = accelerator()
    if device is not None:
        signs.append(f"torch sees {device.type}")
    for patterns, variables in _FAMILIES:
        if not hidden_by(variables):
            signs.extend(nodes(patterns)[:1])
    return ", ".join(signs)


def parse(device: torch.device | str | int | None) -> torch.device | None:
    """The caller's device; raises :class:`InvalidArgumentError` where it names none."""
    if device is None:
        return None
    import torch

    need = "a torch device, such as 'cpu', 'cuda' or 'cuda:1'"
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise InvalidArgumentError("device", repr(device), need)
    try:
        return torch.device(device)
    except RuntimeError as exc:
        raise InvalidArgumentError("device", repr(device), need) from exc


def resolve(device: torch.device) -> torch.device:
    """``device`` with an index; an accelerator without one becomes the process's current device, at first number 0.

    Raises :class:`InvalidArgumentError` where torch sees no such device.
    """
    import torch

    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    count = _count(device.type)
    index = device.index if device.index is not None else _current(device.type)
    if count is not None and index >= count:
        have = f"torch {torch.__version__} sees {count} {device.type} device(s)"
        raise InvalidArgumentError("device", f"{str(device)!r}", f"a device of this machine; {have}")
    return torch.device(device.type, index)


def _current(device_type: str) -> int:
    # Under tensor parallelism each rank has set its own; asking before that would initialise the device.
    import torch

    try:
        module = torch.get_device_module(device_type)
    except RuntimeError:
        return 0
    initialised = getattr(module, "is_initialized", None)
    return int(module.current_device()) if initialised is not None and initialised() else 0
