"""Bad input (CONTRACT 9): an error of the family that names the argument, before anything is launched or written."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Tolerance
from engram_core.info import Capability


def _case(name: str, check: str, says: str, core: bool = True, needs: Any = (), **params: Any) -> Case:
    needs = frozenset(needs)
    return Case(f"refuse-{name}", "refusals", check, says, "small", params, Tolerance.REFUSAL, needs, core=core)


_GATE = (
    ("hidden-dtype", "hidden_states in float32."),
    ("hidden-float16", "hidden_states in float16."),
    ("hidden-dim", "hidden_states of another width."),
    ("hidden-copies", "hidden_states of another number of copies."),
    ("hidden-flat", "hidden_states [T, H * dim]."),
    ("hidden-device", "hidden_states on another device."),
    ("kv-width", "kv without the value."),
    ("kv-rows", "kv of fewer rows than hidden_states."),
    ("kv-dtype", "kv in float32."),
    ("mask-column", "token_mask [T, 1]."),
    ("mask-short", "token_mask [T - 1]."),
    ("mask-long", "token_mask [T + 1]."),
    ("mask-float", "token_mask in float32."),
    ("mask-bytes", "token_mask in uint8."),
    ("mask-device", "token_mask on another device."),
    ("num-kv-negative", "num_kv_tokens = -1."),
    ("num-kv-large", "num_kv_tokens = T + 1."),
    ("num-kv-float", "num_kv_tokens = 2.0."),
    ("num-kv-tensor", "num_kv_tokens as a tensor on the device: it is a host int."),
    ("out-shape", "out of another shape."),
    ("out-dtype", "out in float32."),
    ("out-in-place", "out = hidden_states: inputs are never written."),
    ("out-overlaps-kv", "out in kv's memory."),
    ("gate-width", "Gate weights of another width."),
)
_WKV = (
    ("rows-dtype", "Rows in float32."),
    ("rows-columns", "Rows of fewer columns."),
    ("rows-flat", "Rows [T, C * D]."),
    ("rows-device", "Rows on another device."),
    ("out-shape", "out of another width."),
    ("out-rows", "out of fewer rows."),
    ("out-dtype", "out in float32."),
    ("weight-shape", "A weight of fewer outputs."),
    ("weight-dtype", "A weight in float32."),
    ("scale-missing", "An fp8 weight without its scale."),
    ("scale-shape", "A scale of another shape."),
    ("scale-dtype", "A scale in float32."),
)
_TABLE = (
    ("ids-float", "hash_ids in float32."),
    ("ids-flat", "hash_ids [T * C]."),
    ("ids-columns", "hash_ids of one column too many."),
    ("ids-device", "hash_ids on another device."),
    ("out-shape", "out of another shape."),
    ("out-dtype", "out in float32."),
    ("load-past-end", "Rows past the table's end."),
    ("load-width", "Rows of another width."),
    ("load-float", "Values in float32."),
)
_STEP = (
    ("batch-type", "A batch that is a list."),
    ("batch-too-large", "More tokens than max_tokens."),
    ("batch-lookback", "A lookback of another width."),
    ("mask-short", "token_mask [T - 1]."),
    ("mask-float", "token_mask in float32."),
    ("before-start", "inject before the step started."),
    ("after-end", "inject after the step ended."),
    ("started-twice", "start of a step that was started."),
    ("hidden-tokens", "hidden_states of fewer tokens than the batch."),
    ("hidden-dtype", "hidden_states in float32."),
)
_MAKE = (
    ("token-map-size", "A token map of another size."),
    ("unknown-layer", "layer_ids that the model does not have."),
    ("unknown-placement", "A placement that there is none of."),
    ("max-tokens", "max_tokens = 0."),
    ("file-without-path", "Placement file without a file."),
    ("table-too-small", "A table of fewer rows than its primes need."),
    ("copies-3", "Three residual copies."),
    ("config-key", "A configuration without one of its engram_* keys."),
    ("not-loaded", "A step before the WKV weights were loaded."),
)

CASES = (
    *(_case(f"gate-{name}", "gate", says, what=name) for name, says in _GATE),
    *(_case(f"wkv-{name}", "wkv", says, False, (Capability.WKV_MXFP8,), what=name) for name, says in _WKV),
    *(_case(f"table-{name}", "table", says, what=name) for name, says in _TABLE),
    *(_case(f"step-{name}", "step", says, what=name) for name, says in _STEP),
    *(_case(f"make-{name}", "make", says, what=name) for name, says in _MAKE),
    _case(
        "file-size",
        "file",
        "A file whose size is not that of its rows.",
        False,
        (Capability.PLACEMENT_FILE,),
        what="size",
    ),
    _case("file-missing", "file", "A file that is not there.", False, (Capability.PLACEMENT_FILE,), what="missing"),
    _case(
        "file-in-capture",
        "capture",
        "A look-up that is not graph-safe, inside a capture.",
        False,
        (Capability.PLACEMENT_FILE, Capability.GRAPH_CAPTURE),
    ),
)
