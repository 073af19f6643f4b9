"""What a backend says about itself, as frozen data.

Only the standard library is imported here: a plugin module that builds a :class:`BackendInfo` is imported to *list*
backends, and listing must neither load torch nor touch a device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeAlias

API_VERSION: Final[tuple[int, int]] = (1, 0)
"""Version of the backend interface, apart from the package's own version.

A plugin fits when its major equals this one and its minor is not larger.
"""

_NAME = re.compile(r"[a-z][a-z0-9_-]*\Z")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*\Z")


class Capability(StrEnum):
    """The vocabulary in which a backend declares what it does; the conformance suite holds it to every word."""

    doc: str

    def __new__(cls, value: str, doc: str) -> Capability:
        member = str.__new__(cls, value)
        member._value_ = value
        member.doc = doc
        return member

    HASH = "hash", "N-gram hash ids of packed, chunked and speculative batches, bit for bit."
    ROWS = "rows", "Row look-up from packed fp8 rows to bf16, bit for bit."
    WKV_MXFP8 = "wkv_mxfp8", "WKV projection from e4m3fn weights with e8m0 block scales."
    WKV_BF16 = "wkv_bf16", "WKV projection from bf16 weights."
    GATE = "gate", "The gate into the residual streams, with token mask and num_kv_tokens."
    PREFETCH = "prefetch", "The WKV started ahead of the layer that needs it."
    GRAPH_CAPTURE = "graph_capture", "A whole step captured in a device graph and replayed with new ids."
    PLACEMENT_DEVICE = "placement_device", "Tables in the device's own memory."
    PLACEMENT_HOST = "placement_host", "Tables in page-locked host memory."
    PLACEMENT_SHARED = "placement_shared", "One host copy of a table for all processes of a node."
    PLACEMENT_FILE = "placement_file", "Tables in a memory-mapped file."
    TENSOR_PARALLEL = "tensor_parallel", "Tables and WKV sharded over the ranks that hold the same tokens."
    DATA_PARALLEL = "data_parallel", "Tables sharded over ranks that hold different tokens."
    SEQUENCE_PARALLEL = "sequence_parallel", "Each rank keeps its window of the tokens after the look-up."
    PACKED_ROWS = "packed_rows", "The WKV takes rows packed, as they lie in the table."
    HOT_ROWS = "hot_rows", "Frequent rows of a host table cached in device memory."


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something can't run: the value seen and the value needed, and what mends it.

    ``code`` is a stable kebab-case word for programs, ``message`` a sentence for people, ``fix`` the command or change
    that mends it (empty where nothing does).
    """

    code: str
    message: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.message} (fix: {self.fix})" if self.fix else self.message


Support: TypeAlias = tuple[Reason, ...]
"""All reasons against, never only the first; empty means supported."""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One backend, described without loading it.

    ``device_types``: torch device types it runs on ("cuda", "cpu", ...); ``("*",)`` is any.
    ``priority``: auto takes the available backend of highest priority whose ``device_types`` fit.
    ``probe``: ``"module:function"``, a function without arguments that returns the reasons against this machine. It
    must not initialise a device (forked workers die of it). An optional ``facts() -> dict[str, str]`` beside it adds
    lines to ``engram-core doctor``.
    ``factory``: ``"module:Class"``, the :class:`~engram_core.backend.EngramBackend` subclass.
    ``interpretable``: its kernels are Triton's, so that with ``TRITON_INTERPRET=1`` it also takes a CPU device, when
    asked for by name.

    Raises ``TypeError`` or ``ValueError`` with the field's name when a field is malformed.
    """

    name: str
    api_version: tuple[int, int]
    summary: str
    vendor: str
    device_types: tuple[str, ...]
    probe: str
    factory: str
    priority: int = 0
    capabilities: frozenset[Capability] = field(default_factory=frozenset)
    interpretable: bool = False

    def __post_init__(self) -> None:
        for name in ("name", "summary", "vendor", "probe", "factory"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"BackendInfo.{name} is {getattr(self, name)!r}; a string is needed")
        if not _NAME.match(self.name) or self.name == "auto":
            raise ValueError(
                f"BackendInfo.name is {self.name!r}; lower-case letters, digits, '-' and '_' are needed, and not 'auto'"
            )
        version = self.api_version
        if not (isinstance(version, tuple) and len(version) == 2 and all(type(v) is int for v in version)):
            raise TypeError(f"BackendInfo.api_version is {version!r}; a tuple (major, minor) of ints is needed")
        types = self.device_types
        if not (isinstance(types, tuple) and types and all(isinstance(t, str) and t for t in types)):
            raise TypeError(f"BackendInfo.device_types is {types!r}; a non-empty tuple of strings is needed")
        if type(self.priority) is not int:
            raise TypeError(f"BackendInfo.priority is {self.priority!r}; an int is needed")
        for name in ("probe", "factory"):
            if not _TARGET.match(getattr(self, name)):
                raise ValueError(f"BackendInfo.{name} is {getattr(self, name)!r}; 'package.module:name' is needed")
        unknown = [c for c in self.capabilities if not isinstance(c, Capability)]
        if unknown:
            raise TypeError(f"BackendInfo.capabilities holds {unknown!r}; members of Capability are needed")
        object.__setattr__(self, "capabilities", frozenset(self.capabilities))
