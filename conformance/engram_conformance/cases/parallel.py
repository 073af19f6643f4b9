"""Ranks (CONTRACT 8): every P gives what one rank gives. All ranks play in one process; a few run as real processes."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Size, Tolerance
from engram_core.info import Capability

_TP, _DP, _SP = (
    frozenset({c})
    for c in (
        Capability.TENSOR_PARALLEL,
        Capability.DATA_PARALLEL,
        Capability.SEQUENCE_PARALLEL,
    )
)


def _case(
    name: str,
    check: str,
    says: str,
    geometry: str = "small",
    size: Size = Size.SMALL,
    needs: frozenset[Capability] = _TP,
    tolerance: Tolerance = Tolerance.LAYER,
    **params: Any,
) -> Case:
    return Case(f"parallel-{name}", "parallel", check, says, geometry, params, tolerance, needs, core=False, size=size)


_BY_ROWS = {("columns-9", 8), ("columns-24", 7)}

CASES = (
    *(
        _case(
            f"rows-{geometry.removeprefix('columns-')}-over-{ranks}",
            "rows",
            "Gathered rows are one rank's, bit for bit" + (": cut by rows." if (geometry, ranks) in _BY_ROWS else "."),
            geometry,
            tolerance=Tolerance.EXACT,
            ranks=ranks,
        )
        for geometry, ranks in (
            ("columns-24", 2),
            ("columns-24", 3),
            ("columns-24", 4),
            ("columns-24", 8),
            ("columns-24", 7),
            ("columns-15", 4),
            ("columns-9", 8),
            ("columns-9", 2),
        )
    ),
    _case(
        "rows-special-values",
        "rows",
        "-0.0 and NaN survive where parts are joined by rows.",
        "columns-9",
        tolerance=Tolerance.EXACT,
        ranks=8,
        special=True,
    ),
    *(
        _case(
            f"tensor-{ranks}", "tensor", "Every layer of a step on every rank.", "columns-24", ranks=ranks, tokens=(5,)
        )
        for ranks in (1, 2, 3, 4, 8)
    ),
    *(
        _case(
            f"tensor-{geometry}-over-{ranks}",
            "tensor",
            "Columns that don't divide, and slices that don't.",
            geometry,
            ranks=ranks,
            tokens=(5,),
        )
        for geometry, ranks in (
            ("columns-15", 4),
            ("columns-9", 8),
            ("columns-24", 7),
            ("odd-slices", 2),
            ("odd-slices", 4),
            ("three", 2),
            ("copies-1", 4),
            ("copies-8", 2),
            ("tall", 2),
        )
    ),
    _case(
        "tensor-tokens",
        "tensor",
        "Batches of several sizes, 0 among them: nothing is left over.",
        ranks=2,
        tokens=(0, 1, 17, 0, 33, 2),
    ),
    _case("tensor-real", "tensor", "The published geometry over four ranks.", "real", Size.REAL, ranks=4, tokens=(2,)),
    _case("tensor-masked", "tensor", "Dead tokens and closed gates.", ranks=2, tokens=(9,), dead=(0, 4), mask=(4, 7)),
    _case(
        "tensor-exchanges",
        "exchanges",
        "All ranks do the same exchanges in the same order, at every batch size.",
        ranks=4,
        tokens=(0, 1, 16, 17),
    ),
    _case(
        "tensor-equal-ranks",
        "equal",
        "All ranks end with the same bits: partial sums are added in rank order.",
        "columns-24",
        tolerance=Tolerance.EXACT,
        ranks=4,
        tokens=(9,),
    ),
    _case(
        "ahead",
        "ahead",
        "With a communicator for it, chains run ahead, and use no other.",
        needs=_TP | {Capability.PREFETCH},
        ranks=2,
        tokens=(9,),
    ),
    _case(
        "ahead-order",
        "ahead",
        "Chains that no layer waits for are exchanged all the same.",
        needs=_TP | {Capability.PREFETCH},
        ranks=2,
        tokens=(9,),
        order=(14,),
    ),
    _case(
        "ahead-deferred",
        "ahead",
        "Chains started one by one are exchanged where they are started, on the communicator for them.",
        needs=_TP | {Capability.PREFETCH},
        ranks=2,
        tokens=(9,),
        deferred=True,
    ),
    _case(
        "ahead-without",
        "no_ahead",
        "Without a communicator for it, a chain that exchanges does not run ahead.",
        needs=_TP | {Capability.PREFETCH},
        ranks=2,
    ),
    _case(
        "file",
        "file",
        "All ranks map one file of the whole table.",
        needs=_TP | {Capability.PLACEMENT_FILE},
        ranks=2,
        tokens=(9,),
    ),
    *(
        _case(
            f"data-{'-'.join(map(str, counts))}",
            "data",
            "Ranks with different tokens share the tables.",
            needs=_DP,
            counts=counts,
        )
        for counts in ((5, 5), (3, 7), (0, 4), (4, 0), (0, 0), (1, 0, 6), (2, 9, 0, 1))
    ),
    _case(
        "data-columns-9-over-8",
        "data",
        "Data-parallel ranks, tables cut by rows.",
        "columns-9",
        needs=_DP,
        counts=(1, 2, 0, 3, 1, 0, 5, 2),
    ),
    _case(
        "data-and-tensor",
        "data",
        "Two tensor ranks in each of two data-parallel ranks.",
        needs=_DP | _TP,
        counts=(4, 1),
        tensor=2,
    ),
    _case(
        "data-slot-missing",
        "slot",
        "Without the common slot the step is refused, on every rank alike.",
        needs=_DP,
        tolerance=Tolerance.REFUSAL,
    ),
    _case(
        "data-and-tensor-columns-24",
        "data",
        "Two tensor ranks in each of two data-parallel ranks, tables cut by columns.",
        "columns-24",
        needs=_DP | _TP,
        counts=(4, 1),
        tensor=2,
    ),
    *(
        _case(
            f"sequence-{tokens}-over-{ranks}",
            "sequence",
            "Each rank keeps its window.",
            needs=_SP,
            ranks=ranks,
            tokens=tokens,
        )
        for tokens, ranks in ((8, 2), (9, 2), (5, 4), (1, 3), (0, 2), (33, 8))
    ),
    _case(
        "sequence-columns-9-over-8",
        "sequence",
        "Windows, tables cut by rows.",
        "columns-9",
        needs=_SP,
        ranks=8,
        tokens=13,
    ),
    _case(
        "sequence-columns-15-over-4",
        "sequence",
        "Windows, and columns that don't divide: padded ones are cut.",
        "columns-15",
        needs=_SP,
        ranks=4,
        tokens=13,
    ),
    _case(
        "sequence-masked",
        "sequence",
        "The whole batch's mask, cut to the window.",
        needs=_SP,
        ranks=2,
        tokens=9,
        dead=(0, 8),
        mask=(1, 5, 8),
    ),
    _case(
        "sequence-slots",
        "sequence",
        "Hidden states padded to the slot: the padding comes out as it went in.",
        needs=_SP,
        ranks=4,
        tokens=6,
        padded=True,
    ),
    *(
        _case(
            f"processes-{ranks}",
            "processes",
            "Real processes, one for each rank.",
            needs=_TP,
            ranks=ranks,
            kind="tensor",
        )
        for ranks in (2, 4)
    ),
    _case(
        "processes-data",
        "processes",
        "Real processes with different tokens, one of them without any.",
        needs=_DP,
        ranks=3,
        kind="data",
    ),
    _case("processes-sequence", "processes", "Real processes with a window each.", needs=_SP, ranks=2, kind="sequence"),
)
