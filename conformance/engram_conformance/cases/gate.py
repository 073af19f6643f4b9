"""The gate (CONTRACT 6), given whole kv: ``post_wkv`` without a ``wkv``."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Size, Tolerance
from engram_core.info import Capability


def _case(
    name: str,
    check: str,
    says: str,
    core: bool = True,
    size: Size = Size.SMALL,
    tolerance: Tolerance = Tolerance.GATE,
    **params: Any,
) -> Case:
    needs = frozenset({Capability.GATE})
    return Case(f"gate-{name}", "gate", check, says, "small", params, tolerance, needs, core=core, size=size)


def _probe(
    name: str, says: str, bits: int, *, h: float, v: float, q: float = 1, key: float = 1, eps: float = 1e-20
) -> Case:
    """dim 4, one copy, every element the same."""
    return _case(name, "probe", says, tolerance=Tolerance.EXACT, h=h, v=v, q=q, key=key, eps=eps, bits=bits)


_DIMS = (4, 48, 96, 1000, 5120)
_COPIES = (1, 2, 4, 8)

CASES = (
    _probe(
        "dot-zero",
        "dot = +0: the sign is positive and the clamp holds; a `sign` rule gives 0.",
        0xB983,
        h=0.5,
        v=-1,
        q=0,
    ),
    _probe("eps-1e-20", "eps 1e-20 survives: h = 2**-12 is normalised.", 0x3F4E, h=2**-12, v=1),
    _probe("eps-1e-6", "eps 1e-6 is felt at h = 2**-12.", 0x3F2A, h=2**-12, v=1, eps=1e-6),
    _probe("all-zero", "All-zero hidden and key: the gate is sigmoid(1e-3).", 0x3F00, h=0, v=1, key=0),
    _probe("dot-plus-2", "dot = +2.", 0x3FE7, h=1, v=1),
    _probe("dot-minus-2", "dot = -2.", 0x3F99, h=1, v=1, key=-1),
    _case(
        "mask-probe",
        "closed_probe",
        "A closed row keeps its bits under a value of 1, NaN, inf and -1.",
        tolerance=Tolerance.EXACT,
    ),
    *(
        _case(
            f"random-dim-{dim}-copies-{copies}",
            "random",
            "Random data, masks and a num_kv_tokens.",
            core=copies == 4 and dim in (5120,),
            dim=dim,
            copies=copies,
            tokens=7,
        )
        for dim in _DIMS
        for copies in _COPIES
    ),
    *(
        _case(
            f"share-dim-{dim}-copies-{copies}",
            "share",
            "At least 1e5 elements, 99.9 % of them bit-equal.",
            core=copies == 4 and dim == 5120,
            size=Size.REAL,
            dim=dim,
            copies=copies,
        )
        for dim, copies in ((48, 4), (96, 8), (1000, 1), (1000, 2), (5120, 1), (5120, 4), (5120, 8))
    ),
    *(
        _case(f"tokens-{tokens}", "random", "Any number of tokens.", dim=128, copies=4, tokens=tokens)
        for tokens in (0, 1, 2, 17, 255, 256, 257)
    ),
    _case("weights-float32", "random", "Gate weights in float32.", dim=128, copies=4, tokens=9, weights="float32"),
    _case("weights-large", "scaled", "Large dots saturate the gate on both sides.", q=40.0),
    _case("weights-small", "scaled", "Dots around the clamp 1e-6, of both signs.", q=3e-6),
    _case("dots-tiny", "scaled", "Dots far below the clamp keep their sign.", q=1e-12),
    _case(
        "hidden-small", "scaled", "Hidden states of 2**-28 are normalised: their square is far above eps.", h=2.0**-28
    ),
    _case("hidden-tiny", "scaled", "Hidden states of 2**-60: their square is far below eps.", h=2.0**-60),
    _case("hidden-large", "scaled", "Hidden states of 2**50.", h=2.0**50),
    _case("key-small", "scaled", "Keys of 2**-28 are normalised: their square is far above eps.", key=2.0**-28),
    _case("key-tiny", "scaled", "Keys of 2**-60: their square is far below eps.", key=2.0**-60),
    _case("key-large", "scaled", "Keys of 2**50.", key=2.0**50),
    _case("value-large", "scaled", "Values of 2**100 beside hidden states of 1.", v=2.0**100),
    _case("value-tiny", "scaled", "Values of 2**-130, subnormal.", v=2.0**-130),
    _case("eps-large", "scaled", "eps 1e-3 under hidden states of the same size.", h=0.03, eps=1e-3),
    _case("cancel", "cancel", "h + gate * value cancels: rounded once, from float32."),
    _case("one-rounding", "ties", "Sums beside a tie of bf16: rounding twice shows."),
    _case("negative-zero", "negative_zero", "-0.0 of closed rows stays -0.0.", tolerance=Tolerance.EXACT),
    *(
        _case(f"mask-{name}", "mask", "Closed rows keep their bits, whatever kv holds there.", kind=name)
        for name in ("all-open", "all-closed", "first", "last", "alternating")
    ),
    *(
        _case(f"num-kv-tokens-{name}", "num_kv", "Rows at or past num_kv_tokens keep their bits.", count=count)
        for name, count in (("0", 0), ("1", 1), ("all-but-1", -1), ("all", None))
    ),
    _case("num-kv-tokens-and-mask", "num_kv", "num_kv_tokens and a mask together.", count=3, mask=True),
    *(
        _case(
            f"nan-{where}",
            "spread",
            "A NaN in a live row reaches the output, and stays where it belongs.",
            where=where,
            poison="nan",
        )
        for where in ("key", "hidden", "value")
    ),
    _case(
        "infinity-value",
        "spread",
        "An infinite value reaches its own element of every copy.",
        where="value",
        poison="inf",
    ),
    _case("overflowing-row", "overflow", "A token whose sums overflow leaves every other token right."),
    *(
        _case(f"strides-{kind}", "strides", "Any strides whose last dimension is dense.", kind=kind)
        for kind in ("hidden-slice", "hidden-transposed", "kv-slice", "out-slice", "hidden-expanded", "weights-slice")
    ),
    _case("strides-not-dense", "not_dense", "A last dimension that is not dense is refused or handled, never misread."),
    _case("out-given", "out", "`out` is filled whole and returned."),
    _case("inputs-unchanged", "unchanged", "Nothing that was passed in is written.", tolerance=Tolerance.EXACT),
    _case("repeat", "repeat", "The same input gives the same bits, between other calls.", tolerance=Tolerance.EXACT),
)
