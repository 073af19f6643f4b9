"""``python -m mutants``, in ``tests/``: verdicts of some mutants as JSON, or (``--write``) the table of all of them."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from mutants import document
from mutants.catalogue import ALL, AREAS
from mutants.runner import Outcome, named_cases, run, whole_areas


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--area", choices=AREAS, help="only the mutants of this area")
    parser.add_argument("--json", type=Path, metavar="FILE", help="verdicts of the cases that the table names")
    parser.add_argument(
        "--write", type=Path, metavar="FILE.md", help="run whole areas of the suite and write the table"
    )
    given = parser.parse_args()
    torch.set_num_threads(1)  # the products are small: threads would only wait for each other
    chosen = [mutant for mutant in ALL if given.area in (None, mutant.area)]

    def told(outcome: Outcome) -> None:
        print(
            f"{outcome.mutant}: caught by {len(outcome.caught)} of {len(outcome.verdicts)}", file=sys.stderr, flush=True
        )

    outcomes = run(chosen, whole_areas if given.write else named_cases, told)
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes]), encoding="utf-8")
    if given.write:
        given.write.write_text(document.render(chosen, outcomes), encoding="utf-8")


if __name__ == "__main__":
    main()
