"""The WKV projection (CONTRACT 5)."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Size, Tolerance
from engram_core.info import Capability

_TOKENS = (0, 1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 64, 127, 128, 129, 255)
_FP8 = frozenset({Capability.WKV_MXFP8})
_BF16 = frozenset({Capability.WKV_BF16})


def _case(
    name: str,
    check: str,
    says: str,
    geometry: str = "small",
    core: bool = False,
    size: Size = Size.SMALL,
    needs: frozenset[Capability] = _FP8,
    **params: Any,
) -> Case:
    return Case(f"wkv-{name}", "wkv", check, says, geometry, params, Tolerance.WKV, needs, core=core, size=size)


CASES = (
    *(_case(f"tokens-{t}", "tokens", "Any number of tokens.", tokens=t) for t in _TOKENS),
    *(
        _case(f"real-tokens-{t}", "tokens", "The published shape, 25600 x 6144.", "real", True, Size.REAL, tokens=t)
        for t in _TOKENS
    ),
    *(
        _case(f"long-sum-tokens-{t}", "tokens", "6144 products to a sum: partial sums are float32.", "tall", tokens=t)
        for t in (1, 16, 33)
    ),
    *(
        _case(
            f"geometry-{name}",
            "tokens",
            "Other shapes: computed right, or refused with the limit named.",
            name,
            tokens=9,
        )
        for name in ("tiny", "bigram", "fivegram", "copies-1", "copies-2", "copies-8", "columns-15")
    ),
    _case("scales-by-row", "tokens", "Scales [N, K/32], one row for each output.", tokens=9, scale_rows="n"),
    _case(
        "scales-by-row-real",
        "tokens",
        "Scales [N, K/32] of the published shape.",
        "real",
        True,
        Size.REAL,
        tokens=5,
        scale_rows="n",
    ),
    _case("scales-as-bytes", "tokens", "Scales given as uint8 bytes.", tokens=9, scale_dtype="uint8"),
    _case(
        "width-48",
        "tokens",
        "An output width that is no multiple of 32 takes a scale row for each output.",
        "odd-slices",
        tokens=9,
        scale_rows="n",
    ),
    *(
        _case(f"bf16-tokens-{t}", "tokens", "bf16 weights.", needs=_BF16, tokens=t, weight="bf16")
        for t in (0, 1, 16, 17, 33, 129)
    ),
    _case(
        "bf16-real",
        "tokens",
        "bf16 weights of the published shape.",
        "real",
        False,
        Size.REAL,
        _BF16,
        tokens=17,
        weight="bf16",
    ),
    _case(
        "packed-rows",
        "packed",
        "Rows as they lie in the table.",
        needs=_FP8 | {Capability.PACKED_ROWS},
        tokens=(0, 1, 16, 33),
    ),
    _case(
        "packed-rows-real",
        "packed",
        "Rows as they lie in the table, published shape.",
        "real",
        False,
        Size.REAL,
        _FP8 | {Capability.PACKED_ROWS},
        tokens=(1, 17, 130),
    ),
    _case("zero-rows", "zeros", "Zero rows give zeros, beside rows that are none."),
    _case("tiny-rows", "scaled", "Rows around 1e-35 are not flushed.", center=127 - 116),
    _case("large-rows", "scaled", "Rows around 1e30 don't overflow on the way.", center=127 + 100),
    _case("nan-row", "leak", "A token of NaN leaves every other token as it is.", poison="nan"),
    _case("infinite-row", "leak", "A token of infinities leaves every other token as it is.", poison="inf"),
    _case("row-independence", "independence", "A token alone gives what it gives in a batch, in any order."),
    _case("rows-strided", "strided", "Rows that are a slice of a larger buffer."),
    _case("out-poisoned", "out", "`out` is filled whole, whatever lay there."),
    _case("out-strided", "out", "`out` that is a slice: only its own elements are written.", strided=True),
    _case(
        "reload-kinds",
        "reload_kinds",
        "Loading another kind of weight keeps nothing of the one before.",
        needs=_FP8 | _BF16,
        kinds=(("n/32", "bf16"), ("n", "fp8"), ("n/32", "fp8"), ("n/32", "bf16")),
    ),
    _case("reload", "reload", "Loading again gives the new weights' result, and keeps nothing of the caller's."),
    _case("repeat", "repeat", "The same rows give the same bits every time, between other batches."),
)
