"""The command line of ``step.py``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch
from _arms import BACKENDS, VARIANTS
from _decoder import KINDS

MODES: Final = ("graph", "eager", "sync")


def choice(allowed: Sequence[str]) -> Callable[[str], list[str]]:
    """A list of names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = text.split(",")
        if unknown := sorted(set(names) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{unknown}: there are {', '.join(allowed)}")
        return names

    return parse


def numbers(text: str) -> list[int]:
    """Positive integers, separated by commas."""
    found = [int(each) for each in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError("positive numbers are needed")
    return found


def arguments(given: Sequence[str] | None, description: str | None) -> argparse.Namespace:
    """The options, checked; what depends on the device is filled in."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoders", type=choice(tuple(KINDS)), default=list(KINDS))
    parser.add_argument("--tokens", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--ranks", type=numbers, default=[1, 4, 8], help="tensor ranks, of which rank 0 is run")
    parser.add_argument("--modes", type=choice(MODES), default=None)
    parser.add_argument(
        "--variants", type=choice(tuple(VARIANTS)), default=["ahead"],
        help="; ".join(f"{name}: {variant.what}" for name, variant in VARIANTS.items()),
    )  # fmt: skip
    parser.add_argument("--placement", choices=("device", "host"), default="host")
    parser.add_argument("--vocab-size", type=int, help="of the tables (default 2000000: 25 GB for both layers)")
    parser.add_argument("--spin-us", type=float, default=40.0, help="a wait of the decoder bound by latency")
    parser.add_argument("--gather-us", type=float, default=0.0, help="latency of a gather between ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", choices=tuple(BACKENDS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    options = parser.parse_args(given)
    cpu = torch.device(options.device).type == "cpu"
    options.modes = options.modes or (["sync"] if cpu else list(MODES))
    options.backend = options.backend or ("reference" if cpu else "nvidia")
    if cpu and options.modes != ["sync"]:
        parser.error("--modes: a CPU has only sync")
    if options.rounds < 2:
        parser.error("--rounds: at least 2")
    return options
