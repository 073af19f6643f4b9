"""``python -m mutants``, in ``tests/``: what the suite says of some mutants, as JSON or in ``docs/mutants.md``.

Ends with 0 if the control passes and every mutant fails all the cases that it names.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path

import torch

from mutants import device as gpu
from mutants import document
from mutants.catalogue import ALL, AREAS, ON_A_GPU, REFERENCE, backend_of
from mutants.model import Mutant
from mutants.runner import CONTROL, Outcome, Run, named_cases, run, whole_areas


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__)
    parser.add_argument("--area", choices=AREAS, help="only the mutants of this area (default: all of the reference)")
    parser.add_argument("--only", metavar="NAME,...", help="of them, only these")
    parser.add_argument("--backend", metavar="NAME", help="(default: the area's)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: the area's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="verdicts of the cases that the table names")
    parser.add_argument("--write", type=Path, metavar="FILE.md", help="put the table into the document")
    parser.add_argument("--from", type=Path, metavar="FILE.json", dest="source", help="write that; run nothing")
    parser.add_argument("--unrun", action="store_true", help="write the table of the GPU as one that was not run")
    parser.add_argument("--here", action="store_true", help="on a GPU: in this process")
    given = parser.parse_args()
    chosen = [mutant for mutant in ALL if mutant.area == given.area] if given.area else list(REFERENCE)
    if given.only:
        chosen = [mutant for mutant in chosen if mutant.name in given.only.split(",")]
    usual_backend, usual_device = backend_of(given.area)
    backend, device = given.backend or usual_backend, given.device or usual_device
    if device == "cuda" and not given.area:
        parser.error("--device cuda needs --area")
    if given.write and (given.area or "") not in document.PARTS:
        parser.error(f"--write needs no area, or one of {', '.join(filter(None, document.PARTS))}")
    if given.unrun and given.write:
        text = document.put(given.write.read_text("utf-8"), document.PARTS["graphs"], ON_A_GPU, None)
        given.write.write_text(text, encoding="utf-8")
        return 0
    began = time.monotonic()
    if given.source:
        found = Run.read(given.source)
    elif device == "cuda" and not given.here:
        found = gpu.run(chosen, given.area, backend, device)
    else:
        found = _here(chosen, backend, device, given.json, whole=bool(given.write) and backend == "reference")
    if given.json:
        found.write(given.json)
    if given.write:
        part = document.PARTS[given.area or ""]
        given.write.write_text(document.put(given.write.read_text("utf-8"), part, chosen, found), encoding="utf-8")
    if given.here:
        return 0  # whoever started this process judges
    faults = found.faults(chosen)
    for fault in faults:
        print(f"FAULT {fault}", file=sys.stderr)
    print(f"{len(chosen)} mutants, {len(faults)} faults, {time.monotonic() - began:.0f} s", file=sys.stderr)
    return 1 if faults else 0


def _here(mutants: list[Mutant], backend: str, device: str, path: Path | None, whole: bool) -> Run:
    if device == "cpu" and backend != "reference":
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated: none was imported so far
    torch.set_num_threads(1)  # the products are small: threads would only wait for each other
    on = torch.cuda.get_device_name() if device == "cuda" else device
    facts = {"backend": backend, "device": on, "torch": torch.__version__, "date": f"{datetime.date.today()}"}
    found = Run(facts)

    def told(outcome: Outcome) -> None:
        found.outcomes.append(outcome)
        if path:
            found.write(path)  # what is known, should this process end
        print(_line(outcome), file=sys.stderr, flush=True)

    again = device == "cuda" and len(mutants) > 1
    run(mutants, whole_areas if whole else named_cases, told, backend, device, again)
    return found


def _line(outcome: Outcome) -> str:
    control = outcome.mutant == CONTROL
    good = [case for case, verdict in outcome.verdicts.items() if verdict == ("passed" if control else "failed")]
    said = f"{outcome.mutant}: {'passes' if control else 'caught by'} {len(good)} of {len(outcome.verdicts)}"
    others = [f"{case} {verdict}" for case, verdict in outcome.verdicts.items() if case not in good]
    if 0 < len(others) <= 5:
        said += f" ({', '.join(others)})"
    return f"{said}; {outcome.note}" if outcome.note else said


if __name__ == "__main__":
    sys.exit(main())
