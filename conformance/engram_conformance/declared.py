"""Verifies that what a backend does not declare is refused: a reason, an error of the family, and no numbers."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import pytest
import torch

from engram_conformance import bridge
from engram_conformance.cases.geometry import geometry
from engram_conformance.data import model, random_rows, random_weight
from engram_conformance.ranks import Seat
from engram_conformance.subject import Subject
from engram_core.errors import EngramError
from engram_core.info import Capability
from engram_core.memory import EngramMemory
from engram_core.parallel import Parallel
from engram_core.specs import Problem

_CORE = {Capability.HASH, Capability.ROWS, Capability.GATE}


def verify_refusal(subject: Subject, missing: Collection[Capability]) -> str:
    """Show that each missing capability is refused; returns the reasons that the backend gave."""
    absent = sorted(_CORE & set(missing))
    assert not absent, f"{', '.join(absent)} can't be declared away: every backend does this"
    reasons = []
    for capability in sorted(missing):
        verify = _VERIFIERS.get(capability)
        if verify is None:
            pytest.skip(f"{capability} is not declared, and nothing asks for it by itself")
        reasons.append(verify(subject, capability))
        subject.record.add(0.0, None)
    return "; ".join(reasons)


def _refused(what: str, call: Callable[[], object]) -> str:
    try:
        result = call()
    except EngramError as error:
        return str(error).splitlines()[0]
    raise AssertionError(f"{what} is not declared, and was not refused: {type(result).__name__} came back")


def _problem(subject: Subject, capability: Capability) -> str:
    """What ``supports()`` judges: it gives reasons, and a memory of that kind is not made."""
    config = geometry("small").config()
    seat = Seat(0, 2)
    parallel = {
        Capability.TENSOR_PARALLEL: Parallel(seat),
        Capability.DATA_PARALLEL: Parallel(Seat(0, 1), data=seat),
        Capability.SEQUENCE_PARALLEL: Parallel(seat, sequence=True),
    }.get(capability, Parallel.single())
    placed = capability.value.startswith("placement_")
    placement = capability.value.removeprefix("placement_") if placed else subject.placement
    cache = 0
    if capability is Capability.HOT_ROWS:
        cache, placement = 1 << 20, "host"
    reasons = subject.backend.supports(Problem(config, parallel, placement, torch.bfloat16, 64, cache))
    assert reasons, f"{capability} is not declared, and supports() gives no reason against it"
    assert all(reason.code and reason.message for reason in reasons), f"a reason without a code or message: {reasons}"
    _refused(
        str(capability),
        lambda: EngramMemory(
            config,
            model("small").token_map(),
            subject.backend,
            placement=placement,
            parallel=parallel,
            max_tokens=64,
            cache_bytes=cache,
            table_path="/nonexistent/{layer_id}" if placement == "file" else None,
        ),
    )
    return "; ".join(str(reason) for reason in reasons)


def _weights(subject: Subject, capability: Capability) -> str:
    shape = geometry("small")
    wkv = subject.wkv(shape)
    if capability is Capability.WKV_BF16:
        weight = torch.zeros(shape.n, shape.k, dtype=torch.bfloat16, device=subject.device)
        return _refused(str(capability), lambda: wkv.load(weight))
    codes, scales = random_weight(np.random.default_rng(0), shape.n, shape.k)
    return _refused(
        str(capability), lambda: wkv.load(bridge.fp8(codes, subject.device), bridge.e8m0(scales, subject.device))
    )


def _packed(subject: Subject, capability: Capability) -> str:
    shape = geometry("small")
    wkv = subject.wkv(shape)
    assert not wkv.accepts_packed, f"{capability} is not declared, and Wkv.accepts_packed is True"
    codes, scales = random_weight(np.random.default_rng(0), shape.n, shape.k)
    wkv.load(bridge.fp8(codes, subject.device), bridge.e8m0(scales, subject.device))
    rows = subject.to(random_rows(np.random.default_rng(0), 2 * shape.columns, shape.head_dim))
    return _refused(str(capability), lambda: wkv(rows.view(2, shape.columns, -1)))


def _prefetch(subject: Subject, capability: Capability) -> str:
    memory = subject.memory(model("small"), prefetch_rows=0)
    layers = list(memory.layers.values())
    reasons = [reason for layer in layers for reason in subject.backend.prefetchable(layer)]
    assert reasons, f"{capability} is not declared, and prefetchable() gives no reason against it"
    _refused(str(capability), lambda: subject.backend.prefetch(layers, 16))
    return "; ".join(dict.fromkeys(str(reason) for reason in reasons))


_VERIFIERS: dict[Capability, Callable[[Subject, Capability], str]] = {
    Capability.WKV_MXFP8: _weights,
    Capability.WKV_BF16: _weights,
    Capability.PACKED_ROWS: _packed,
    Capability.PREFETCH: _prefetch,
    **dict.fromkeys(
        (
            Capability.PLACEMENT_DEVICE,
            Capability.PLACEMENT_HOST,
            Capability.PLACEMENT_SHARED,
            Capability.PLACEMENT_FILE,
            Capability.TENSOR_PARALLEL,
            Capability.DATA_PARALLEL,
            Capability.SEQUENCE_PARALLEL,
            Capability.HOT_ROWS,
        ),
        _problem,
    ),
}
