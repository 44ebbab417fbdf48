"""Type aliases and checks of arguments that several parts of the package share."""

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
"""A tower, and the items that it encodes."""
Modality: TypeAlias = Literal["text", "image", "vector"]
OnError: TypeAlias = Literal["skip", "raise"]
"""How to treat a sample that cannot be read: leave it out, count and report it; or stop the run."""
Inputs: TypeAlias = "dict[str, Tensor]"
"""Inputs of a tower: tensors by name, a row per item."""
Pooling: TypeAlias = Literal[
    "mean", "cls", "last", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"
]
"""How the vectors of a text's tokens are combined, by the names of sentence-transformers; "last" is
"lasttoken"."""
Output: TypeAlias = Literal["embedding", "features"]
"""Outputs of a tower: unit-norm embeddings, or the backbone's features before the projector."""
Metric: TypeAlias = Literal["cosine", "ip"]
"""Of an index: cosine similarity, or inner product."""
Vectors: TypeAlias = "npt.NDArray[np.floating]"
"""(N, D) in memory."""
Integers: TypeAlias = "npt.NDArray[np.integer]"


class Items(Protocol):
    """Raw items by position: `str`, RGB `PIL.Image`, or `np.ndarray` (D,) for a vector. A list is
    one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def check_several(argument: str, values: object) -> None:
    """Raise a `DualencError` if a single text is given where several are expected."""
    if isinstance(values, (str, bytes)):
        shown = repr(values[:60])
        raise DualencError(f"{argument}: {shown} is one text, not a list of texts; give [{shown}]")


def one_or_several(values: Iterable[Value] | str) -> Iterable[Value] | list[str]:
    """Return the values; a single text becomes a list of one."""
    return [values] if isinstance(values, str) else values
