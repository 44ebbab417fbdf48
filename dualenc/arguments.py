"""Command lines of typed functions, by cyclopts: keyword-only parameters and the fields of dataclasses are options.

`batch_size: int = 32` is `--batch-size 32`. A list with `COMMAS` is split; any other list or sequence is an option that
may be repeated, because its texts may hold commas.
"""

from __future__ import annotations

import csv
import dataclasses
import inspect
import itertools
import re
import textwrap
import typing
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter, UnusedCliTokensError, convert

from dualenc.errors import DualencError

MARK = "\0"
"""Stands before `-` and texts such as `--- a`: values that cyclopts would take for options. No argument can hold it."""


def _split(kind: Any, tokens: Sequence[Any]) -> Any:
    """Convert `1,5` and `10`; double quotes protect commas: `"last, first",year`."""
    rows = csv.reader([token.value for token in tokens], skipinitialspace=True)
    return convert(kind, [part.strip() for row in rows for part in row])


COMMAS = Parameter(converter=_split, n_tokens=1)


def run_function(function: Callable[..., Any], prog: str, arguments: Sequence[str]) -> None:
    """Parse a command line by the signature of a function, and call the function; with --help print its help.

    Args:
        function: the typed function of a subcommand.
        prog: what the usage line and error messages call it, such as `dualenc embed`.
        arguments: the words after the command's name.
    """
    if "--out=" in arguments or ("--out", "") in itertools.pairwise(arguments):
        # Path("") is the current folder.
        raise DualencError(f"{prog}: --out is empty; name a file or folder")
    words = []
    for word in arguments:
        is_text = word.startswith("-") and not re.match(r"--?[A-Za-z][\w-]*(=|$)|-\.?\d|--$", word)
        words.append(MARK + word if is_text else word)
    try:
        command, bound, _ = build_app(function, prog).parse_args(words)
    except CycloptsError as error:
        problem = " ".join(str(error).replace(MARK, "").split())
        if isinstance(error, UnusedCliTokensError):
            problem = f"too many arguments, from '{(error.unused_tokens or words)[0]}' on."
        raise DualencError(f"{prog}: {problem} See {prog} --help") from None
    bound.apply_defaults()
    command(*_unmarked(bound.args), **{name: _unmarked(value) for name, value in bound.kwargs.items()})


def _unmarked(value: Any) -> Any:
    if isinstance(value, str):
        return value.removeprefix(MARK)
    if isinstance(value, (list, tuple)):
        return type(value)(map(_unmarked, value))
    if dataclasses.is_dataclass(value):
        values = {name: _unmarked(item) for name, item in vars(value).items()}
        return dataclasses.replace(typing.cast(Any, value), **values)
    return value


def build_app(function: Callable[..., Any], prog: str) -> App:
    """The command of a function; its `help_print` shows the help."""
    command = _as_command(function)
    app = App(
        name=prog,
        usage=_usage(prog, inspect.signature(command)),
        help_format="plaintext",
        help_formatter=typing.cast(Any, _Help()),
        group_parameters="Options",
        version_flags=(),
        exit_on_error=False,
        print_error=False,
        default_parameter=Parameter(negative_iterable=(), negative_none=(), allow_repeating=True),
    )
    app["--help"].group = "Options"
    app.default(command)
    return app


def _as_command(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for cyclopts: fields of dataclasses without a prefix, arguments by position only."""
    hints = typing.get_type_hints(function, include_extras=True)
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        hint = hints[parameter.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            default = hint() if parameter.default is parameter.empty else parameter.default
            parameter = parameter.replace(default=default)
            hint = Annotated[hint, Parameter(name="*")]
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            parameter = parameter.replace(kind=parameter.POSITIONAL_ONLY)
        parameters.append(parameter.replace(annotation=hint))

    def command(*positional: Any, **options: Any) -> None:
        function(*positional, **options)

    command.__doc__ = function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _usage(prog: str, signature: inspect.Signature) -> str:
    words = [prog]
    for parameter in signature.parameters.values():
        name = parameter.name.upper()
        if parameter.kind is parameter.VAR_POSITIONAL:
            words.append(f"[{name} …]")
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            words.append(name if parameter.default is parameter.empty else f"[{name}]")
        elif parameter.default is parameter.empty:
            words.append(f"--{parameter.name.replace('_', '-')} {name}")
    return " ".join([*words, "[options]"])


class _Help:
    """Plain help in two columns, as wide as the terminal up to 120 characters."""

    def render_usage(self, console: Any, _: Any, usage: Any) -> None:
        print(f"usage: {usage}")

    def render_description(self, console: Any, _: Any, description: Any) -> None:
        print(description.primary_renderable.plain)

    def __call__(self, console: Any, _: Any, panel: Any) -> None:
        print(f"\n{panel.title.lower()}:")
        for entry in panel.entries:
            text = " ".join(entry.description.primary_renderable.plain.split())
            if entry.default not in (None, '""', "True", "False"):
                text = f"{text.removesuffix('.')} (default: {entry.default})"
            lines = textwrap.wrap(text, min(console.width, 120) - 26)
            label = f"  {_label(entry)}"
            if lines and len(label) < 26:
                label = f"{label:<26}{lines.pop(0)}"
            print("\n".join([label, *(" " * 26 + line for line in lines)]))


def _label(entry: Any) -> str:
    """The names of an argument, and what stands for its value: a number, one of its choices, or a word."""
    names = [*entry.positive_names, *entry.positive_shorts]
    kind = str(entry.type)
    if not names or not names[0].startswith("-"):
        return ", ".join(names) or str(entry.positional_label)
    if entry.type is None or "bool" in kind:
        return ", ".join([*names, *(entry.negative_names if entry.default != "False" else ())])
    word = names[0].rpartition("-")[2].upper()
    if entry.choices:
        word = f"{{{','.join(entry.choices)}}}"
    elif "int" in kind or "float" in kind:
        word = "N" if "int" in kind else "X"
        if "None" in kind and entry.default is not None:
            word += "|null"
    return f"{', '.join(names)} {word}{',…' if 'list' in kind else ''}"
