"""What a chain waits for, one wait at a time (CONTRACT 7), on devices that have streams."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Tolerance
from engram_core.info import Capability

_PLACED = {name: Capability[f"PLACEMENT_{name.upper()}"] for name in ("device", "host", "file")}
_AHEAD = (Capability.PREFETCH,)


def _case(name: str, check: str, says: str, geometry: str = "small", needs: Any = (), **params: Any) -> Case:
    params.setdefault("tokens", 9)
    return Case(
        f"stream-{name}", "streams", check, says, geometry, params, Tolerance.LAYER, frozenset(needs), core=False
    )


def _placed(name: str, check: str, says: str, placement: str, **params: Any) -> Case:
    # A batch that doesn't run ahead.
    given: dict[str, Any] = {"tokens": 40, "placement": placement} | params
    return _case(f"{name}-{placement}", check, says, needs=(_PLACED[placement],), **given)


CASES = (
    _case("late-chains", "late_streams", "Chains that are late are waited for.", "three", _AHEAD),
    _case(
        "late-chains-unwaited",
        "late_streams",
        "Late chains give the right result where the engine did not call wait.",
        "three",
        _AHEAD,
        wait=False,
    ),
    _case(
        "late-chains-deferred",
        "late_streams",
        "Chains that were started one by one, and are late, are waited for.",
        "three",
        _AHEAD,
        deferred=True,
    ),
    *(
        _placed(
            "late-copies",
            "late_streams",
            "Rows that another stream than the look-ups' brings late are waited for.",
            placement,
            host_ids=placement == "host",
        )
        for placement in ("host", "file")
    ),
    *(
        _placed(
            "rows-in-use",
            "rows_in_use",
            "A look-up does not overwrite rows that an earlier, late projection still has to read.",
            placement,
            first="prepare",
            host_ids=placement == "host",
        )
        for placement in _PLACED
    ),
    *(
        _placed(
            "rows-under-way",
            "rows_in_use",
            "Rows that were gathered on the host, and wait to be copied, are not those of the next look-up.",
            placement,
            first="delay",
            host_ids=placement == "host",
        )
        for placement in ("host", "file")
    ),
    _case("freed-ids", "freed_ids", "Ids that the caller drops, and whose memory is used again, are read before."),
    *(
        _case(
            f"late-weights{name}",
            "late_weights",
            "Weights that are written late, between the look-up and the start of the chains, are waited for.",
            needs=(*_AHEAD, Capability.WKV_BF16),
            deferred=bool(name),
        )
        for name in ("", "-deferred")
    ),
    *(
        _case(
            f"late-gate{name}",
            "late_gate",
            "A chain does not overwrite the projection that an earlier, late gate still has to read.",
            "three",
            _AHEAD,
            deferred=bool(name),
        )
        for name in ("", "-deferred")
    ),
    _case(
        "next-lookup",
        "next_lookup",
        "A look-up does not overwrite rows that a late chain still has to read.",
        "three",
        _AHEAD,
    ),
    *(
        _placed("reload", "reload", "A step enqueued before a reload gives the old rows.", placement)
        for placement in ("device", "host")
    ),
    _case(
        "hits",
        "hits",
        "Hits of the cache are counted when late look-ups on another stream are done.",
        needs=(Capability.HOT_ROWS, Capability.PLACEMENT_HOST),
        placement="host",
        cache_bytes=1 << 16,
    ),
)
