"""Arguments that take several texts, such as ids or names of columns: a text alone is not a list of its characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from dualenc.errors import DualencError

Value = TypeVar("Value")


def check_several(argument: str, values: object) -> None:
    """Raise a `DualencError` for a text where several are expected."""
    if isinstance(values, (str, bytes)):
        raise DualencError(f"{argument}: {values[:60]!r} is one text, not a list of texts; give [{values[:60]!r}]")


def one_or_several(values: Iterable[Value] | str) -> Iterable[Value] | list[str]:
    """The values, or a text alone as a list of one."""
    return [values] if isinstance(values, str) else values
