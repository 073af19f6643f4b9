"""``engram-core backends``: every installed backend, what was decided about it, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def backends(as_json: Annotated[bool, typer.Option("--json", help="Print data in place of text.")] = False) -> None:
    """List the installed backends, with every reason against each and what would be chosen now."""
    from engram_core.registry import survey

    report = survey()
    if as_json:
        print(json.dumps(report.to_json(), indent=2))
        return
    print(report.table())
    print(f"chosen: {report.why}" if report.chosen else f"none chosen: {report.why}")
