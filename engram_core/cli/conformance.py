"""``engram-core conformance``: judge one backend, or put several reports into one compatibility table."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from engram_core.cli.failure import CliError, bad_input

if TYPE_CHECKING:
    from engram_conformance.runner import Outcome

_STYLES = {"failed": "red", "refused": "blue", "expected-failure": "yellow", "not-run": "dim"}


def conformance(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="The backend; with --merge: report files.")],
    report: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the report as JSON.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write the report as one HTML page.")] = None,
    device: Annotated[
        str | None, typer.Option(help="Torch device, such as cuda:0 (default: the backend's own).")
    ] = None,
    keyword: Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Only cases whose id matches.")] = None,
    size: Annotated[str | None, typer.Option(help="Largest cases: small, real or full.")] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Merge report files into one compatibility table.")] = False,
) -> int:
    """Prove a backend right, with the suite that every backend is judged by; no files are needed."""
    try:
        import pytest  # noqa: F401
        from engram_conformance import runner

        from engram_core.registry import choose
    except ImportError as error:
        raise CliError(f"the suite needs pytest ({error}); fix: pip install 'engram-core[conformance]'") from None
    for path in (report, html):
        if path is not None and not path.absolute().parent.is_dir():
            raise CliError(f"{path}: the folder {path.absolute().parent} does not exist")
    if merge:
        if report is not None or device or keyword or size:
            raise CliError("--merge takes report files and --html, and nothing else")
        return _merge(names, html)
    if len(names) != 1:
        raise CliError(f"one backend is judged at a time; got {', '.join(names)} (to merge reports: --merge)")
    if size is not None and size not in ("small", "real", "full"):
        raise CliError(f"--size {size!r}: small, real or full is needed")
    with bad_input("--device"):
        choose(names[0], device)  # a backend that can't run here is refused with the table of all of them
    outcome = _judge(runner, names[0], device=device, keyword=keyword, size=size)
    found = outcome.report
    if found is None:
        crash = f"; the last case that ended was {outcome.last_case}" if outcome.last_case else ""
        message = _last_words(outcome.output) or f"the suite ended without a report{crash}"
        if outcome.code == runner.CHECK_FAILED:  # a crash: what it wrote is all there is to see
            print(outcome.output[-4000:], file=sys.stderr)
        raise CliError(message, outcome.code)
    from engram_conformance import html as pages
    from engram_conformance import report as reports

    if report is not None:
        reports.write(found, report)
    if html is not None:
        pages.write([found], html)
    if not found.executed and outcome.code == runner.CHECK_FAILED and not found.cases:
        raise CliError(f"-k {keyword!r}: no case matches")
    print(found.summary())
    return outcome.code


def _judge(runner: Any, name: str, **options: Any) -> Outcome:
    """Run it, showing how far it is and each case that did not simply pass."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = (*columns, TextColumn("{task.fields[now]}", style="dim", markup=False))
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"judging {name}", total=None, now="")

        def on_event(event: dict[str, Any]) -> None:
            if "total" in event:
                progress.update(task, total=event["total"])
                return
            progress.update(task, advance=1, now=event["id"])
            verdict = event["verdict"]
            if verdict in ("failed", "expected-failure"):
                reason = " ".join(event["reason"].split())[:600]
                console.print(f"[{_STYLES[verdict]}]{verdict}[/] {event['id']}: ", end="")
                console.print(reason, markup=False, highlight=False)

        outcome: Outcome = runner.run(name, on_event=on_event, **options)
        return outcome


def _last_words(output: str) -> str:
    """What the plugin said when it ended the run: after pytest's own marks."""
    lines = output.splitlines()
    for index, line in enumerate(lines):
        for mark in ("Exit: engram conformance: ", "ERROR: "):
            if mark in line:
                rest = [line.partition(mark)[2], *lines[index + 1 :]]
                return os.linesep.join(rest).strip().rstrip("! ").strip()
    return ""


def _merge(names: list[str], html: Path | None) -> int:
    from engram_conformance import html as pages
    from engram_conformance import report as reports

    try:
        found = [reports.read(name) for name in names]
    except reports.ReportError as error:
        raise CliError(str(error)) from None
    if html is not None:
        pages.write(found, html)
    for one in found:
        print(f"{one.summary()} ({one.device_name}, {one.distribution} {one.distribution_version})")
    return 0
