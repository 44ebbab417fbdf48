"""Command line of `dualenc`: typed functions become subcommands, and errors become one line.

Parameters of a function, and the fields of its dataclasses, are options: `batch_size: int = 32` is
`--batch-size 32`. Command modules import heavy libraries (torch, transformers, faiss, datasets)
only inside their functions, so that help texts and most errors appear at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import pkgutil
import re
import shlex
import sys
import typing
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError

from dualenc import __version__
from dualenc.commands.notices import printed_notices
from dualenc.errors import BelowTarget, DualencError, nearest
from dualenc.io.terminal import printable, without_credentials

COMMANDS = (
    "quickstart",
    "recipe",
    "train",
    "tune",
    "report",
    "embed",
    "index",
    "append",
    "remove",
    "verify",
    "check",
    "migrate",
    "push",
    "adapt",
    "mine",
    "search",
    "evaluate retrieval",
    "evaluate image-text",
    "evaluate zero-shot",
    "evaluate probe",
    "evaluate corrupted",
    "evaluate engine",
    "env",
)
"""Each command is a function in the module of `dualenc.commands` named by its first word."""

EXPECTED = (DualencError, CycloptsError, OSError, ModuleNotFoundError)
"""Errors that a user can fix."""

_VALUE = re.compile(r"-(?![\d.]+([eE][-+]?\d+)?$)[^-a-zA-Z]")
"""Values that look like options, such as "-20 degrees". Options have letters; -20 is a number."""
_MARK = "\x00"
"""Marks such a value while options are parsed; process arguments cannot contain NUL."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dualenc` with the given arguments.

    Args:
        argv: arguments; defaults to those of the process. With `--debug` errors are raised.

    Returns:
        The exit code: 0; 1 after an unexpected error or a measurement below its target; 2 after a
        user's mistake; 130 after Ctrl-C. Errors are reported in one line on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    words = [argument for argument in arguments if argument != "--debug"]
    try:
        if "--out=" in words or ("--out", "") in itertools.pairwise(words):
            # Path("") would be the current folder.
            raise DualencError("--out is empty", fix="name a file or folder")
        marked = [_MARK + word if _VALUE.match(word) else word for word in words]
        function, bound, _ = build_app(words[:1]).parse_args(marked)
        with printed_notices():
            function(*_unmarked(bound.args), **_unmarked(bound.kwargs))
        # Flushed here, so that a closed pipe raises inside this `try`.
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader, such as `head`, closed the pipe. Python would report an error when it closes
        # stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("dualenc: interrupted", file=sys.stderr)
        return 130
    except BaseException as error:
        # A panic in a Rust library, such as tokenizers, is not an Exception; neither is SystemExit.
        is_failure = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if len(words) < len(arguments) or not is_failure:
            raise
        print(f"dualenc: {_explain(error, words)}", file=sys.stderr)
        return 2 if isinstance(error, EXPECTED) and not isinstance(error, BelowTarget) else 1
    return 0


def build_app(first_words: Sequence[str] = ()) -> App:
    """Return the app with the commands that begin with one of these words; all if none does.

    Only the modules of these commands are imported.

    Args:
        first_words: first words of commands.
    """
    app = App(
        name="dualenc",
        help="Train, evaluate and search with dual encoders. "
        "--debug shows the traceback of an error.",
        help_format="markdown",
        version=f"dualenc {__version__}",
        exit_on_error=False,
        print_error=False,
        default_parameter=Parameter(negative_iterable=(), negative_none=(), allow_repeating=True),
    )
    evaluate = App(name="evaluate", help="Measure models, indexes and engines.")
    app.command(evaluate)
    for command in [each for each in COMMANDS if each.split()[0] in first_words] or COMMANDS:
        module, _, name = command.partition(" ")
        path = f"dualenc.commands.{module}:{name or module}"
        function = pkgutil.resolve_name(path.replace("-", "_"))
        _flatten_options(function)
        (evaluate if name else app).command(function)
    return app


def _flatten_options(function: Callable[..., Any]) -> None:
    """Make dataclass parameters optional, and their fields options without a prefix."""
    defaults = {}
    for name, hint in typing.get_type_hints(function).items():
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            Parameter(name="*")(hint)
            defaults[name] = hint()
    function.__kwdefaults__ = defaults | (function.__kwdefaults__ or {})


def _unmarked(value: Any) -> Any:
    """Return an argument, or a container of arguments, without the marks."""
    if isinstance(value, str):
        return value.removeprefix(_MARK)
    if isinstance(value, list | tuple):
        return type(value)(map(_unmarked, value))
    if isinstance(value, dict):
        return {name: _unmarked(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **_unmarked(vars(value)))
    return value


def _explain(error: BaseException, words: Sequence[str] = ()) -> str:
    """Explain an error in one line; anything but a user's mistake or lack of memory is a bug."""
    # File names and values in a message are untrusted.
    message = printable(without_credentials(" ".join(str(error).split())))
    if isinstance(error, CycloptsError):
        command = " ".join(["dualenc", *(error.command_chain or ())])
        text = _about_hyphen(error, words, command) or str(error)
        text = text.replace(_MARK, "").replace(repr(_MARK)[1:-1], "")
        message = printable(without_credentials(" ".join(text.split())))
        return f"error: {message} See {command} --help"
    if isinstance(error, ModuleNotFoundError):
        return f"error: {message}; install the package that brings it (pip install {error.name})"
    if isinstance(error, EXPECTED):
        return f"error: {message}"
    # Compared by name, because importing torch takes seconds.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        problem = f"not enough memory ({message or 'none left'})"
        return f"error: {problem}; make batch_size or chunk_size smaller"
    problem = f"unexpected error: {type(error).__name__}: {message}"
    return f"{problem}; run again with --debug to see where"


def _about_hyphen(error: CycloptsError, words: Sequence[str], command: str) -> str:
    """Explain a value that begins with a hyphen and how to write it; "" if there is none."""
    if isinstance(error, UnknownOptionError):
        word = error.token.value or error.token.keyword or ""
        if "--" in words and word in words[words.index("--") :]:
            return f"{word} comes after --, where no options are; write options before it."
        if option := re.match(r"--\w[\w-]*(?==|$)", word):
            names = [name for each in error.argument_collection for name in each.names]
            return f"Unknown option: {option[0]}{nearest(option[0], names)}."
        if word in words:
            remedy = f"write it last, after --: {command} … -- {shlex.quote(word)}"
            return f"Unknown option: {word}. If it is a value, {remedy}."
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        for name, word in itertools.pairwise(words):
            if name in error.argument.names and re.match(r"-[^-]", word):
                remedy = f"if {word} is its value, write {shlex.quote(f'{name}={word}')}"
                return f"{name} requires an argument; {remedy}."
    return ""
