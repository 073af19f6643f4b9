"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from engram_core._version import __version__
from engram_core.cli.backends import backends
from engram_core.cli.conformance import conformance
from engram_core.cli.doctor import doctor
from engram_core.cli.hot_rows import hot_rows
from engram_core.cli.inspect import inspect
from engram_core.cli.make_checkpoint import make_checkpoint
from engram_core.cli.pack import pack
from engram_core.cli.run import run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog="Exit codes: 0 done; 1 a check failed; 2 bad usage or input; 3 the backend can't run here.",
)
for command in (run, backends, doctor, conformance, inspect, pack, make_checkpoint, hot_rows):
    app.command()(command)


def _version(asked: bool) -> None:
    if asked:
        print(f"engram-core {__version__}")
        raise typer.Exit


@app.callback()
def engram_core(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """The DeepSeek-V4.1 Engram layer on any accelerator."""
