"""Runs the ROCm backend's kernels on NVIDIA GPUs: ``python tests/rocm/on_cuda.py --out FOLDER``. Test only.

The conformance suite on each form of the backend (as gfx942, as gfx942 with fp8 weights, as gfx950), one report each;
then, where there are two GPUs, two ranks over NCCL: the gate over slices of dim against the reference on one rank, and
its time beside gathering the whole projection. Ends with 0 if all of it is right.

Nothing of the project need be installed: packages and entry points come from this checkout. ``--device cpu`` tries the
script itself in Triton's interpreter, ``-k`` picks conformance cases.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = [ROOT, *(ROOT / "backends" / name for name in ("reference", "nvidia", "rocm")), ROOT / "conformance"]


def distribution(folder: Path) -> None:
    """An installed distribution, as far as discovery looks: the override's entry points and the reference."""
    sys.path[:0] = [*map(str, PACKAGES), str(HERE / "override")]
    from rocm_override import ENTRIES

    # Under its own name where the checkout is not installed: a backend that two distributions claim is refused.
    entries = dict(ENTRIES) | ({} if installed() else {"reference": "engram_reference.plugin"})
    info = folder / "rocm_override-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rocm-override\nVersion: 0\n")
    lines = "\n".join(f"{name} = {value}" for name, value in entries.items())
    (info / "entry_points.txt").write_text(f"[engram_core.backends]\n{lines}\n")


def installed() -> bool:
    from importlib.metadata import entry_points

    return any(entry.name == "reference" for entry in entry_points(group="engram_core.backends"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for reports and times")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--forms", nargs="*", help="default: all three; with no name none")
    parser.add_argument("--no-ranks", action="store_true", help="leave the two ranks out")
    parser.add_argument("--size", default="full", help="largest conformance cases: small, real or full")
    parser.add_argument("-k", default="", help="conformance cases, as pytest's -k")
    chosen = parser.parse_args()
    chosen.out = chosen.out.resolve()  # pytest runs there
    chosen.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        distribution(Path(folder))
        from rocm_override import ENTRIES

        path = [folder, *map(str, PACKAGES), str(HERE / "override"), str(HERE), str(ROOT / "tests")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*path, os.environ.get("PYTHONPATH", "")])}
        if chosen.device == "cpu":
            environment["TRITON_INTERPRET"] = "1"
        plugin = () if installed() else ("-p", "engram_conformance.plugin")
        failed = []
        for form in ENTRIES if chosen.forms is None else chosen.forms:
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
            command += ["--pyargs", "engram_conformance", f"--engram-backend={form}", f"--engram-size={chosen.size}"]
            command += [f"--engram-device={chosen.device}", f"--engram-report={chosen.out / form}.json"]
            command += ["-k", chosen.k] if chosen.k else []
            print(f"\n=== {form}", flush=True)
            if subprocess.run(command, env=environment, check=False, cwd=chosen.out).returncode:
                failed.append(form)
        command = [sys.executable, str(HERE / "cuda_ranks.py"), chosen.device, str(chosen.out / "two-ranks.json")]
        print("\n=== two ranks: " + ("left out" if chosen.no_ranks else "NCCL"), flush=True)
        if not chosen.no_ranks and subprocess.run(command, env=environment, check=False).returncode:
            failed.append("two ranks")
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall right")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
