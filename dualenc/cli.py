"""Command line of `dualenc`: its subcommands, and one-line errors.

Modules of commands import heavy libraries (torch, transformers, faiss, datasets) only inside their functions, so that
every help text and most errors appear at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from cyclopts import App

from dualenc.arguments import add_command, new_app, run
from dualenc.errors import BelowTarget, DualencError
from dualenc.terminal import printable, without_credentials

COMMANDS = (
    *("quickstart", "recipe", "train", "report", "embed", "index", "migrate", "push", "adapt", "mine"),
    *("search", "evaluate retrieval", "evaluate image-text", "evaluate zero-shot", "evaluate probe"),
    *("evaluate corrupted", "evaluate engine", "evaluate compare"),
)
"""Each is a function in the module of `dualenc.commands` with its first word's name."""

EXPECTED = (DualencError, OSError, ModuleNotFoundError)
"""Errors that a user can fix."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dualenc` with the given arguments (default: those of the process).

    Returns:
        The exit code: 0, 2 after a user's mistake, 1 after an unexpected error or a measurement below its target (all
        reported in one line on stderr), 130 after Ctrl-C. With `--debug` errors are raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        run(build_app(), [argument for argument in arguments if argument != "--debug"])
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, has closed its end; without this Python would complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("dualenc: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        # A panic of a library in Rust, such as tokenizers, is no Exception; SystemExit is none either.
        is_failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if debug or not is_failure:
            raise
        print(f"dualenc: {_explain(error)}", file=sys.stderr)
        return 2 if isinstance(error, EXPECTED) and not isinstance(error, BelowTarget) else 1
    return 0


def build_app() -> App:
    """All commands."""
    app = new_app(
        "dualenc",
        "Train, evaluate and search with dual encoders. --debug shows the traceback of an error.",
    )
    evaluate = new_app("evaluate", "Measure models, indexes and engines.")
    app.command(evaluate)
    for command in COMMANDS:
        module, _, name = command.partition(" ")
        functions = vars(importlib.import_module(f"dualenc.commands.{module}"))
        add_command(evaluate if name else app, functions[(name or module).replace("-", "_")])
    return app


def _explain(error: BaseException) -> str:
    """One line about an error: a user's mistake as it is, out of memory with a remedy, anything else as a bug."""
    # File names and values in a message are untrusted.
    message = printable(without_credentials(" ".join(str(error).split())))
    if isinstance(error, ModuleNotFoundError):
        return f"error: {message}; install the package that brings it (pip install {error.name})"
    if isinstance(error, EXPECTED):
        return f"error: {message}"
    # torch's OutOfMemoryError is compared by name: importing torch takes seconds.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (
            f"error: not enough memory ({message or 'none left'}); make batch_size or chunk_size smaller"
        )
    return f"unexpected error: {type(error).__name__}: {message}; run again with --debug to see where"


if __name__ == "__main__":
    sys.exit(main())
