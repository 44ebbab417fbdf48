"""Type aliases that several parts of the package share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

StrPath: TypeAlias = "str | os.PathLike[str]"
Side: TypeAlias = Literal["left", "right"]
"""A tower, and the items that it encodes."""
Modality: TypeAlias = Literal["text", "image", "vector"]
OnError: TypeAlias = Literal["skip", "raise"]
"""How to treat a sample that cannot be read: leave it out, count and report it; or stop the run."""
Inputs: TypeAlias = "dict[str, Tensor]"
"""Inputs of a tower: tensors by name, a row per item."""
Pooling: TypeAlias = Literal["mean", "cls", "last", "lasttoken", "max", "mean_sqrt_len_tokens", "weightedmean"]
"""How the vectors of a text's tokens are combined, by the names of sentence-transformers; "last" is "lasttoken"."""
Output: TypeAlias = Literal["embedding", "features"]
"""Outputs of a tower: unit-norm embeddings, or the backbone's features before the projector."""
Metric: TypeAlias = Literal["cosine", "ip"]
"""Of an index: cosine similarity, or inner product."""
Vectors: TypeAlias = "npt.NDArray[np.floating]"
"""(N, D) in memory."""
Integers: TypeAlias = "npt.NDArray[np.integer]"


class Items(Protocol):
    """Raw items by position: `str`, RGB `PIL.Image`, or `np.ndarray` (D,) for a vector. A list is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...
