"""Steps (CONTRACT 7): hash, look-up, WKV ahead and gate of all layers, in every order an engine may ask for."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Size, Tolerance
from engram_core.info import Capability


def _case(
    name: str,
    check: str,
    says: str,
    geometry: str = "small",
    core: bool = True,
    size: Size = Size.SMALL,
    needs: Any = (),
    tolerance: Tolerance = Tolerance.LAYER,
    **params: Any,
) -> Case:
    return Case(
        f"step-{name}", "step", check, says, geometry, params, tolerance, frozenset(needs), core=core, size=size
    )


_EXACT = Tolerance.EXACT
_PLACED = (
    Capability.PLACEMENT_DEVICE,
    Capability.PLACEMENT_HOST,
    Capability.PLACEMENT_SHARED,
    Capability.PLACEMENT_FILE,
)

CASES = (
    *(
        _case(
            f"whole-{name}",
            "whole",
            "Every layer of a step against the oracle.",
            name,
            name in ("small", "one", "three"),
        )
        for name in ("small", "one", "three", "tiny", "bigram", "copies-1", "copies-2", "copies-8", "odd-slices")
    ),
    _case(
        "whole-real",
        "whole",
        "The published geometry, with small tables.",
        "real",
        True,
        Size.REAL,
        tokens=3,
        stage=(14,),
    ),
    *(
        _case(f"tokens-{tokens}", "whole", "Batches below, at and above what runs ahead.", tokens=tokens)
        for tokens in (0, 1, 15, 16, 17, 64)
    ),
    _case("dead-tokens", "whole", "The default mask closes the gate of dead tokens.", dead=(0, 3, 4)),
    _case("token-mask", "whole", "A mask of the engine's own.", mask=(1, 2, 8)),
    _case("packed-requests", "packed", "Requests packed in one batch, continued, and padded."),
    _case("chunks", "chunks", "A sequence in chunks gives what it gives whole, within the layer's tolerance."),
    _case("composition", "composition", "A layer is its look-up, its WKV and its gate, bit for bit.", tolerance=_EXACT),
    _case("wait-and-apply", "wait_apply", "`wait` and `apply` apart give what `inject` gives.", tolerance=_EXACT),
    _case("started-by-hand", "by_hand", "`start` and `end` called by the engine.", tolerance=_EXACT),
    _case("other-layers", "other_layers", "A layer without Engram returns what it got.", tolerance=_EXACT),
    _case("no-prefetch", "no_prefetch", "prefetch_rows=0 gives the same bits.", tolerance=_EXACT),
    _case(
        "two-steps",
        "two_steps",
        "A second step starts while the first one's last result is still to be read.",
        "three",
        tolerance=_EXACT,
    ),
    _case(
        "skipped-layer",
        "skipped",
        "What a step's skipped layers left behind is not taken for the next step's.",
        "three",
        order=(2,),
    ),
    _case("overtaken", "overtaken", "A step overtaken by a later one gives an error, never the later one's rows."),
    _case(
        "inputs-reused", "inputs_reused", "Ids, masks and hidden states may be overwritten as soon as a call returns."
    ),
    _case("stale-buffers", "stale", "Smaller batches after larger ones see nothing of them.", "three"),
    _case("reload-wkv", "reload", "WKV weights reloaded within a step: the new result or an error.", what="wkv"),
    _case("reload-table", "reload", "A table reloaded within a step: the new result or an error.", what="table"),
    _case("reload-gate", "reload", "Gate weights reloaded within a step: the new result or an error.", what="gate"),
    *(
        _case(
            f"reload-{what}-inference",
            "reload",
            "Reloaded within a step, all of it under torch.inference_mode: the new result or an error.",
            what=what,
            inference=True,
        )
        for what in ("wkv", "table", "gate")
    ),
    _case("reload-between", "reload_between", "All weights reloaded between steps: the new result."),
    _case(
        "inference-mode",
        "inference",
        "Under torch.inference_mode, made and reloaded there.",
        mode="inference",
        what="table",
    ),
    _case("no-grad", "inference", "Under torch.no_grad.", mode="no-grad", what="table"),
    _case(
        "pipeline-stage",
        "stage",
        "A stage that holds one layer gives what the whole model gives there.",
        tolerance=_EXACT,
    ),
    _case("warmup", "warmup", "Warm-up of the sizes that will run changes no result.", tolerance=_EXACT),
    *(
        _case(
            f"placement-{c.value.removeprefix('placement_')}",
            "placement",
            "The same bits from every placement.",
            core=False,
            needs=(c,),
            placement=c.value.removeprefix("placement_"),
        )
        for c in _PLACED
    ),
    _case(
        "host-batch",
        "host_batch",
        "A table gathered on the CPU takes its ids from the batch's host copy.",
        core=False,
        needs=(Capability.PLACEMENT_FILE,),
    ),
    *(
        _case(
            f"host-ids-{name}",
            "host_ids",
            "Hash ids made on the host ahead of the step.",
            core=False,
            needs=(Capability[f"PLACEMENT_{name.upper()}"],),
            placement=name,
        )
        for name in ("host", "file")
    ),
    _case(
        "hot-rows",
        "placement",
        "Rows from a cache of hot rows, step after step.",
        core=False,
        needs=(Capability.HOT_ROWS, Capability.PLACEMENT_HOST),
        placement="host",
        cache_bytes=1 << 16,
    ),
)
