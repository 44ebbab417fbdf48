"""Command-line arguments from the signature of a typed function, parsed by argparse.

Keyword-only parameters become options: `batch_size: int = 32` is `--batch-size 32`. The fields of a dataclass become
options, too. A list is split at commas; a sequence is not: its texts may hold commas, and the option is repeated.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import inspect
import re
import shutil
import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NoReturn, Union

import docstring_parser

from dualenc.errors import DualencError, nearest

EMPTY = inspect.Parameter.empty


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DualencError(f"{self.prog}: {message}; see {self.prog} --help")


def run_function(function: Callable[..., Any], prog: str, arguments: Sequence[str]) -> None:
    """Parse a command line by the signature of a function, and call the function.

    Args:
        function: the typed function of a subcommand.
        prog: what the usage line and error messages call it, such as `dualenc embed`.
        arguments: the words after the command's name.
    """
    parser = build_parser(function, prog)
    parsed, unknown = parser.parse_known_intermixed_args([_with_dashes(word) for word in arguments])
    values = vars(parsed)
    _check_words(function, prog, values, unknown)
    positional: list[Any] = []
    for parameter in _parameters(function):
        name = parameter.name
        if _is_group(parameter):
            values[name] = _group(parameter.annotation, values)
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional += values.pop(name)
        elif parameter.kind is not parameter.KEYWORD_ONLY and name in values:
            positional.append(values.pop(name))
    function(*positional, **values)


def _with_dashes(word: str) -> str:
    """`--batch_size` is `--batch-size`."""
    option = re.match(r"--\w[\w-]*", word)
    if option is None:
        return word
    return option[0].replace("_", "-") + word[option.end() :]


def _check_words(
    function: Callable[..., Any], prog: str, values: dict[str, Any], unknown: list[str]
) -> None:
    """Refuse words that the parser did not know, and options that are missing or empty."""
    more = f"see {prog} --help"
    options = [parameter for parameter in _flattened(function) if parameter.kind is parameter.KEYWORD_ONLY]
    for word in unknown:
        if not word.startswith("-"):
            raise DualencError(f"{prog}: too many arguments, from '{word}' on; {more}")
        name = word.partition("=")[0]
        suggestion = nearest(name, map(_label, options))
        raise DualencError(f"{prog} has no option '{name}'{suggestion}; {more}")
    # Not checked by argparse, which would then report the missing option in place of its misspelling.
    for option in options:
        if option.default is EMPTY and option.name not in values:
            raise DualencError(f"{prog}: {_label(option)} is required; {more}")
    if values.get("out") == "":
        # Path("") is the current folder.
        raise DualencError(f"{prog}: --out is empty; name a file or folder")


def _group(kind: Any, values: dict[str, Any]) -> Any:
    """A dataclass made of the values that are its fields, which are taken out of the others."""
    fields = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            fields[field.name] = values.pop(field.name)
    return kind(**fields)


def build_parser(function: Callable[..., Any], prog: str) -> argparse.ArgumentParser:
    """The parser of a command, by the signature and the docstring of its function."""
    description, texts = _documentation(function)
    parameters = list(_flattened(function))
    # Help as wide as the terminal, up to 120 characters, with options and their meanings in two columns.
    width = min(shutil.get_terminal_size((100, 24)).columns - 2, 120)
    parser = _Parser(
        prog=prog,
        usage=_usage(prog, parameters),
        description=description,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=width),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for parameter in parameters:
        text = _meaning(parameter, texts).replace("%", "%%")
        if parameter.kind is parameter.VAR_POSITIONAL:
            parser.add_argument(
                parameter.name, metavar=_label(parameter), help=text, nargs="*", default=[]
            )
        elif parameter.kind is not parameter.KEYWORD_ONLY:
            number = None if parameter.default is EMPTY else "?"
            parser.add_argument(parameter.name, metavar=_label(parameter), help=text, nargs=number)
        else:
            names = [_label(parameter)]
            if len(parameter.name) == 1:
                names.insert(0, f"-{parameter.name}")
            parser.add_argument(*names, dest=parameter.name, help=text, **_conversion(parameter))
    return parser


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function or dataclass, with evaluated annotations."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters.values()
    return [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]


def _is_group(parameter: inspect.Parameter) -> bool:
    return dataclasses.is_dataclass(parameter.annotation)


def _flattened(function: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    """The parameters of a function, with the fields of dataclasses in the place of those."""
    for parameter in _parameters(function):
        if _is_group(parameter):
            for field in _parameters(parameter.annotation):
                yield field.replace(kind=field.KEYWORD_ONLY)
        else:
            yield parameter


def _label(parameter: inspect.Parameter) -> str:
    """What messages call an argument: SOURCE, or --batch-size."""
    if parameter.kind is parameter.KEYWORD_ONLY:
        return f"--{parameter.name.replace('_', '-')}"
    return parameter.name.upper()


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


def _meaning(parameter: inspect.Parameter, texts: dict[str, str]) -> str:
    """What an argument means, and its default."""
    text = " ".join(texts.get(parameter.name, "").split())
    if parameter.default in (EMPTY, None, "") or isinstance(parameter.default, bool):
        return text
    return f"{text.removesuffix('.')} (default: {parameter.default})".strip()


def _conversion(option: inspect.Parameter) -> dict[str, Any]:
    """How argparse converts the text of an option, and what its help shows behind the name."""
    hint = option.annotation
    can_be_null = False
    if typing.get_origin(hint) in (Union, types.UnionType):
        choices = typing.get_args(hint)
        can_be_null = type(None) in choices
        hint = choices[0]
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if hint is bool:
        return {"action": "store_true" if option.default is False else argparse.BooleanOptionalAction}
    if origin is Literal:
        return {"choices": inner, "metavar": f"{{{','.join(inner)}}}"}
    word = option.name.rpartition("_")[2].upper()
    if origin is Sequence:
        return {"type": inner[0], "action": "append", "metavar": word}
    numbers = {int: "N", float: "X"}
    if origin is list:
        metavar = f"{numbers[inner[0]]},…" if inner[0] in numbers else word
        return {"type": _list_of(inner[0]), "action": "extend", "metavar": metavar}
    if hint in numbers and can_be_null and option.default is not None:
        return {"type": _or_null(hint), "metavar": f"{numbers[hint]}|null"}
    return {"type": hint, "metavar": numbers.get(hint, word)}


def _list_of(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A converter of `1,5,10`; double quotes protect commas: `"last, first",year`."""

    def convert(text: str) -> list[Any]:
        return [item(part.strip()) for row in csv.reader([text], skipinitialspace=True) for part in row]

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
        if _is_group(parameter):
            texts |= _documentation(parameter.annotation)[1]
    return parsed.description or "", texts
