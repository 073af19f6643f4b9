"""The report as one HTML page without any other file: cards, capability x verdict, every case."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from engram_conformance.report import CaseResult, Report
from engram_conformance.verdicts import Verdict
from engram_core.info import Capability

_LABELS = {
    Verdict.PASSED: "passed",
    Verdict.FAILED: "failed",
    Verdict.REFUSED: "refused",
    Verdict.EXPECTED_FAILURE: "expected failure",
    Verdict.NOT_RUN: "not run",
}
# Where several verdicts meet in one cell, the one that matters most stands first.
_WORST_FIRST = (Verdict.FAILED, Verdict.EXPECTED_FAILURE, Verdict.PASSED, Verdict.REFUSED, Verdict.NOT_RUN)


def write(reports: Sequence[Report], path: str | Path) -> None:
    """One report's page, or the compatibility table of several."""
    Path(path).write_text(page(reports), encoding="utf-8")


def page(reports: Sequence[Report]) -> str:
    """The page as text."""
    one = reports[0] if len(reports) == 1 else None
    title = f"Engram conformance: {one.title}" if one else "Engram conformance: compatibility"
    style = files("engram_conformance").joinpath("page.css").read_text(encoding="utf-8")
    matrix = _verdict_matrix(one) if one else _compatibility(reports)
    body = f"""<h1>{escape(title)}</h1>
<p class="soft">Suite {escape(", ".join(sorted({r.suite for r in reports})))}. Tolerances belong to the cases; a backend
can't widen them. "Refused" is verified: a reason is given, the call raises, and no numbers come back.</p>
<div class="cards">{"".join(_card(report) for report in reports)}</div>
<h2>{"Capabilities and verdicts" if one else "Compatibility"}</h2>
{matrix}
{_attention(reports)}
<h2>All cases</h2>
{_areas(reports)}"""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _badge(verdict: Verdict, text: str | None = None) -> str:
    return f'<span class="verdict {verdict}">{escape(text or _LABELS[verdict])}</span>'


def _counts(counts: Counter[Verdict]) -> str:
    return " ".join(_badge(v, f"{counts[v]} {_LABELS[v]}") for v in _WORST_FIRST if counts[v])


def _card(report: Report) -> str:
    facts = {
        "Device": f"{report.device_name} ({report.device})",
        "Kernels": "Triton's interpreter" if report.interpreted else "compiled or native",
        "Distribution": f"{report.distribution} {report.distribution_version}",
        "Interface": ".".join(map(str, report.api_version)),
        "Python": report.python,
        "Packages": ", ".join(f"{name} {version}" for name, version in report.packages.items()),
        "Platform": report.platform,
        "Cases up to": report.size,
        "Run": f"{report.began.replace('T', ' ').removesuffix('Z')} UTC, {report.seconds:.0f} s",
    }
    rows = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value.strip())
    return f'<section class="card"><h3>{escape(report.title)}</h3>{_counts(report.counts)}<dl>{rows}</dl></section>'


def _rows_by_capability(reports: Iterable[Report]) -> dict[str, str]:
    """Row name to what it means: capabilities in their own order, then the areas that need none."""
    names = {case.capability for report in reports for case in report.cases}
    known = {str(c): c.doc for c in Capability if str(c) in names}
    together = {name: " and ".join(name.split("+")) + " together." for name in sorted(names) if "+" in name}
    areas = {name: "Asked of every backend." for name in sorted(names) if name not in known and "+" not in name}
    return known | together | areas


def _verdict_matrix(report: Report) -> str:
    head = "".join(f'<th class="number">{escape(_LABELS[v])}</th>' for v in Verdict)
    rows = []
    for name, doc in _rows_by_capability([report]).items():
        cases = [case for case in report.cases if case.capability == name]
        counts = Counter(case.verdict for case in cases)
        cells = "".join(
            f'<td class="number">{_badge(v, str(counts[v]))}</td>' if counts[v] else '<td class="number zero">0</td>'
            for v in Verdict
        )
        worst = max((case.worst for case in cases if case.worst is not None), default=None)
        rows.append(
            f'<tr><th scope="row"><code>{escape(name)}</code><br><small class="wide">{escape(doc)}</small></th>{cells}'
            f'<td class="number">{_ratio(worst)}</td>'
            f'<td class="number wide">{sum(case.seconds for case in cases):.1f} s</td></tr>'
        )
    return (
        f'<div class="scroll"><table><thead><tr><th>Capability</th>{head}<th class="number">Worst / tolerance</th>'
        f'<th class="number wide">Time</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _compatibility(reports: Sequence[Report]) -> str:
    head = "".join(f"<th>{escape(r.title)}<br><small>{escape(r.device_name)}</small></th>" for r in reports)
    rows = []
    for name, doc in _rows_by_capability(reports).items():
        cells = []
        for report in reports:
            counts = Counter(case.verdict for case in report.cases if case.capability == name)
            cells.append(f"<td>{_counts(counts) or '<small>no case</small>'}</td>")
        small = f'<br><small class="wide">{escape(doc)}</small>'
        rows.append(f'<tr><th scope="row"><code>{escape(name)}</code>{small}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll"><table><thead><tr><th>Capability</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _attention(reports: Sequence[Report]) -> str:
    """What did not pass, first: failures whole, then what was expected or refused."""
    rows = []
    for verdict in (Verdict.FAILED, Verdict.EXPECTED_FAILURE, Verdict.REFUSED):
        for report in reports:
            which = f"<td>{escape(report.title)}</td>" if len(reports) > 1 else ""
            rows += [
                f'<tr><th scope="row"><code>{escape(case.id)}</code></th>{which}<td>{_badge(verdict)}</td>'
                f'<td class="reason">{escape(case.reason)}</td></tr>'
                for case in report.cases
                if case.verdict == verdict
            ]
    if not rows:
        return ""
    which = "<th>Backend</th>" if len(reports) > 1 else ""
    return (
        '<h2>Not simply passed</h2><div class="scroll"><table class="cases"><thead><tr><th>Case</th>'
        f"{which}<th>Verdict</th><th>Reason</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def _areas(reports: Sequence[Report]) -> str:
    cases = {case.id: case for report in reports for case in report.cases}
    parts = []
    for area in dict.fromkeys(case.area for case in cases.values()):
        here = [case for case in cases.values() if case.area == area]
        counts = Counter(c.verdict for report in reports for c in report.cases if c.area == area)
        found = [{c.id: c for c in report.cases} for report in reports]
        rows = "".join(_case_row(case, [by_id.get(case.id) for by_id in found]) for case in here)
        head = (
            '<th>Verdict</th><th class="number">Worst / tolerance</th><th class="number wide">Equal bits</th>'
            '<th class="number wide">Time</th>'
            if len(reports) == 1
            else "".join(f"<th>{escape(report.title)}</th>" for report in reports)
        )
        parts.append(
            f"<details><summary>{escape(area)} {_counts(counts)}</summary>"
            f'<div class="scroll"><table class="cases"><thead><tr><th>Case</th>{head}<th class="wide">Rule</th></tr>'
            f"</thead><tbody>{rows}</tbody></table></div></details>"
        )
    return "".join(parts)


def _case_row(case: CaseResult, found: list[CaseResult | None]) -> str:
    core = "" if case.core else ' <small class="wide">optional</small>'
    if len(found) == 1:
        equal = "" if case.equal is None else f"{case.equal:.3%}"
        cells = (
            f'<td>{_badge(case.verdict)}</td><td class="number">{_ratio(case.worst)}</td>'
            f'<td class="number wide">{equal}</td><td class="number wide">{case.seconds:.2f} s</td>'
        )
    else:
        cells = "".join(
            "<td><small>no such case</small></td>"
            if result is None
            else f"<td>{_badge(result.verdict)} <small>{_ratio(result.worst)}</small></td>"
            for result in found
        )
    why = f'<br><small class="reason">{escape(case.reason)}</small>' if case.reason and len(found) == 1 else ""
    rule = f"{escape(case.says)}<br><small>{escape(case.tolerance)}</small>{why}"
    return f'<tr><th scope="row"><code>{escape(case.id)}</code>{core}</th>{cells}<td class="wide">{rule}</td></tr>'


def _ratio(worst: float | None) -> str:
    if worst is None:
        return ""
    return "beyond any" if math.isinf(worst) else f"{worst:.3g}"
