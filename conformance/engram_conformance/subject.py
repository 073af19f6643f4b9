"""The backend under test, as a case sees it: makes what the backend makes, and judges what comes back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from engram_conformance import bridge, oracle
from engram_conformance.cases.geometry import Geometry, geometry
from engram_conformance.cases.model import Case
from engram_conformance.data import Model
from engram_conformance.verdicts import Record, RefusedAsDeclared
from engram_core.backend import EngramBackend, GateWeights, TableSpec, Wkv, WkvSpec
from engram_core.errors import EngramError, UnsupportedConfigError
from engram_core.info import Capability
from engram_core.memory import EngramMemory
from engram_core.parallel import Parallel
from engram_core.specs import Problem
from engram_core.table import EngramTable

_PLACEMENTS = ("device", "host", "shared")


@dataclass
class Subject:
    """``backend`` on ``device``, for one ``case``; ``record`` takes what the checks find."""

    backend: EngramBackend
    interpreted: bool
    case: Case
    record: Record

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.backend.device

    @property
    def geometry(self) -> Geometry:
        """The case's."""
        return geometry(self.case.geometry)

    def rng(self) -> np.random.Generator:
        """The case's own random numbers."""
        return np.random.default_rng(self.case.seed)

    def declares(self, *capabilities: Capability) -> bool:
        """Whether the backend says that it does these."""
        return set(capabilities) <= self.backend.info.capabilities

    @property
    def placement(self) -> str:
        """Where cases that don't care put their tables: the first placement that is declared."""
        for placement in _PLACEMENTS:
            if Capability[f"PLACEMENT_{placement.upper()}"] in self.backend.info.capabilities:
                return placement
        raise AssertionError(f"{self.backend.info.name} declares no placement; one of {_PLACEMENTS} is needed")

    # What the backend makes: a refusal ends a case that is not core, once it is shown to be one.

    def memory(
        self, model: Model, parallel: Parallel | None = None, *, load: bool = True, **options: Any
    ) -> EngramMemory:
        """A memory with the model's weights."""
        options.setdefault("placement", self.placement)
        options.setdefault("max_tokens", 64)
        parallel = parallel or Parallel.single()
        problem = Problem(
            model.geometry.config(),
            parallel,
            options["placement"],
            torch.bfloat16,
            options["max_tokens"],
            options.get("cache_bytes", 0),
        )
        with self.refusals(problem):
            memory = EngramMemory(problem.config, model.token_map(), self.backend, parallel=parallel, **options)
        if load:
            memory.load_weights(model.weights(tuple(memory.layers), rows=options["placement"] != "file"))
        return memory

    def table(self, spec: TableSpec) -> EngramTable:
        """A table of zero rows."""
        with self.refusals(None):
            return self.backend.create_table(spec)

    def wkv(self, shape: Geometry, parallel: Parallel | None = None) -> Wkv:
        """A projection without weights."""
        parallel = parallel or Parallel.single()
        with self.refusals(Problem(shape.config(), parallel, self.placement)):
            return self.backend.create_wkv(WkvSpec(shape.k, shape.hidden, shape.copies, parallel))

    @contextlib.contextmanager
    def refusals(self, problem: Problem | None) -> Iterator[None]:
        """What is created inside may be refused, if the case is not core and ``supports`` said so with reasons."""
        declared = () if problem is None else self.backend.supports(problem)
        try:
            yield
        except UnsupportedConfigError as refusal:
            fault = ""
            if not (reasons := refusal.reasons or declared):
                fault = "refused without a reason"
            elif not declared and problem is not None:
                fault = "supports() gave no reason, and creating it raised"
            elif self.case.core:
                fault = "a core case can't be refused"
            if fault:
                raise AssertionError(f"{fault}: {refusal}") from refusal
            raise RefusedAsDeclared("; ".join(str(reason) for reason in reasons)) from None
        assert not declared, f"supports() gave {[str(r) for r in declared]}, and creating it went through"

    # Running and judging.

    def to(self, array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy of an array on the device."""
        return bridge.tensor(array, self.device, dtype)

    def bf16(self, bits: Any) -> torch.Tensor:
        """bf16 bits on the device."""
        return bridge.bf16(bits, self.device)

    def gate_weights(self, q: Any, k: Any, eps: float = 1e-20) -> GateWeights:
        """From bits (uint16) or float32 arrays."""
        q, k = (self.bf16(x) if x.dtype == np.uint16 else self.to(x, torch.float32) for x in (q, k))
        return GateWeights(q, k, eps=eps)

    def poisoned(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Memory that shows what was not written: NaN, or 0xa5 bytes."""
        fill = torch.nan if dtype.is_floating_point else 0xA5
        return torch.full(shape, fill, dtype=dtype, device=self.device)

    def judge(self, check: oracle.Check) -> None:
        """Keep what a comparison found, and fail where it is out of tolerance."""
        self.record.add(check.worst, check.equal)
        assert check.passed, check.message

    def same(self, got: torch.Tensor, want: torch.Tensor, name: str) -> None:
        """Two results of the backend, bit for bit."""
        assert got.dtype == want.dtype, f"{name}: {got.dtype} and {want.dtype}"
        if got.dtype == torch.bfloat16:
            self.judge(oracle.check_bits(bridge.bits(got), bridge.bits(want), name))
        else:
            self.judge(oracle.check_ids(bridge.array(got), bridge.array(want), name))

    @contextlib.contextmanager
    def raises(self, *names: str, out: torch.Tensor | None = None) -> Iterator[None]:
        """An error of the family that names one of the arguments; ``out`` is left as it was."""
        before = None if out is None else out.clone()
        try:
            yield
        except EngramError as error:
            self.record.add(0.0, None)
            text = str(error)
            assert not names or any(name in text for name in names), f"the message names none of {names}: {text}"
        else:
            raise AssertionError(f"nothing was raised; an EngramError that names one of {names} is needed")
        if out is not None and before is not None:
            assert torch.equal(out.view(torch.uint8), before.view(torch.uint8)), "out was written before the refusal"

    def not_run(self, reason: str) -> NoReturn:
        """End the case: this machine lacks what it needs."""
        pytest.skip(reason)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu" and torch.accelerator.is_available():
            torch.accelerator.synchronize(self.device)
