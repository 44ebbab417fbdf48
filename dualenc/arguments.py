"""Command-line arguments from the signature of a typed function, parsed by argparse.

A parameter that may be given by position is a positional argument, a keyword-only one an option: `batch_size: int = 32`
becomes `--batch-size 32`. Options that several commands share stand in a dataclass; its fields become options of the
command.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator, Sequence
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

    Raises:
        DualencError: an unknown option (names the nearest valid one), a missing or superfluous argument, a value
            of the wrong type.
    """
    for before, word in zip(("", *arguments), arguments):
        if "\0" in word:
            place = next((text.partition("=")[0] for text in (word, before) if text.startswith("--")), "an argument")
            raise DualencError(f"{prog}: {place} holds a NUL character, which no path or text may; leave it out")
    parameters = list(_flattened(function))
    options = [option for option in parameters if option.kind is option.KEYWORD_ONLY]
    end = arguments.index("--") if "--" in arguments else len(arguments)
    words = _normalize(arguments[:end], {_label(option) for option in options if option.annotation is bool})
    if "-h" in words or "--help" in words:
        return _parser(function, prog, parameters).print_help()

    parsed, positional = _parser(function, prog, options).parse_known_args(words)
    for word in positional:
        # A lone dash and a negative number are no options.
        if re.match(r"-(?!\.?\d|\s|$)", word):
            name = word.partition("=")[0]
            raise DualencError(f"{prog} has no option '{name}'{nearest(name, map(_label, options))}; see {prog} --help")
    values = vars(parsed)
    for group in _parameters(function):
        if _is_group(group.annotation):
            names = [field.name for field in dataclasses.fields(group.annotation)]
            values[group.name] = group.annotation(**{name: values.pop(name) for name in names if name in values})
    try:
        bound = inspect.signature(function).bind(*positional, *arguments[end + 1 :], **values)
    except TypeError as error:
        raise DualencError(f"{prog}: {error}; see {prog} --help") from None
    return function(*bound.args, **bound.kwargs)


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
        if word.startswith("--"):
            option, equals, value = word.partition("=")
            word = option.replace("_", "-") + equals + value
        words.append(word)
    return [f"{word}=true" if word in flags else word for word in words]


def _parser(
    function: Callable[..., Any], prog: str, parameters: Sequence[inspect.Parameter]
) -> argparse.ArgumentParser:
    """A parser of some of a function's parameters; positional ones are only for its help."""
    required = [p for p in parameters if p.default is EMPTY and p.kind is not p.VAR_POSITIONAL]
    usage = [_label(p) if p.kind is not p.KEYWORD_ONLY else f"{_label(p)} {p.name.upper()}" for p in required]
    usage += [f"[{_label(p)} …]" for p in parameters if p.kind is p.VAR_POSITIONAL]
    description, texts = _documentation(function)
    parser = _Parser(
        prog=prog,
        usage=" ".join([prog, *usage, "[options]"]),
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for parameter in parameters:
        text = texts.get(parameter.name, "")
        if parameter.default not in (EMPTY, None, False):
            text += f" (default: {parameter.default})"
        if parameter.kind is parameter.KEYWORD_ONLY:
            names = [_label(parameter)] if len(parameter.name) > 1 else [f"-{parameter.name}", _label(parameter)]
            parser.add_argument(*names, dest=parameter.name, help=text, **_conversion(parameter.annotation))
        else:
            parser.add_argument(parameter.name, help=text)
    return parser


def _conversion(hint: Any) -> dict[str, Any]:
    """What argparse is to know of a type: `type`, and `choices` or `action`."""
    choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    plain = next(choice for choice in choices if choice is not type(None))
    if plain is bool:
        return {"type": boolean, "metavar": "[true|false]"}
    if typing.get_origin(plain) is Literal:
        return {"choices": typing.get_args(plain)}
    if typing.get_origin(plain) is list:
        return {"type": _list_of(typing.get_args(plain)[0]), "action": "extend"}
    if plain is not str and len(choices) > 1:
        return {"type": _or_null(plain)}
    return {"type": plain}


def boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _list_of(item: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A converter of `1,5,10` or `[1,5,10]`."""

    def convert(text: str) -> list[Any]:
        if text == "[]":
            return []
        if text.startswith("[") and text.endswith("]"):
            text = text[1:-1]
        return [item(part.strip()) for part in text.split(",")]

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
    texts: dict[str, str] = {}
    for documented in (function, *(group.annotation for group in _parameters(function))):
        if documented is function or _is_group(documented):
            found = docstring_parser.parse(documented.__doc__ or "")
            texts |= {entry.arg_name: (entry.description or "").replace("%", "%%") for entry in found.params}
    return docstring_parser.parse(function.__doc__ or "").description or "", texts
