"""Command-line arguments from the signature of a typed function, parsed by argparse.

A parameter that may be given by position is a positional argument, a keyword-only one an option: `batch_size: int = 32`
becomes `--batch-size 32`. Options that several commands share stand in a dataclass; its fields become options of the
command. A list is split at commas; a sequence is not, since its texts may hold commas: one for each time it is typed.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import shutil
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, NoReturn, Union

import docstring_parser

from dualenc.errors import DualencError, nearest

EMPTY = inspect.Parameter.empty
OUTPUTS = {"out", "embeddings"}
"""Options that name what a command writes."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DualencError(f"{self.prog}: {message}; see {self.prog} --help")


class Help(NamedTuple):
    """The help of a command.

    Attributes:
        usage: its line, such as `dualenc embed MODEL DATA --out OUT [options]`.
        description: paragraphs.
        arguments: each as it is typed, such as `--batch-size N`, and what it means.
    """

    usage: str
    description: str
    arguments: list[tuple[str, str]]


def help_of(function: Callable[..., Any], prog: str) -> Help:
    """What `--help` prints about a command, in parts."""
    description, texts = _documentation(function)
    parameters = list(_flattened(function))
    arguments = []
    for parameter in parameters:
        names = _names(parameter) if parameter.kind is parameter.KEYWORD_ONLY else []
        value = _value(parameter) if names else _label(parameter)
        arguments.append((" ".join([*names[:1], value]).strip(), _meaning(parameter, texts)))
    return Help(_usage(prog, parameters), description, arguments)


def run_function(function: Callable[..., Any], prog: str, arguments: Sequence[str]) -> None:
    """Parse a command line by the signature of a function, and call the function.

    Args:
        function: the typed function of a subcommand.
        prog: what the usage line and error messages call it, such as `dualenc embed`.
        arguments: the words after the command's name.

    Raises:
        DualencError: an unknown option (names the nearest valid one), a missing or superfluous argument, a value
            of the wrong type, an output without a name.
    """
    _refuse_nul(prog, arguments)
    parameters = list(_flattened(function))
    options = [option for option in parameters if option.kind is option.KEYWORD_ONLY]
    flags = {_label(option) for option in options if option.annotation is bool}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = _normalize(arguments[:end], flags)
    if "-h" in words or "--help" in words:
        return _parser(function, prog, parameters).print_help()

    # The parser knows the options only: what it leaves over are positional arguments and unknown options, in order.
    parsed, positional = _parser(function, prog, options).parse_known_args(words)
    for word in positional:
        name = word.partition("=")[0]
        # A lone dash, a negative number and a text of several words are no options.
        if re.fullmatch(r"-(?!\.?\d)\S+", name):
            suggestion = nearest(name, map(_label, options))
            raise DualencError(f"{prog} has no option '{name}'{suggestion}; see {prog} --help")
    for name in OUTPUTS & vars(parsed).keys():
        # Path("") is the current folder.
        if not getattr(parsed, name):
            raise DualencError(f"{prog}: --{name} is empty; name a file or folder")
    values = _grouped(function, vars(parsed))
    try:
        bound = inspect.signature(function).bind(*positional, *arguments[end + 1 :], **values)
    except TypeError as error:
        raise DualencError(f"{prog}: {error}; see {prog} --help") from None
    return function(*bound.args, **bound.kwargs)


def _refuse_nul(prog: str, arguments: Sequence[str]) -> None:
    """Refuse a NUL character here, where the option is known: the system's own error would not name it."""
    place = "an argument"
    for word in arguments:
        if word.startswith("--"):
            place = word.partition("=")[0]
        if "\0" in word:
            raise DualencError(f"{prog}: {place} holds a NUL character, which no path or text may; leave it out")
        if not word.startswith("--"):
            place = "an argument"


def _grouped(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Values by parameter, with dataclasses made of the options that are their fields."""
    for parameter in _parameters(function):
        group = parameter.annotation
        if _is_group(group):
            names = {field.name for field in dataclasses.fields(group)}
            fields = {name: values.pop(name) for name in names & values.keys()}
            values[parameter.name] = group(**fields)
    return values


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function or dataclass, with evaluated annotations."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]


def _is_group(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _flattened(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters of a function, with the fields of dataclasses in the place of those."""
    for parameter in _parameters(function):
        if _is_group(parameter.annotation):
            for field in _parameters(parameter.annotation):
                yield field.replace(kind=field.KEYWORD_ONLY)
        else:
            yield parameter


def _label(parameter: inspect.Parameter) -> str:
    """What messages call an argument: SOURCE, or --batch-size."""
    if parameter.kind is parameter.KEYWORD_ONLY:
        return f"--{parameter.name.replace('_', '-')}"
    return parameter.name.upper()


def _normalize(arguments: Sequence[str], flags: set[str]) -> list[str]:
    """Spell `--batch_size` with dashes, and `--json` as `--json=true`.

    With an optional value, argparse would take whatever follows a flag as its value: `search --json INDEX QUERY`.
    """
    words: list[str] = []
    for word in arguments:
        if words and words[-1] in flags and word in ("true", "false"):
            words[-1] += f"={word}"
            continue
        option, equals, value = word.partition("=")
        # Not the underscores of a text that begins with dashes.
        if re.fullmatch(r"--\w[\w-]*", option):
            word = option.replace("_", "-") + equals + value
        words.append(word)
    return [f"{word}=true" if word in flags else word for word in words]


def _parser(
    function: Callable[..., Any], prog: str, parameters: Sequence[inspect.Parameter]
) -> argparse.ArgumentParser:
    """A parser of some of a function's parameters; positional ones are only for its help."""
    description, texts = _documentation(function)
    parser = _Parser(
        prog=prog,
        usage=_usage(prog, parameters),
        description=description,
        formatter_class=_formatter(),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for parameter in parameters:
        text = _meaning(parameter, texts).replace("%", "%%")
        if parameter.kind is not parameter.KEYWORD_ONLY:
            parser.add_argument(parameter.name, metavar=_label(parameter), help=text)
            continue
        parser.add_argument(
            *_names(parameter),
            dest=parameter.name,
            metavar=_value(parameter),
            help=text,
            **_conversion(parameter.annotation),
        )
    return parser


def _formatter() -> Callable[..., argparse.HelpFormatter]:
    """Help as wide as the terminal, up to 120 characters, with options and their meanings in two columns."""
    width = min(shutil.get_terminal_size((100, 24)).columns - 2, 120)
    return partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width)


def _names(option: inspect.Parameter) -> list[str]:
    """-k and --k, or --batch-size alone."""
    short = [f"-{option.name}"] if len(option.name) == 1 else []
    return [*short, _label(option)]


def _value(option: inspect.Parameter) -> str:
    """What help shows behind an option: {a,b}, N for whole numbers, X for others, nothing for a flag, or a word."""
    hint, can_be_null = _without_none(option.annotation)
    if hint is bool:
        return "" if option.default is False else "{true,false}"
    if typing.get_origin(hint) is Literal:
        return f"{{{','.join(map(str, typing.get_args(hint)))}}}"
    numbers: dict[Any, str] = {int: "N", float: "X", list[int]: "N,…", list[float]: "X,…"}
    if hint in numbers:
        return numbers[hint] + ("|null" if can_be_null and option.default is not None else "")
    return option.name.rpartition("_")[2].upper()


def _meaning(parameter: inspect.Parameter, texts: dict[str, str]) -> str:
    """What an argument means, and its default."""
    text = " ".join(texts.get(parameter.name, "").split())
    if parameter.default in (EMPTY, None, "") or parameter.default is False:
        return text
    default = "true" if parameter.default is True else parameter.default
    return f"{text.removesuffix('.')} (default: {default})".strip()


def _without_none(hint: Any) -> tuple[Any, bool]:
    """A type without `None`, and whether that was one of its choices."""
    if typing.get_origin(hint) not in (Union, types.UnionType):
        return hint, False
    choices = [choice for choice in typing.get_args(hint) if choice is not type(None)]
    return choices[0], len(choices) < len(typing.get_args(hint))


def _usage(prog: str, parameters: Sequence[inspect.Parameter]) -> str:
    """The required arguments, and those that may be repeated."""
    words = [prog]
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"[{_label(parameter)} …]")
        elif parameter.default is EMPTY:
            words.append(_label(parameter))
            if parameter.kind is parameter.KEYWORD_ONLY:
                words.append(parameter.name.upper())
    return " ".join([*words, "[options]"])


def _conversion(hint: Any) -> dict[str, Any]:
    """Arguments of `add_argument` for a type: how to convert the text, and whether the option may be repeated."""
    inner_hint, can_be_null = _without_none(hint)
    origin = typing.get_origin(inner_hint)
    inner = typing.get_args(inner_hint)
    if inner_hint is bool:
        return {"type": boolean}
    if origin is Literal:
        return {"choices": inner}
    if origin is Sequence:
        return {"type": inner[0], "action": "append"}
    if origin is list:
        return {"type": _list_of(inner[0]), "action": "extend"}
    # "null" is a text like any other for an option that takes text.
    if inner_hint is not str and can_be_null:
        return {"type": _or_null(inner_hint)}
    return {"type": inner_hint}


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _list_of(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A converter of `1,5,10` or `[1,5,10]`; double quotes protect commas: `"last, first",year`."""

    def convert(text: str) -> list[Any]:
        if text == "[]":
            return []
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        parts = [part.strip() for part in re.split(r',(?=(?:[^"]*"[^"]*")*[^"]*$)', text)]
        return [item(part[1:-1] if re.fullmatch(r'"[^"]*"', part) else part) for part in parts]

    convert.__name__ = f"list of {item.__name__}"
    return convert


def _or_null(number: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter of a number or `null`."""

    def convert(text: str) -> Any:
        return None if text == "null" else number(text)

    convert.__name__ = f"{number.__name__} or null"
    return convert


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """The description of a function, and the texts of its arguments, those in dataclasses included, by name."""
    parsed = docstring_parser.parse(function.__doc__ or "")
    texts = {entry.arg_name: entry.description or "" for entry in parsed.params}
    for parameter in _parameters(function):
        if _is_group(parameter.annotation):
            texts |= _documentation(parameter.annotation)[1]
    return parsed.description or "", texts
