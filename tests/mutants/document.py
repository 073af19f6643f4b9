"""``docs/mutants.md``: which cases catch which fault."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from mutants.model import Mutant
from mutants.runner import CONTROL, Outcome

_SHOWN = 4
_HEAD = """# Wrong backends, and the cases that catch them

{count} single-fault mutants of the reference backend, each one line of it (or of the core's definitions that it \
inherits), and every one fails the conformance suite. The unmutated control passes all {cases} of the cases that ran.

Written by `cd tests && python -m mutants --write ../docs/mutants.md`, which runs for each mutant the areas of the \
suite that it belongs to, at size "small", in one process (without the cases that start processes of their own). \
`tests/mutants` holds the mutants as data; `make unit` runs each on the cases named first here, and fails where one of \
them lets it pass.
"""


def render(mutants: Sequence[Mutant], outcomes: Sequence[Outcome]) -> str:
    """The document. Raises :class:`ValueError` where a mutant is not caught or the control fails."""
    found = {outcome.mutant: outcome for outcome in outcomes}
    control = found[CONTROL]
    if control.caught:
        raise ValueError(f"the reference itself fails {control.caught}")
    if free := [mutant.name for mutant in mutants if not found[mutant.name].caught]:
        raise ValueError(f"no case catches {free}")
    passed = sum(verdict == "passed" for verdict in control.verdicts.values())
    parts = [_HEAD.format(count=len(mutants), cases=passed)]
    for area, members in groupby(sorted(mutants, key=lambda mutant: mutant.area), key=lambda mutant: mutant.area):
        parts.append(f"\n## {area}\n\n| mutant | the fault | caught by |\n| --- | --- | --- |\n")
        parts += [f"| `{m.name}` | {_cell(m.says)} | {_caught(m, found[m.name].caught)} |\n" for m in members]
    return "".join(parts)


def _caught(mutant: Mutant, caught: Sequence[str]) -> str:
    named = [case for case in mutant.cases if case in caught]
    shown = [*named, *(case for case in caught if case not in named)][:_SHOWN]
    more = len(caught) - len(shown)
    return ", ".join(f"`{case}`" for case in shown) + (f" and {more} more" if more else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
