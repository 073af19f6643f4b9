"""Rows (CONTRACT 4): bit for bit, on every placement, and +0.0 for every id that names no row here."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case, Size
from engram_core.info import Capability


def _case(
    name: str, check: str, says: str, core: bool = True, size: Size = Size.SMALL, needs: Any = (), **p: Any
) -> Case:
    return Case(
        f"rows-{name}",
        "rows",
        check,
        says,
        "small",
        p,
        needs=frozenset({Capability.ROWS, *needs}),
        core=core,
        size=size,
    )


_PLACED = {name: Capability[f"PLACEMENT_{name.upper()}"] for name in ("device", "host", "shared", "file")}

CASES = (
    _case("all-codes-all-scales", "codes", "All 256 codes under all 256 scale bytes."),
    _case("scales-by-block", "blocks", "Each 32 values have their own scale byte.", head_dim=256),
    _case(
        "code-one",
        "probe",
        "Code 0x38 under scale bytes 0, 1, 126, 127, 128, 130, 254, 255.",
        code=0x38,
        scales=(0, 1, 126, 127, 128, 130, 254, 255),
        bits=(0x0040, 0x0080, 0x3F00, 0x3F80, 0x4000, 0x4100, 0x7F00, 0x7FC0),
    ),
    _case("code-negative-zero", "probe", "Code 0x80 is -0.0.", code=0x80, scales=(127,) * 8, bits=(0x8000,) * 8),
    _case(
        "code-nan", "probe", "Code 0x7f is NaN, and not 480 or 448.", code=0x7F, scales=(127,) * 8, bits=(0x7FC0,) * 8
    ),
    *(
        _case(f"tokens-{tokens}", "tokens", "Any number of tokens.", tokens=tokens)
        for tokens in (0, 1, 2, 17, 511, 512, 513, 1025)
    ),
    *(
        _case(f"head-dim-{dim}", "tokens", "Rows of other widths.", core=False, tokens=9, head_dim=dim)
        for dim in (32, 96, 128, 512)
    ),
    _case("head-dim-256", "tokens", "Rows of the published width.", tokens=33, head_dim=256),
    _case("negative", "nowhere", "Negative ids give +0.0.", ids=(-1, -2, -(2**31))),
    _case("too-large", "nowhere", "Ids at or past the table's end give +0.0.", ids=("rows", "rows+1", 2**31 - 1)),
    _case(
        "too-large-int64",
        "nowhere",
        "Ids beyond 32 bits give +0.0, and don't wrap.",
        wide=True,
        ids=(2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1, -(2**63), -(2**32) + 1),
    ),
    _case("ids-int64", "tokens", "int64 ids of ordinary rows.", tokens=9, wide=True),
    _case("ids-column-slice", "slices", "Ids that are one layer's slice of [T, L, C].", kind="layer"),
    _case("ids-transposed", "slices", "Ids that lie column by column.", kind="transposed"),
    _case("ids-every-other-token", "slices", "Ids of every other token.", kind="step"),
    _case("out-poisoned", "out", "`out` is filled whole, whatever lay there, and returned."),
    _case("out-strided", "out", "`out` with strides of its own: only its own elements are written.", strided=True),
    _case("larger-than-heads", "tokens", "A table with rows past its last head.", tokens=9, spare=37),
    *(
        _case(
            f"shard-{columns}-over-{ranks}",
            "shard",
            "Each rank's columns, and zero rows in the padding.",
            core=False,
            needs=(Capability.TENSOR_PARALLEL,),
            columns=columns,
            ranks=ranks,
        )
        for columns, ranks in ((24, 2), (24, 3), (24, 4), (24, 8), (15, 4), (24, 7), (9, 8), (24, 16))
    ),
    _case(
        "shard-spare",
        "shard",
        "Rows past the last head are the last rank's.",
        core=False,
        needs=(Capability.TENSOR_PARALLEL,),
        columns=24,
        ranks=4,
        spare=37,
    ),
    *(
        _case(
            f"placement-{name}",
            "tokens",
            "The same bits from every placement.",
            core=False,
            needs=(needed,),
            tokens=37,
            placement=name,
        )
        for name, needed in _PLACED.items()
    ),
    _case(
        "load-bytes", "load", "Loading copies scale bytes, never values, in pieces, and through views.", kind="pieces"
    ),
    _case("load-typed", "load", "Codes as e4m3fn, scales as e8m0.", kind="typed"),
    _case("load-again", "load", "A reloaded row is looked up as it is now.", kind="again"),
    _case(
        "beyond-2-33-bytes",
        "sparse",
        "The last row of the published table, at byte 101,380,403,784 of a sparse file.",
        core=False,
        needs=(_PLACED["file"],),
        rows=384_016_682,
    ),
    *(
        _case(
            f"many-{name}",
            "tokens",
            f"Many tokens in placement {name}, with and without their ids in CPU memory.",
            core=False,
            size=Size.REAL,
            needs=(_PLACED[name],),
            tokens=2100,
            placement=name,
            host_ids=True,
        )
        for name in _PLACED
    ),
    *(
        _case(
            name,
            "hot_rows",
            says,
            core=False,
            needs=(Capability.HOT_ROWS, _PLACED["host"]),
            tokens=37,
            placement="host",
            **params,
        )
        for name, says, params in (
            ("hot-rows", "Rows from a cache, replaced and reloaded: bits as without it, and hits counted.", {}),
            ("hot-rows-few", "A cache of fewer rows than are wanted keeps the first of them.", {"wanted": 1 << 10}),
            ("hot-rows-shard", "A cache of one rank's rows.", {"rank": (1, 3)}),
        )
    ),
)
