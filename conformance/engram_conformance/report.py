"""The report: versioned JSON, checked by pydantic when it is read back."""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError

from engram_conformance.cases.model import Case, Size
from engram_conformance.verdicts import Verdict, number_to_json
from engram_core.backend import EngramBackend
from engram_core.info import API_VERSION, Capability
from engram_core.registry import Decision

SUITE_VERSION = ".".join(map(str, API_VERSION))
_PACKAGES = ("engram-core", "torch", "triton", "flashinfer-python", "numpy", "pytest")


def _infinite(value: Any) -> Any:
    return math.inf if value == "inf" else value


Ratio = Annotated[float, BeforeValidator(_infinite), PlainSerializer(number_to_json)]


class ReportError(ValueError):
    """A file is no report of this suite."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class CaseResult(_Frozen):
    """One case's verdict. ``worst``: largest error over its tolerance; ``equal``: share of bit-equal elements."""

    id: str
    area: str
    capability: str
    core: bool
    says: str
    tolerance: str
    verdict: Verdict
    worst: Ratio | None = None
    equal: float | None = None
    seconds: float = 0.0
    reason: str = ""

    @classmethod
    def of(cls, case: Case, found: dict[str, Any]) -> CaseResult:
        """From what a test report carries."""
        return cls(
            id=case.id,
            area=case.area,
            capability=case.capability,
            core=case.core,
            says=case.says,
            tolerance=str(case.tolerance),
            **{key: found[key] for key in ("verdict", "worst", "equal", "seconds", "reason")},
        )


class Report(_Frozen):
    """One run against one backend on one device."""

    schema_version: Literal[1] = 1
    suite: str
    backend: str
    distribution: str
    distribution_version: str
    api_version: tuple[int, int]
    vendor: str
    capabilities: tuple[str, ...]
    device: str
    device_name: str
    interpreted: bool
    size: str
    platform: str
    python: str
    packages: dict[str, str]
    began: str
    seconds: float
    cases: tuple[CaseResult, ...]

    @classmethod
    def of(
        cls, decision: Decision, backend: EngramBackend, results: Iterable[CaseResult], size: Size, began: float
    ) -> Report:
        """Put a run together."""
        info = backend.info
        return cls(
            suite=SUITE_VERSION,
            backend=info.name,
            distribution=decision.status.distribution,
            distribution_version=decision.status.version,
            api_version=info.api_version,
            vendor=info.vendor,
            capabilities=tuple(str(c) for c in Capability if c in info.capabilities),
            device=str(backend.device),
            device_name=device_name(backend),
            interpreted=decision.interpreted,
            size=str(size),
            platform=platform.platform(),
            python=platform.python_version(),
            packages=_packages(),
            began=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
            seconds=round(time.time() - began, 1),
            cases=tuple(sorted(results, key=lambda result: (result.area, result.id))),
        )

    @property
    def counts(self) -> Counter[Verdict]:
        """Cases by verdict."""
        return Counter(result.verdict for result in self.cases)

    @property
    def executed(self) -> int:
        """Cases that reached a verdict."""
        return len(self.cases) - self.counts[Verdict.NOT_RUN]

    @property
    def passed(self) -> bool:
        """Something was executed, and nothing failed."""
        return self.executed > 0 and not self.counts[Verdict.FAILED]

    @property
    def title(self) -> str:
        """Backend, and that it was interpreted."""
        return f"{self.backend} (interpreted)" if self.interpreted else self.backend

    def summary(self) -> str:
        """One line."""
        counts = self.counts
        refused, expected = counts[Verdict.REFUSED], counts[Verdict.EXPECTED_FAILURE]
        parts = [f"{counts[Verdict.PASSED]} passed"]
        if counts[Verdict.FAILED]:
            parts.append(f"{counts[Verdict.FAILED]} failed")
        if refused:
            parts.append(f"{refused} refusal{'s' * (refused != 1)} verified")
        if expected:
            parts.append(f"{expected} expected failure{'s' * (expected != 1)}")
        if counts[Verdict.NOT_RUN]:
            parts.append(f"{counts[Verdict.NOT_RUN]} not run")
        line = f"engram conformance {self.suite}: {self.title} {', '.join(parts)}"
        return line if self.executed else f"{line}; no case was executed, which proves nothing"


def device_name(backend: EngramBackend) -> str:
    """The device as its maker calls it."""
    device = backend.device
    if device.type == "cpu":
        return _processor()
    module: Any = __import__("torch").get_device_module(device.type)
    named = getattr(module, "get_device_name", None)
    return str(named(device)) if named is not None else str(device)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _packages() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found["torch"] = str(__import__("torch").__version__)  # with the build, which the distribution's version may lack
    return found


def write(report: Report, path: str | Path) -> None:
    """Write it as JSON."""
    Path(path).write_text(report.model_dump_json(indent=1) + "\n", encoding="utf-8")


def read(path: str | Path) -> Report:
    """Read one back. Raises :class:`ReportError` that names the file and the first fault."""
    try:
        return Report.model_validate_json(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror or error}; a report written with --report is needed") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ReportError(f"{path}: {where}: {first['msg']}; a report of this suite is needed") from None
