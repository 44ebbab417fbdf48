"""Names for what several parts of the package pass to one another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

Side: TypeAlias = Literal["left", "right"]
"""A tower, and the items that it encodes."""
Modality: TypeAlias = Literal["text", "image", "vector"]
OnError: TypeAlias = Literal["skip", "raise"]
"""What happens to a sample that cannot be read: left out, counted and reported; or the run stops."""
Inputs: TypeAlias = "dict[str, Tensor]"
"""What a tower takes: tensors by name, a row per item."""
Pooling: TypeAlias = Literal["mean", "cls", "last"]
"""How the vectors of a text's tokens become one."""
Output: TypeAlias = Literal["embedding", "features"]
"""What a tower gives: unit-norm embeddings, or the backbone's features before the projector."""
Metric: TypeAlias = Literal["cosine", "ip"]
"""Of an index: cosine similarity, or inner product."""
Vectors: TypeAlias = "npt.NDArray[np.floating]"
"""(N, D) in memory."""
Integers: TypeAlias = "npt.NDArray[np.integer]"


class Items(Protocol):
    """Raw items by position: `str`, RGB `PIL.Image`, or `np.ndarray` (D,) for a vector. A list is one."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...
