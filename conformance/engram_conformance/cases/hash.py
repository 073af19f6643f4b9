"""Hash ids (CONTRACT 2 and 3): bit for bit what one pass over each whole sequence gives."""

from __future__ import annotations

from typing import Any

from engram_conformance.cases.model import Case
from engram_core.info import Capability

_NEEDS = frozenset({Capability.HASH})


def _case(name: str, check: str, says: str, geometry: str = "small", **params: Any) -> Case:
    return Case(f"hash-{name}", "hash", check, says, geometry, params, needs=_NEEDS)


_WIDTHS = ("tiny", "small", "one", "three", "bigram", "fivegram", "one-head", "real", "wide-ids")

CASES = (
    _case("layout-tiny", "layout", "Primes, offsets and multipliers are those of the golden file.", "tiny"),
    _case("layout-v41", "layout", "The published model's primes, multipliers and row counts.", "v41"),
    *(
        _case(f"layout-{name}", "layout", "Primes never repeat over layers; column order is size major.", name)
        for name in ("one", "three", "fivegram", "wide-ids")
    ),
    _case("golden-tiny", "golden", "The golden ids of a sequence, and with a dead token.", "tiny", file="hash_tiny"),
    *(
        _case(
            f"golden-v41-{name}",
            "golden",
            "Another engine's ids on the real tokenizer.",
            "v41",
            file="hash_deepseek_v41",
            entry=name,
        )
        for name in ("english", "case-and-space", "dead-in-the-middle")
    ),
    _case(
        "golden-lookback-dead",
        "probe",
        "Lookback [7, -1] at position 3.",
        "tiny",
        token=8,
        position=3,
        lookback=(7, -1),
        ids=((3, 15, 29, 49), (11, 31, 62, 113)),
    ),
    _case(
        "golden-lookback-first-dead",
        "probe",
        "Lookback [-1, 6] at position 3: a dead token blocks older ones.",
        "tiny",
        token=8,
        position=3,
        lookback=(-1, 6),
        ids=((7, 22, 30, 58), (14, 26, 82, 100)),
    ),
    _case(
        "golden-id-outside-map",
        "probe",
        "An id outside the map is dead.",
        "tiny",
        token=64,
        position=0,
        lookback=(-1, -1),
        ids=((3, 13, 40, 49), (7, 35, 55, 88)),
    ),
    *(
        _case(f"sequence-{name}", "sequence", "A whole random sequence, through a random token map.", name, tokens=40)
        for name in _WIDTHS
    ),
    *(
        _case(
            f"sequence-of-{tokens}",
            "sequence",
            "Sequences shorter than, as long as and longer than an n-gram.",
            tokens=tokens,
        )
        for tokens in (0, 1, 2, 3, 4, 5, 257, 1000)
    ),
    *(
        _case(
            f"chunks-{name}",
            "chunks",
            "Chunks of every size, with their lookback, give one pass's ids.",
            name,
            tokens=23,
            sizes=(1, 2, 3, 4, 5, 11, 22),
        )
        for name in ("tiny", "small", "bigram", "fivegram")
    ),
    _case("packed", "packed", "Requests packed in one batch never see each other's tokens.", lengths=(5, 1, 9, 2, 3)),
    _case("packed-empty-requests", "packed", "Requests without tokens take no place.", lengths=(0, 4, 0, 0, 1, 7, 0)),
    _case(
        "packed-continued",
        "packed",
        "Requests at any positions, each with its own lookback.",
        lengths=(3, 1, 4, 2),
        before=(7, 1, 0, 3),
    ),
    _case(
        "packed-speculative",
        "packed",
        "Many one- and two-token requests with lookback.",
        lengths=(1, 2) * 12,
        before=tuple(range(24)),
    ),
    _case(
        "packed-padding",
        "packed",
        "Tokens at or past query_start[-1] get -1 in every column.",
        lengths=(5, 2),
        padding=6,
    ),
    _case("packed-only-padding", "packed", "A batch that is padding throughout.", lengths=(0,), padding=9),
    _case("packed-no-requests", "packed", "No requests at all: every token is padding.", lengths=(), padding=3),
    _case(
        "packed-real",
        "packed",
        "The published geometry, packed and continued.",
        "real",
        lengths=(17, 1, 1, 30),
        before=(2, 50, 0, 9),
        padding=3,
    ),
    _case("lookback-known", "lookback", "Known predecessors, as many as an n-gram needs.", kind="known"),
    _case("lookback-unknown", "lookback", "An unknown predecessor blocks all older ones.", kind="unknown"),
    _case("lookback-outside-map", "lookback", "A predecessor outside the map is dead.", kind="outside"),
    _case("lookback-before-start", "lookback", "Entries before position 0 are ignored.", kind="before-start"),
    _case("lookback-none", "lookback", "No lookback given: what precedes the chunk is unknown.", kind="none"),
    *(
        _case(
            f"dead-{name}", "dead", "A dead token at each position in turn blocks all n-grams over it.", name, tokens=9
        )
        for name in ("tiny", "small", "bigram", "fivegram")
    ),
    _case("dead-current", "dead_current", "A dead current token gives the all-pad hash.", tokens=6),
    _case("dead-all", "dead_all", "Every token dead: every row of ids is the all-pad hash.", tokens=6),
    _case(
        "dead-in-requests",
        "dead_packed",
        "Dead tokens of one request block nothing in another.",
        lengths=(4, 3, 5),
        dead=(3, 5, 7),
    ),
    _case("outside-map", "outside", "Ids that are negative, the map's size, or huge are dead; nothing else is read."),
    *(
        _case(f"dtype-{name}", "dtypes", "int32 and int64 inputs give the same ids.", dtypes=kinds)
        for name, kinds in (("int32", ("int32",) * 4), ("int64", ("int64",) * 4), ("mixed", ("int32", "int64") * 2))
    ),
    _case("strided", "strided", "Inputs of any strides are read right."),
    _case("output-int32", "output", "Ids are int32 [T, L, C].", dtype="int32"),
    _case("output-int64", "output", "Ids are int64 where a table has 2**31 rows or more.", "wide-ids", dtype="int64"),
    _case("fresh-empty", "fresh", "The first call of a fresh hasher is an empty batch.", counts=(0, 5, 1)),
    _case(
        "fresh-large-then-small",
        "fresh",
        "Calls of one hasher don't leave anything for the next.",
        counts=(300, 2, 0, 31, 1),
    ),
)
