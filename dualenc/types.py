"""Type aliases and argument checks that several parts of the package share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from dualenc.errors import DualencError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

Value = TypeVar("Value")
StrPath: TypeAlias = "str | os.PathLike[str]"
Side: TypeAlias = Literal["left", "right"]
"""Name of a tower and of the items that it encodes."""
Modality: TypeAlias = Literal["text", "image", "vector"]
OnError: TypeAlias = Literal["skip", "raise"]
"""Action for a sample that cannot be read: skip, count and report it, or stop the run."""
Inputs: TypeAlias = "dict[str, Tensor]"
"""Inputs of a tower: tensors by name, with one row per item."""
Pooling: TypeAlias = Literal[
    "mean", "cls", "last", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"
]
"""Pooling of token vectors, with the names of sentence-transformers; "last" means "lasttoken"."""
Output: TypeAlias = Literal["embedding", "features"]
"""Output of a tower: unit-norm embeddings, or the backbone's features before the projector."""
Metric: TypeAlias = Literal["cosine", "ip"]
"""Index similarity: cosine or inner product ("ip")."""
Vectors: TypeAlias = "npt.NDArray[np.floating]"
"""(N, D) array in memory."""
Integers: TypeAlias = "npt.NDArray[np.integer]"


def opposite(side: Side) -> Side:
    """Return the other side."""
    return "right" if side == "left" else "left"


class Items(Protocol):
    """Raw items by position: `str`, RGB `PIL.Image`, or `np.ndarray` (D,). A list qualifies."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_several(argument: str, values: object) -> None:
    """Raise if a single string is given where several are expected."""
    if isinstance(values, (str, bytes)):
        shown = repr(values[:60])
        raise DualencError(
            f"{shown} is one text, not a list of texts", fix=f"give [{shown}]", where=argument
        )


def one_or_several(values: Iterable[Value] | str) -> Iterable[Value] | list[str]:
    """Return the values; a single string becomes a list of one."""
    return [values] if isinstance(values, str) else values
