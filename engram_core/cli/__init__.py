"""The command line: one place where every failure becomes an exit code and a line.

Exit codes: 0 done; 1 a check failed; 2 bad usage or input; 3 the backend can't run here; 130 interrupted; 141 the
reader of standard output went away. Nothing here imports torch: ``engram-core --help`` and usage errors come at once.

What is no failure on purpose, a fault in a backend's code, keeps its traceback: its author needs it.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Final, cast

from engram_core.errors import BackendError, EngramWarning, UnknownBackendError

INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; ``argv``: without the program's name, default ``sys.argv[1:]``."""
    for stream in (sys.stdout, sys.stderr):
        # A file name that is not UTF-8, or a terminal that shows only ASCII, must not end in a traceback.
        if (reconfigure := getattr(stream, "reconfigure", None)) is not None:
            reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        _shorten_warnings()
        try:
            if sys.stdout is None:
                return _fail("standard output is closed", 2)
            code = _command(argv)
            sys.stdout.flush()
            return code
        except KeyboardInterrupt:
            return _fail("interrupted", INTERRUPTED)
        except BrokenPipeError:
            _silence(sys.stdout)
            return _fail("the reader of standard output went away (broken pipe)", BROKEN_PIPE)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            _silence(sys.stdout)  # such as a full disk behind it
            return _fail(f"standard output: {error.strerror}", 2)


def _command(argv: Sequence[str] | None) -> int:
    import typer

    from engram_core.cli.app import app
    from engram_core.cli.failure import CliError

    # ClickException, by way of its children: typer brings a click of its own, or needs the real one.
    usage_error = cast(type[Exception], typer.BadParameter.__mro__[2])
    try:
        result = app(None if argv is None else list(argv), prog_name="engram-core", standalone_mode=False)
    except CliError as error:
        return _fail(str(error), error.code)
    except BackendError as error:
        return _fail(str(error), 2 if isinstance(error, UnknownBackendError) else 3, keep_lines=True)
    except SystemExit:  # typer's answer to a broken pipe, and to nothing else when it does not stand alone
        raise BrokenPipeError from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    except usage_error as error:
        context = getattr(error, "ctx", None)
        path = getattr(context, "command_path", "engram-core")
        message = str(getattr(error, "format_message", error.__str__)())
        if not message:  # no command was given: the help is the message
            return 2
        return _fail(f"{message} (see {path} --help)", 2)
    if result == INTERRUPTED:  # newer typer turns Ctrl-C into this code and says nothing
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int, *, keep_lines: bool = False) -> int:
    """Say why on standard error, in one line (a table of backends keeps its own lines), and return ``code``."""
    if sys.stderr is not None:
        text = message if keep_lines else " ".join(message.split())
        try:
            print(f"engram-core: {text}", file=sys.stderr, flush=True)
        except OSError:
            _silence(sys.stderr)
    return code


def _silence(stream: object) -> None:
    """Point a stream that can't be written at nothing, so that the interpreter's last flush does not fail again."""
    try:
        fileno = stream.fileno()  # type: ignore[attr-defined]
    except (AttributeError, OSError, ValueError):
        return
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), fileno)


def _shorten_warnings() -> None:
    """Our own warnings are for the person at the terminal: without the place in our code that issued them."""
    usual = warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: object = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, EngramWarning):
            _fail(f"warning: {message}", 0)
        else:
            usual(message, category, filename, lineno, None, line)

    warnings.showwarning = show
