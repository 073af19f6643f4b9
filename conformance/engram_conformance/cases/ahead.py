"""Chains that run ahead of the layers that need them (CONTRACT 7), where prefetch is declared."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Tolerance
from engram_core.info import Capability


def _case(name: str, check: str, says: str, geometry: str = "three", **params: Any) -> Case:
    needs = frozenset({Capability.PREFETCH})
    return Case(f"step-ahead-{name}", "ahead", check, says, geometry, params, Tolerance.EXACT, needs, core=False)


CASES = (
    *(
        _case(
            f"order-{'-'.join(map(str, order)) or 'none'}",
            "order",
            "Run ahead, a layer gives what it gives alone.",
            order=order,
        )
        for order in ((0, 2, 5), (5, 2, 0), (2, 0, 5), (0, 5), (2,), ())
    ),
    _case("one-layer", "order", "A model of one layer.", "one", order=(3,)),
    *(
        _case(
            f"rows-{tokens}",
            "order",
            "Row counts around the limit of what runs ahead.",
            order=(0, 2, 5),
            tokens=tokens,
        )
        for tokens in (1, 15, 16, 17, 40)
    ),
    _case(
        "twice",
        "twice",
        "Started twice: the second start counts.",
    ),
    _case(
        "join",
        "join",
        "After join nothing was started; a layer then runs plainly.",
    ),
    _case(
        "not-started",
        "not_started",
        "A layer that no start named runs plainly.",
    ),
    _case(
        "refused-argument",
        "refused_argument",
        "A refused argument loses nothing that was started.",
    ),
    *(
        _case(f"limit-{tokens}", "limit", "Up to the limit every layer is started, beyond it none.", tokens=tokens)
        for tokens in (1, 16, 17)
    ),
    _case("deferred", "deferred", "Deferred chains give what the layer gives alone, whichever of them were started."),
    _case("deferred-once", "deferred_once", "A deferred chain is started once, and not after its layer was reached."),
    _case("not-deferred", "not_deferred", "After a start, or a join, no chain is left to be started by itself."),
    _case("deferred-limit", "deferred_limit", "Beyond the limit no deferred chain can be started.", tokens=17),
    *(
        _case(
            f"deferred-step-{name}",
            "deferred_step",
            "Chains started one by one while the decoder goes on.",
            starts=starts,
        )
        for name, starts in (
            ("none", {}),
            ("first", {0: [None, None, None, None]}),
            ("each", {0: [None], 1: [None], 2: [None]}),
            ("named", {0: [5], 1: [2, 0, 1], 2: [5]}),
        )
    ),
    _case("restarted", "restarted", "A second start drops what the first one started."),
)
