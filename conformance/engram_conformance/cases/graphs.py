"""Streams and device graphs (CONTRACT 7), on devices that have them."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Tolerance
from engram_core.info import Capability

_GRAPH = frozenset({Capability.GRAPH_CAPTURE})


def _case(name: str, check: str, says: str, geometry: str = "small", needs: Any = (), **params: Any) -> Case:
    needs, kind = frozenset(needs), "graph" if needs else "stream"
    return Case(f"{kind}-{name}", "graphs", check, says, geometry, params, Tolerance.LAYER, needs, core=False)


CASES = (
    *(
        _case(
            f"late-inputs-{name}",
            "late_inputs",
            "Inputs that are written late, on the caller's stream, are waited for.",
            name,
            tokens=9,
        )
        for name in ("one", "three")
    ),
    _case("late-inputs-plain", "late_inputs", "The same for a batch that does not run ahead.", tokens=40),
    _case("late-lookup", "late_lookup", "Look-ups that are late are waited for.", "three", tokens=9),
    _case("late-lookup-plain", "late_lookup", "The same for a batch that does not run ahead.", "three", tokens=40),
    _case("own-stream", "own_stream", "Steps on a stream of the caller's.", "three", tokens=9),
    _case("changing-streams", "changing_streams", "Each step on another stream of the caller's.", "three", tokens=9),
    _case(
        "back-to-back",
        "back_to_back",
        "Steps enqueued faster than they run: none reads another's rows.",
        "three",
        tokens=9,
    ),
    _case(
        "no-host-sync", "no_host_sync", "No host synchronisation from start to the end of the step.", "three", tokens=9
    ),
    _case("first-call", "replay", "The capture is the first step after warm-up.", "small", _GRAPH, tokens=9),
    *(
        _case(
            f"replay-{name}",
            "replay",
            "Replays with new ids in the same buffers give the new ids' result.",
            name,
            _GRAPH,
            tokens=9,
            eager_first=True,
        )
        for name in ("one", "three")
    ),
    _case("replay-plain", "replay", "A captured batch that does not run ahead.", "small", _GRAPH, tokens=40),
    _case("skipped-layer", "replay", "A layer that the captured step skips.", "three", _GRAPH, tokens=9, order=(5, 0)),
    _case("skipped-last", "replay", "The last layer is skipped.", "three", _GRAPH, tokens=9, order=(0, 2)),
    _case(
        "deferred",
        "replay",
        "Chains started one by one, one of them for a layer that is skipped, and one never.",
        "three",
        _GRAPH,
        tokens=9,
        order=(0, 5),
        deferred=(0, 5),
    ),
    _case(
        "skipped-last-plain",
        "replay",
        "The last layer of a batch that does not run ahead is skipped.",
        "three",
        _GRAPH,
        tokens=40,
        order=(0, 2),
    ),
    _case(
        "overtaken",
        "overtaken",
        "A captured step whose chains were started, and that one which starts none overtook.",
        "three",
        _GRAPH,
        tokens=(9, 40),
    ),
    _case(
        "skipped-layer-plain",
        "replay",
        "A skipped layer of a batch that does not run ahead: its look-up is joined all the same.",
        "three",
        _GRAPH,
        tokens=40,
        order=(5, 0),
    ),
    _case(
        "no-layer-plain",
        "replay",
        "No layer asked for, of a batch that does not run ahead.",
        "three",
        _GRAPH,
        tokens=40,
        order=(),
    ),
    _case("no-layer", "replay", "A captured step that asks for no layer.", "three", _GRAPH, tokens=9, order=()),
    _case(
        "two-graphs",
        "two_graphs",
        "Graphs of two sizes, replayed in turn, with eager steps between.",
        "three",
        _GRAPH,
        tokens=(4, 16),
    ),
    _case(
        "hot-rows",
        "hot_rows",
        "Hot rows replaced between replays, and reloaded.",
        "small",
        {*_GRAPH, Capability.HOT_ROWS, Capability.PLACEMENT_HOST},
        tokens=9,
    ),
    _case(
        "reloaded-rows",
        "reloaded",
        "Rows reloaded between replays are looked up as they are.",
        "small",
        _GRAPH,
        tokens=9,
    ),
)
