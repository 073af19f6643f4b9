"""A fresh environment that has the running one's third-party packages, and none of its traces of this project.

Every package is linked in by itself: a ``.pth`` to the whole site-packages would bring the editable install's metadata
along, and the test would not show what a user's wheel brings.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).parents[2]
ACME = ROOT / "examples" / "acme-engram"

_OURS = re.compile(r"_*(editable_*impl_*)?(engram|acme)", re.IGNORECASE)


def run(*command: str | Path, cwd: Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a command; a failure shows what it said."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise AssertionError(f"{command} exited with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done


def environment(folder: Path) -> Path:
    """Make the environment; returns its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip())
    for source in dict.fromkeys(Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")):
        for package in source.iterdir():
            if package.suffix != ".pth" and package.name != "__pycache__" and not _OURS.match(package.name):
                (site / package.name).symlink_to(package)
    return python


def wheel(project: Path, folder: Path) -> Path:
    """Build ``project``'s wheel into ``folder``, with the running environment's hatchling."""
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, project, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


def install(python: Path, *wheels: Path) -> None:
    """Install wheels, and nothing that they depend on: it is there."""
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, *wheels, cwd=wheels[0].parent)
