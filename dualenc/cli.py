"""Command line of `dualenc`: a table of subcommands, and one-line errors.

A command's module is imported only when the command runs, and heavy libraries (torch, transformers, faiss, datasets)
only inside its function, so that every help text and most errors appear at once.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, Union

from dualenc import __version__
from dualenc.errors import BelowTarget, DualencError, nearest
from dualenc.terminal import printable, without_credentials

Commands = dict[str, Union[str, "Commands"]]

COMMANDS: Commands = {
    "quickstart": "train, index and search text already on this machine",
    "recipe": "list the recipes that come with the package, or print one",
    "train": "train a dual encoder from a recipe",
    "report": "an HTML page about a training run, or several side by side",
    "embed": "embed a corpus with a model",
    "index": "build a FAISS index from a model or from embeddings",
    "migrate": "change the model of an index, served meanwhile",
    "push": "send embeddings to PostgreSQL or Qdrant",
    "adapt": "train queries for an index that stays as it is",
    "mine": "mine hard negatives for training with a model",
    "search": "search an index or an engine with a text or an image",
    "evaluate": {
        "retrieval": "nDCG, recall, MRR and MAP on a BEIR folder",
        "image-text": "recall@k both ways, several captions",
        "zero-shot": "classify images by prompts",
        "probe": "linear and kNN probes on image features",
        "corrupted": "retrieval under image corruptions",
        "objectives": "which objective misses how much of the gradient",
        "engine": "recall under filters of what push wrote, again",
        "compare": "metrics of several models side by side",
    },
}
"""A line of help for each command; its function is in the module of `dualenc.commands` with the first word's name."""

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
        _dispatch([argument for argument in arguments if argument != "--debug"])
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


def _dispatch(arguments: list[str]) -> None:
    """Look up a command in the table and its sub-tables; print help, or run its function."""
    words = ["dualenc"]
    table: str | Commands = COMMANDS
    while isinstance(table, dict):
        prog = " ".join(words)
        word = arguments.pop(0) if arguments else "--help"
        if word == "--version":
            return print(f"dualenc {__version__}")
        if word in ("-h", "--help"):
            print(f"usage: {prog} COMMAND …\n")
            for name, entry in table.items():
                print(f"  {name:<12} {entry if isinstance(entry, str) else ', '.join(entry)}")
            print(
                f"\n{prog} COMMAND --help shows a command's arguments; --debug shows the traceback of an error."
            )
            return None
        if word not in table:
            raise DualencError(f"{prog} has no command '{word}'{nearest(word, table)}; see {prog} --help")
        words.append(word)
        table = table[word]
    # Importing cyclopts takes longer than the help above.
    from dualenc.arguments import run_function

    return run_function(load(*words[1:]), " ".join(words), arguments)


def load(*words: str) -> Callable[..., Any]:
    """The function of a command, such as "evaluate", "image-text"."""
    module = importlib.import_module(f"dualenc.commands.{words[0]}")
    return getattr(module, words[-1].replace("-", "_"))


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
