"""The documents: what they show is run, and what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def test_the_readme_example_runs() -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(example.splitlines()) <= 20
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "reference (4, 4, 5120)\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    named = re.findall(r"`((?:engram_core|backends|conformance|docs|examples|benchmarks|tests|\.ci)/[\w./-]+)`", text)
    for name in links:
        assert (document.parent / name).exists(), f"{document.name} links to {name}"
    for name in named:
        assert (ROOT / name).exists(), f"{document.name} names {name}"
