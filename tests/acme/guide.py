"""docs/backend-authors.md as data: the files that it shows, and the names that it promises.

``python tests/acme/guide.py`` puts the files of ``examples/acme-engram`` into the guide again, after they changed.
"""

from __future__ import annotations

import re
from pathlib import Path

from fresh import ACME, ROOT

GUIDE = ROOT / "docs" / "backend-authors.md"

# "### `path`", perhaps a paragraph, and the file in a fence of three or (where the file has fences itself) four ticks.
_FILE = re.compile(
    r"^(?P<head>### `(?P<path>[\w./-]+)`\n\n(?:[^`\n#][^\n]*\n+)*)"
    r"(?P<fence>`{3,})(?P<language>\w+)\n(?P<body>.*?)^(?P=fence)\n",
    re.M | re.S,
)
_BUILT = re.compile(r"(^|/)(\.|__pycache__/|dist/|build/)")
_NAMES = re.compile(r"^```names\n(.*?)^```\n", re.M | re.S)


def shown(text: str) -> dict[str, str]:
    """Path to content, of every file that the guide shows."""
    return {match["path"]: match["body"] for match in _FILE.finditer(text)}


def files() -> dict[str, str]:
    """The same of every file of acme that is not made by a tool; empty ones are only told of."""
    return {
        str(path.relative_to(ACME)): path.read_text(encoding="utf-8")
        for path in sorted(ACME.rglob("*"))
        if path.is_file() and path.stat().st_size and not _BUILT.search(str(path.relative_to(ACME)))
    }


def promised(text: str) -> dict[str, tuple[str, ...]]:
    """Module to the names that a backend may import from it."""
    found: dict[str, tuple[str, ...]] = {}
    for block in _NAMES.findall(text):
        for line in block.splitlines():
            module, _, names = line.partition(":")
            found[module.strip()] = tuple(name.strip() for name in names.split(",") if name.strip())
    return found


def filled(text: str) -> str:
    """The guide with each shown file as it is on disk."""

    def replace(match: re.Match[str]) -> str:
        body = Path(ACME / match["path"]).read_text(encoding="utf-8")
        return f"{match['head']}{match['fence']}{match['language']}\n{body}{match['fence']}\n"

    return _FILE.sub(replace, text)


if __name__ == "__main__":
    GUIDE.write_text(filled(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
