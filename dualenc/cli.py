"""`dualenc …`: a table of subcommands; `dualenc.arguments` turns a function's parameters into arguments.

A command's module is imported only when the command runs, so that help is instant.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Union

from dualenc.arguments import nearest, run_function
from dualenc.errors import DualencError
from dualenc.terminal import printable


class Command(NamedTuple):
    """The file in `dualenc/commands` and the function in it that a subcommand runs, and a line of help."""

    module: str
    function: str
    help: str


Commands = dict[str, Union[Command, "Commands"]]

COMMANDS: Commands = {
    "quickstart": Command("quickstart", "quickstart", "train, index and search text already on this machine"),
    "train": Command("train", "train", "train a dual encoder from a recipe"),
    "embed": Command("embed", "embed", "embed a corpus with a model"),
    "index": Command("index", "index", "build a FAISS index from a model or from embeddings"),
    "search": Command("search", "search", "search an index with a text or an image"),
    "evaluate": {
        "retrieval": Command("evaluate_retrieval", "retrieval", "nDCG, recall, MRR and MAP on a BEIR folder"),
        "image-text": Command("evaluate_image_text", "image_text", "recall@k both ways, several captions"),
        "zero-shot": Command("evaluate_zero_shot", "zero_shot", "classify images by prompts"),
        "probe": Command("evaluate_probe", "probe", "linear and kNN probes on image features"),
        "corrupted": Command("evaluate_corrupted", "corrupted", "retrieval under image corruptions"),
        "convergence": Command("evaluate_convergence", "convergence", "learning curves of several runs"),
        "compare": Command("evaluate_compare", "compare", "metrics of several models side by side"),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `dualenc` with the given arguments (default: those of the process).

    Returns:
        The exit code: 0, 2 after a user's mistake, 1 after an error that nobody foresaw (each told in one line on
        stderr), 130 after Ctrl-C.

    Raises:
        Exception: with `--debug`, whatever went wrong, with its traceback.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        _dispatch([argument for argument in arguments if argument != "--debug"])
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever reads, such as `head`, has enough; without this Python would complain when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("dualenc: interrupted", file=sys.stderr)
        return 130
    except (DualencError, OSError, ModuleNotFoundError) as error:
        if debug:
            raise
        print(f"dualenc: error: {_one_line(error)}", file=sys.stderr)
        return 2
    except Exception as error:
        if debug:
            raise
        print(f"dualenc: {_unforeseen(error)}", file=sys.stderr)
        return 1
    return 0


def _dispatch(arguments: list[str]) -> None:
    """Walk down the table of commands; print help, or run the function that is found."""
    prog, table = "dualenc", COMMANDS
    while True:
        word = arguments.pop(0) if arguments else "--help"
        if word == "--version":
            return _print_version()
        if word in ("-h", "--help"):
            return print(_list_commands(prog, table))
        if word not in table:
            raise DualencError(f"{prog} has no command '{word}'{nearest(word, table)}; see {prog} --help")
        entry, prog = table[word], f"{prog} {word}"
        if isinstance(entry, Command):
            return run_function(_load(entry), prog, arguments)
        table = entry


def _load(command: Command) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"dualenc.commands.{command.module}"), command.function)


def _list_commands(prog: str, table: Commands) -> str:
    lines = [f"usage: {prog} COMMAND …", ""]
    for name, entry in table.items():
        text = entry.help if isinstance(entry, Command) else ", ".join(entry)
        lines.append(f"  {name:<12} {text}")
    lines += ["", f"{prog} COMMAND --help tells a command's arguments; --debug shows the traceback of an error."]
    return "\n".join(lines)


def _print_version() -> None:
    from importlib.metadata import version

    print(f"dualenc {version('dualenc')}")


def _unforeseen(error: Exception) -> str:
    """The line of an error that no part of the package has explained."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without torch
        return f"error: not enough memory ({_one_line(error) or 'none left'}); make batch_size or chunk_size smaller"
    what = f"{type(error).__name__}: {_one_line(error)}"[:400].rstrip(": ")
    return f"unexpected error: {what}; run again with --debug to see where"


def _one_line(error: BaseException) -> str:
    """The message of an error with line breaks folded; what to do where Python's own message does not tell.

    File names and values in it are a stranger's: control characters, which a terminal would obey, are spelled out.
    """
    message = printable(" ".join(str(error).split()))
    if isinstance(error, ModuleNotFoundError):
        return f"{message}; install the package that brings it (pip install {error.name})"
    return message


if __name__ == "__main__":
    sys.exit(main())
