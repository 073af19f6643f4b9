"""The report: what is written is what is read, and the page shows it, in a real browser too."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from engram_conformance import html, report
from engram_conformance.cases import ALL
from engram_conformance.verdicts import Verdict


def make(backend: str = "acme", interpreted: bool = False, shift: int = 0) -> report.Report:
    """A report with every verdict in it."""
    verdicts = [Verdict.PASSED] * 20 + [Verdict.FAILED, Verdict.REFUSED, Verdict.EXPECTED_FAILURE, Verdict.NOT_RUN]
    results = []
    for index, case in enumerate(ALL):
        verdict = verdicts[(index + shift) % len(verdicts)]
        found = {
            "verdict": verdict,
            "worst": {"failed": "inf", "passed": 0.5}.get(verdict),
            "equal": 0.9991 if index % 3 else None,
            "seconds": 0.01,
            "reason": "" if verdict == Verdict.PASSED else f'<script>alert("{case.id}")</script> & so on',
        }
        results.append(report.CaseResult.of(case, found))
    return report.Report(
        suite="1.0",
        backend=backend,
        distribution=f"{backend}-engram",
        distribution_version="0.2",
        api_version=(1, 0),
        vendor="ACME",
        capabilities=("hash",),
        device="cuda:0",
        device_name="ACME 9000",
        interpreted=interpreted,
        size="full",
        platform="Linux",
        python="3.12.1",
        packages={"torch": "2.13.0"},
        began="2026-01-02T03:04:05Z",
        seconds=12.0,
        cases=tuple(results),
    )


def test_written_is_read(tmp_path: Path) -> None:
    written = make()
    report.write(written, tmp_path / "r.json")
    assert report.read(tmp_path / "r.json") == written
    raw = json.loads((tmp_path / "r.json").read_text())  # standard JSON: no Infinity
    assert raw["schema_version"] == 1
    assert {case["worst"] for case in raw["cases"]} == {"inf", 0.5, None}
    assert any(math.isinf(case.worst) for case in written.cases if case.worst is not None)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"extra": 1}, "extra"),
        ({"api_version": "1"}, "api_version"),
        ({"cases": [{"id": "x"}]}, "cases.0"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(json.loads(make().model_dump_json()) | change))
    with pytest.raises(report.ReportError, match=re.escape(says)) as caught:
        report.read(path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match="No such file"):
        report.read(tmp_path / "none.json")
    (tmp_path / "r.json").write_text("hello")
    with pytest.raises(report.ReportError, match="a report of this suite is needed"):
        report.read(tmp_path / "r.json")


def test_summary() -> None:
    counts = make().counts
    text = make(interpreted=True).summary()
    assert text.startswith(f"engram conformance 1.0: acme (interpreted) {counts[Verdict.PASSED]} passed, ")
    assert f"{counts[Verdict.REFUSED]} refusals verified" in text
    nothing = make().model_copy(update={"cases": ()})
    assert not nothing.passed
    assert "no case was executed" in nothing.summary()


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.mark.parametrize("reports", [[make()], [make(), make("other", True, 3)]], ids=["one", "merged"])
def test_page_is_whole_and_self_contained(reports: list[report.Report]) -> None:
    page = _Page()
    page.feed(html.page(reports))
    assert not page.open, f"{page.open} are not closed"
    assert "script" not in {tag for tag, _ in page.tags}, "a reason was not escaped"
    for tag, attributes in page.tags:
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:"), f"<{tag} {name}> leads out of the page"
    text = "".join(page.text)
    for case in ALL:
        assert case.id in text
    assert "ACME 9000" in text
    assert ("acme (interpreted)" in text) == any(r.interpreted and r.backend == "acme" for r in reports)
    if len(reports) > 1:
        assert "other (interpreted)" in text


CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)

_PROBE = """
<script>
addEventListener("load", () => {
  const root = document.documentElement, wide = [...document.querySelectorAll("body *")];
  const ink = getComputedStyle(document.body).color, paper = getComputedStyle(document.body).backgroundColor;
  const out = wide.filter(e => !e.closest(".scroll") && e.getBoundingClientRect().right > innerWidth + 1).length;
  document.title = JSON.stringify({width: innerWidth, over: root.scrollWidth - innerWidth, out, ink, paper,
    rows: document.querySelectorAll("tbody tr").length});
});
</script>
"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [500, 1400])  # headless Chromium makes no narrower window
@pytest.mark.parametrize("merged", [False, True], ids=["one", "merged"])
def test_page_in_chromium(tmp_path: Path, merged: bool, width: int, scheme: str) -> None:
    reports = [make(), make("other", True, 3)] if merged else [make()]
    path = tmp_path / "page.html"
    path.write_text(html.page(reports) + _PROBE, encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000"]
    command += [f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    title = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert title, f"the page did not load: {done.stdout[:500]}{done.stderr[-500:]}"
    seen = json.loads(title.group(1))
    assert seen["width"] == width
    assert seen["over"] <= 0, f"the page is {seen['over']} px wider than the window"
    assert seen["out"] == 0, f"{seen['out']} elements stick out of the window"
    assert seen["rows"] > len(ALL)
    ink, paper = (_brightness(seen[name]) for name in ("ink", "paper"))
    assert (ink > paper) == (scheme == "dark"), f"{scheme}: ink {seen['ink']} on {seen['paper']}"
    assert abs(ink - paper) > 150, "text and paper are too alike"


def _brightness(color: str) -> float:
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3
