"""`dualenc …`: a table of subcommands; `dualenc.cli` turns a function's parameters into arguments.

A command's module is imported only when the command runs, so that help is instant.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from dualenc import __version__
from dualenc.errors import DualencError
from dualenc.terminal import printable, without_credentials

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def run_function(function: Callable[..., Any], prog: str, arguments: list[str]) -> None:
    """Parse a command line by the signature of a function, and call the function.

    Args:
        function: the typed function of a subcommand.
        prog: what the usage line and error messages call it, such as `dualenc embed`.
        arguments: the words after the command's name.

    Raises:
        DualencError: an unknown option (names the nearest valid one), a missing or superfluous argument, a value
            of the wrong type.
    """
    parameters = inspect.signature(function).parameters
    words, given = _split(arguments, function, prog)
    if "help" in given:
        return _parser(function, prog).print_help()
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    rest = words[len(by_position) :]
    if rest and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        raise DualencError(f"{prog} does not take the extra argument '{rest[0]}'; see {prog} --help")
    for name, word in zip(by_position, words):
        if name in given:
            raise DualencError(f"{prog}: '{name}' is given twice, by position and as an option; give it once")
        given[name] = word
    labelled = [(_label(parameters[name]), value) for name, value in given.items()]
    for label, value in [*labelled, *(("an argument", word) for word in rest)]:
        if "\0" in value:
            raise DualencError(f"{prog}: {label} holds a NUL character, which no path or text may; leave it out")
    missing = [_label(p) for p in parameters.values() if _is_required(p) and p.name not in given]
    if missing:
        raise DualencError(f"{prog} needs {', '.join(missing)}; see {prog} --help")
    # jsonargparse converts and checks the values, given to it in one canonical order.
    positional = [p.name for p in parameters.values() if _is_positional(p)]
    canonical = [f"--{name}={value}" for name, value in given.items() if name not in positional]
    if positional:
        canonical += ["--", *(given[name] for name in positional)]
    try:
        parsed = _parser(function, prog).parse_args(canonical)
    except Exception as error:
        # It lists every type that it tried, over many lines.
        key = re.search(r'key "(\w+)"', str(error))
        reason = " ".join(str(error).split())
        if key is not None and key[1] in given:
            parameter = parameters[key[1]]
            reason = f"{_label(parameter)} must be {parameter.annotation}, not '{given[key[1]]}'"
        raise DualencError(f"{prog}: {reason}; see {prog} --help") from error
    values = {name: parsed[name] for name in parameters if name in parsed}
    leading = [values.pop(name) for name in by_position]
    function(*leading, *rest, **values)
    return None


def nearest(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, naming the valid word that a wrong one abbreviates or is closest to; empty without one."""
    known = list(known)
    close = [name for name in known if word.lower() == "".join(part[0] for part in re.findall("[a-z]+", name))]
    close = close or difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _split(arguments: list[str], function: Callable[..., Any], prog: str) -> tuple[list[str], dict[str, str]]:
    """Separate positional words from options, in any order: `--name value`, `--name=value`, `-k 5`, bare flags."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    known = {f"--{p.name.replace('_', '-')}" for p in parameters if p.kind is not p.VAR_POSITIONAL}
    words: list[str] = []
    options: dict[str, str] = {}
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        if word == "--":
            return words + queue, options
        if word in ("-h", "--help"):
            options["help"] = "true"
            continue
        if not word.startswith("-") or word == "-" or re.match(r"-\.?\d", word):
            words.append(word)
            continue
        option, has_value, value = word.partition("=")
        name = option.lstrip("-").replace("-", "_")
        if f"--{name.partition('.')[0].replace('_', '-')}" not in known:
            raise DualencError(f"{prog} has no option '{option}'{nearest(option, known)}; see {prog} --help")
        hint = hints.get(name)
        if not has_value and hint is bool:
            value = queue.pop(0) if queue and queue[0] in ("true", "false") else "true"
        elif not has_value:
            if not queue or (queue[0].startswith("--") and len(queue[0]) > 2):
                raise DualencError(f"{prog}: the option {option} needs a value; see {prog} --help")
            value = queue.pop(0)
        listed = next((part for part in (hint, *typing.get_args(hint)) if typing.get_origin(part) is list), None)
        if listed is not None:  # may be repeated
            items = [options[name][1:-1]] if name in options else []
            if typing.get_args(listed) == (str,) and not value.startswith("["):
                # Quoted: 2020, no and a colon are texts, too.
                value = ", ".join(json.dumps(item.strip()) for item in value.split(","))
            value = f"[{', '.join([*items, value.removeprefix('[').removesuffix(']')])}]"
        options[name] = value
    return words, options


def _parser(function: Callable[..., Any], prog: str) -> ArgumentParser:
    """The parser that jsonargparse derives from the signature and the docstring."""
    import jsonargparse

    parameters = inspect.signature(function).parameters.values()
    options: set[str | int] = {p.name for p in parameters if not _is_positional(p)}
    others: set[str | int] = {p.name for p in parameters if _is_positional(p) or p.kind is p.VAR_POSITIONAL}
    usage = [_label(p) if _is_positional(p) else f"{_label(p)} {p.name.upper()}" for p in parameters if _is_required(p)]
    usage += [f"[{p.name.upper()} …]" for p in parameters if p.kind is p.VAR_POSITIONAL]
    parser = jsonargparse.ArgumentParser(
        prog=prog,
        usage=" ".join([prog, *usage, "[options]"]),
        description=(inspect.getdoc(function) or "").split("\n\nArgs:")[0],
        print_config=None,
        exit_on_error=False,
        allow_abbrev=False,
    )
    described = _without_imports(function)
    parser.add_function_arguments(described, as_group=False, as_positional=True, skip=options)
    parser.add_function_arguments(described, as_group=False, skip=others)
    return parser


def _without_imports(function: Callable[..., Any]) -> Callable[..., Any]:
    """A stand-in with the function's signature and docstring, annotations evaluated.

    For the function itself, jsonargparse would run the `TYPE_CHECKING` imports of its module: torch, for a help text.
    """
    hints = typing.get_type_hints(function)
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=hints[p.name]) for p in signature.parameters.values()]

    def stand_in() -> None: ...

    stand_in.__doc__ = function.__doc__
    stand_in.__annotations__ = hints
    stand_in.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return stand_in


def _label(parameter: inspect.Parameter) -> str:
    return parameter.name.upper() if _is_positional(parameter) else "--" + parameter.name.replace("_", "-")


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL


def _is_positional(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and _is_required(parameter)


class Command(NamedTuple):
    """The file in `dualenc/commands` and the function in it that a subcommand runs, and a line of help."""

    module: str
    function: str
    help: str


Commands = dict[str, Union[Command, "Commands"]]

COMMANDS: Commands = {
    "quickstart": Command("quickstart", "quickstart", "train, index and search text already on this machine"),
    "train": Command("train", "train", "train a dual encoder from a recipe"),
    "report": Command("report", "report", "an HTML page about a training run, or several side by side"),
    "embed": Command("search", "embed", "embed a corpus with a model"),
    "index": Command("search", "index", "build a FAISS index from a model or from embeddings"),
    "push": Command("push", "push", "send embeddings to a vector search engine, or export them to Parquet"),
    "mine": Command("mine", "mine", "mine hard negatives for training with a model"),
    "search": Command("search", "search", "search an index or an engine with a text or an image"),
    "serve": Command("serve", "serve", "serve an index over HTTP, with a page to search on"),
    "export": Command("export", "export", "write the towers of a model as ONNX files"),
    "push-model": Command("publish", "push_model", "upload a model folder to the Hugging Face hub"),
    "push-data": Command("publish", "push_data", "upload embeddings to the Hugging Face hub"),
    "evaluate": {
        "retrieval": Command("retrieval", "retrieval", "nDCG, recall, MRR and MAP on a BEIR folder"),
        "image-text": Command("image_text", "image_text", "recall@k both ways, several captions"),
        "zero-shot": Command("zero_shot", "zero_shot", "classify images by prompts"),
        "probe": Command("probe", "probe", "linear and kNN probes on image features"),
        "corrupted": Command("corrupted", "corrupted", "retrieval under image corruptions"),
        "convergence": Command("convergence", "convergence", "learning curves of several runs"),
        "objectives": Command("objectives", "objectives", "which objective misses how much of the gradient"),
        "compare": Command("compare", "compare", "metrics of several models side by side"),
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
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without torch
            why = _one_line(error) or "none left"
            told = f"error: not enough memory ({why}); make batch_size or chunk_size smaller"
        else:
            what = f"{type(error).__name__}: {_one_line(error)}"[:400].rstrip(": ")
            told = f"unexpected error: {what}; run again with --debug to see where"
        print(f"dualenc: {told}", file=sys.stderr)
        return 1
    return 0


def _dispatch(arguments: list[str]) -> None:
    """Walk down the table of commands; print help, or run the function that is found."""
    prog, table = "dualenc", COMMANDS
    while True:
        word = arguments.pop(0) if arguments else "--help"
        if word == "--version":
            return print(f"dualenc {__version__}")
        if word in ("-h", "--help"):
            print(f"usage: {prog} COMMAND …\n")
            for name, entry in table.items():
                print(f"  {name:<12} {entry.help if isinstance(entry, Command) else ', '.join(entry)}")
            told = "tells a command's arguments; --debug shows the traceback of an error."
            return print(f"\n{prog} COMMAND --help {told}")
        if word not in table:
            raise DualencError(f"{prog} has no command '{word}'{nearest(word, table)}; see {prog} --help")
        entry, prog = table[word], f"{prog} {word}"
        if isinstance(entry, Command):
            return run_function(_load(entry), prog, arguments)
        table = entry


def _load(command: Command) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"dualenc.commands.{command.module}"), command.function)


def _one_line(error: BaseException) -> str:
    """The message of an error with line breaks folded; what to do where Python's own message does not tell.

    File names and values in it are a stranger's: control characters, which a terminal would obey, are spelled out.
    URLs lose their passwords and queries, wherever a reader or a library put them into the message.
    """
    message = printable(without_credentials(" ".join(str(error).split())))
    if isinstance(error, ModuleNotFoundError):
        return f"{message}; install the package that brings it (pip install {error.name})"
    return message


if __name__ == "__main__":
    sys.exit(main())
