"""``docs/mutants.md``: which cases catch which fault. It has three parts, each written by a run of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from mutants.model import Mutant
from mutants.order import CHECKED
from mutants.runner import CONTROL, Outcome, Run

_SHOWN = 4
PARTS = {"": "# Wrong backends, and the cases that catch them", "hot": "# Hot rows", "graphs": "# On a GPU"}
"""The heading of each part, by the area that is run for it; "": all of the reference."""

_REFERENCE = """
{count} single-fault mutants of the reference backend, each one line of it (or of the core's definitions that it \
inherits), and every one fails the conformance suite. The unmutated control passes all {cases} of the cases that ran.

Written by `cd tests && python -m mutants --write ../docs/mutants.md`, which runs for each mutant the areas of the \
suite that it belongs to, at size "small", in one process (without the cases that start processes of their own). \
`tests/mutants` holds the mutants as data; `make unit` runs each on the cases named first here, and fails where one of \
them lets it pass.
"""
_HOT = """
{count} faults of what the reference has not, the cache of hot rows in device memory, on the NVIDIA backend in \
Triton's interpreter. `make unit` runs them too. Written by `python -m mutants --area hot --write ../docs/mutants.md`.
"""
_GPU = """
{count} faults of the streams: for every wait, event or note of use in the chain (look-up, copies, projection, gate) a \
mutant without it. Its cases make late what was waited for, by a kernel that runs for long, and what would be read too \
early holds another batch's data; an attempt counts only if the delay outlasts everything that was enqueued.

Run where there is a GPU, which is not in CI (there each mutant is only applied): `cd tests && python -m mutants \
--area graphs --backend nvidia --device cuda --json run.json`. Written from that by `python -m mutants --area graphs \
--from run.json --write ../docs/mutants.md`. {ran}
"""
_NEVER = "The column says what was **not run yet**."
_RAN = "Last run on {date}, on {device} with torch {torch}: the control ran {cases} cases; {caught}."
_ORDER = """
Some guard against what is over in microseconds, or needs a copy that fails, so that no case can show it: a check of \
the order of calls, in `tests/mutants/order.py`, catches these on the CPU (`make unit`).

| mutant | the fault | caught by |
| --- | --- | --- |
"""


def put(text: str, heading: str, mutants: Sequence[Mutant], run: Run | None) -> str:
    """``text`` with that part written anew. Raises :class:`ValueError` for a run that is not as it should be.

    ``run``: None for the part of the GPU, where none was made yet. A GPU is not always at hand to run it again, so of
    that part a run with faults is written too, and says them.
    """
    parts = _parts(text)
    if run is not None and heading != PARTS["graphs"] and (faults := run.faults(mutants)):
        raise ValueError("; ".join(faults))
    if heading == PARTS["graphs"]:
        parts[heading] = _gpu(mutants, run)
    else:
        assert run is not None  # these can always be run
        parts[heading] = _tables(_HOT if heading == PARTS["hot"] else _REFERENCE, mutants, run)
    return "\n".join(f"{title}\n{parts[title]}" for title in PARTS.values() if title in parts)


def _parts(text: str) -> dict[str, str]:
    found = re.split(r"^(# .*)\n", text, flags=re.MULTILINE)
    return {title: body.rstrip("\n") + "\n" for title, body in zip(found[1::2], found[2::2], strict=True)}


def _tables(head: str, mutants: Sequence[Mutant], run: Run) -> str:
    found = {outcome.mutant: outcome for outcome in run.outcomes}
    passed = sum(verdict == "passed" for verdict in found[CONTROL].verdicts.values())
    parts = [head.format(count=len(mutants), cases=passed)]
    for area, members in groupby(sorted(mutants, key=lambda mutant: mutant.area), key=lambda mutant: mutant.area):
        title = f"\n## {area}\n" if head is _REFERENCE else ""
        parts.append(f"{title}\n| mutant | the fault | caught by |\n| --- | --- | --- |\n")
        parts += [f"| `{m.name}` | {_cell(m.says)} | {_caught(m, found[m.name].caught)} |\n" for m in members]
    return "".join(parts)


def _gpu(mutants: Sequence[Mutant], run: Run | None) -> str:
    found = {outcome.mutant: outcome for outcome in run.outcomes} if run else {}
    ran = _NEVER
    if run:
        cases = len(found[CONTROL].verdicts)
        faults = run.faults(mutants)
        caught = "not as it should be: " + "; ".join(faults) if faults else "every mutant fails all of its own"
        ran = _RAN.format(cases=cases, caught=caught, **run.facts)
    parts = [_GPU.format(count=len(mutants), ran=ran)]
    parts.append("\n| mutant | the fault | its cases | on a GPU |\n| --- | --- | --- | --- |\n")
    for m in mutants:
        cases = ", ".join(f"`{case}`" for case in m.cases)
        parts.append(f"| `{m.name}` | {_cell(m.says)} | {cases} | {_verdict(found.get(m.name))} |\n")
    parts.append(_ORDER)
    parts += [f"| `{m.name}` | {_cell(m.says)} | `{check.__name__}` |\n" for m, check in CHECKED]
    return "".join(parts)


def _verdict(outcome: Outcome | None) -> str:
    return "not run yet" if outcome is None else f"caught by {len(outcome.caught)} of {len(outcome.verdicts)}"


def _caught(mutant: Mutant, caught: Sequence[str]) -> str:
    named = [case for case in mutant.cases if case in caught]
    shown = [*named, *(case for case in caught if case not in named)][:_SHOWN]
    more = len(caught) - len(shown)
    return ", ".join(f"`{case}`" for case in shown) + (f" and {more} more" if more else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
