"""Command lines of typed functions, by cyclopts: parameters and the fields of dataclasses are options.

`batch_size: int = 32` is `--batch-size 32`. A list with `COMMAS` is split; any other list or sequence is an option that
may be repeated, because its texts may hold commas.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import typing
from collections.abc import Callable, Sequence
from typing import Any

from cyclopts import App, CycloptsError, Parameter, convert

from dualenc import __version__
from dualenc.errors import DualencError


def _split(kind: Any, tokens: Sequence[Any]) -> Any:
    """Convert `1,5` and `10`; double quotes protect commas: `"last, first",year`."""
    rows = csv.reader([token.value for token in tokens], skipinitialspace=True)
    return convert(kind, [part.strip() for row in rows for part in row])


COMMAS = Parameter(converter=_split, n_tokens=1)


def new_app(name: str, help: str = "") -> App:
    """A command line, or a group of its commands; functions are added to it."""
    return App(
        name=name,
        help=help,
        help_format="markdown",
        version=f"dualenc {__version__}",
        exit_on_error=False,
        print_error=False,
        default_parameter=Parameter(negative_iterable=(), negative_none=(), allow_repeating=True),
    )


def add_command(app: App, function: Callable[..., Any]) -> None:
    """Add a typed function; its docstring is the help."""
    defaults = {}
    for name, hint in typing.get_type_hints(function).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            # The names of its fields, without a prefix.
            Parameter(name="*")(hint)
            defaults[name] = hint()
    function.__kwdefaults__ = defaults | (function.__kwdefaults__ or {})
    app.command(function)


def run(app: App, arguments: Sequence[str]) -> None:
    """Parse a command line, and call the function of its command.

    Raises:
        DualencError: a mistake in the arguments, with the nearest command or option.
    """
    if "--out=" in arguments or ("--out", "") in itertools.pairwise(arguments):
        # Path("") is the current folder.
        raise DualencError("--out is empty; name a file or folder")
    try:
        function, bound, _ = app.parse_args(arguments)
    except CycloptsError as error:
        command = " ".join([*app.name, *(error.command_chain or ())])
        raise DualencError(f"{' '.join(str(error).split())} See {command} --help") from None
    function(*bound.args, **bound.kwargs)
