"""What an engine is asked to do, and what is told about a collection in it."""

from __future__ import annotations

import importlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar

import numpy as np

from dualenc.errors import DualencError, UnknownId
from dualenc.search.engines.where import Condition, Kind
from dualenc.types import Metric

if TYPE_CHECKING:
    import pyarrow as pa

Quantization = Literal["none", "scalar", "binary"]
"""How an engine compresses the vectors that it searches: not, to a byte per number, or to a bit. The best found are
scored again with the vectors themselves."""
QUANTIZATIONS = ("none", "scalar", "binary")
ATTEMPTS = 5
FIRST_WAIT_S = 0.5

T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """What a collection holds; it is written into the collection itself when that is made.

    Attributes:
        fingerprint: checksum over the files of the embeddings.
        count: N, how many vectors there are once all have arrived.
        dim: D.
        metric: "cosine" or "ip".
        dtype: "float16" or "float32", of the stored vectors.
        quantization: how the vectors that are searched are compressed.
        columns: what the columns beside id, vector and snippet hold, by name.
        has_snippets: whether there is a text to show with each id.
    """

    fingerprint: str
    count: int
    dim: int
    metric: Metric
    dtype: str
    quantization: Quantization
    columns: dict[str, Kind]
    has_snippets: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any, where: str) -> About:
        """From JSON that may have been written by anybody.

        Raises:
            DualencError: it lacks something.
        """
        kinds = {"count": int, "dim": int, "columns": dict, "has_snippets": bool}
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or any(not isinstance(values.get(n), kinds.get(n, str)) for n in names):
            raise DualencError(f"{where}: holds no embeddings that dualenc pushed; name another collection")
        return cls(**{name: values[name] for name in names})


class Hit(NamedTuple):
    """One result: the item's id, its score (higher is nearer), and what was kept with it, if that was asked for."""

    id: str
    score: float
    snippet: str
    columns: dict[str, Any]


class Engine(ABC):
    """A collection in a vector search engine; it need not exist yet.

    Attributes:
        kind: what the command line calls the engine.
        target: URL or path.
        collection: name in there.
    """

    kind: ClassVar[str]

    def __init__(self, target: str, collection: str) -> None:
        self.target, self.collection = target, collection

    @cached_property
    def known(self) -> About:
        """What the collection says of itself, asked for once.

        Raises:
            DualencError: there is no such collection.
        """
        about = self.about()
        if about is None:
            raise DualencError(f"{self.place}: is not there; run `dualenc push` again")
        return about

    @property
    def place(self) -> str:
        """What to call the collection in a message."""
        return f"{self.target} collection {self.collection!r}"

    @abstractmethod
    def about(self) -> About | None:
        """What the collection says of itself; None if there is none.

        Raises:
            DualencError: there is one that dualenc did not make.
        """

    @abstractmethod
    def create(self, about: About) -> None:
        """Make the empty collection."""

    @abstractmethod
    def drop(self) -> None:
        """Remove the collection with all that is in it."""

    @abstractmethod
    def batch_rows(self, about: About) -> int:
        """How many vectors to send at once."""

    @abstractmethod
    def present(self, ids: Sequence[str]) -> np.ndarray:
        """Which of some ids (n,) the collection holds: (n,) bool."""

    @abstractmethod
    def add(self, ids: Sequence[str], vectors: np.ndarray, snippets: Sequence[str] | None, columns: pa.Table) -> None:
        """Store a batch durably; an id that is already there is not doubled.

        Args:
            ids: (n,).
            vectors: (n, D) float32, finite, of unit length for "cosine".
            snippets: (n,) texts, or None.
            columns: (n,) rows.
        """

    @abstractmethod
    def finish(self, about: About) -> None:
        """Build what the engine searches by, once every batch has arrived; does nothing the second time."""

    @abstractmethod
    def count(self, where: Sequence[Condition] = ()) -> int:
        """How many items there are that meet all conditions."""

    @abstractmethod
    def vectors(self, ids: Sequence[str]) -> np.ndarray:
        """The stored vectors of some ids: (n, D) float32.

        Raises:
            UnknownId: an id that is not there.
        """

    @abstractmethod
    def query(
        self,
        vectors: np.ndarray,
        k: int,
        where: Sequence[Condition] = (),
        *,
        payload: bool = True,
        nprobe: int | None = None,
        ef_search: int | None = None,
    ) -> list[list[Hit]]:
        """The best items for each query, best first; fewer than k where fewer meet the conditions.

        Args:
            vectors: (Q, D) float32.
            k: how many items.
            where: conditions, all of which must hold.
            payload: fetch snippets and columns, too.
            nprobe: lists that an inverted index visits; by default the engine's own.
            ef_search: candidates that a graph keeps; by default the engine's own.
        """

    def close(self) -> None:
        """Let go of files and connections."""
        return


def import_extra(module: str, package: str, extra: str) -> ModuleType:
    """Import a package that comes with an extra.

    Raises:
        DualencError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise DualencError(f"this engine needs the package {package}: pip install 'dualenc[{extra}]'") from None


def in_order(ids: Sequence[str], found: Mapping[str, Any]) -> np.ndarray:
    """The vectors that an engine has found for ids, in their order: (n, D) float32.

    Raises:
        UnknownId: one is missing.
    """
    for name in ids:
        if name not in found:
            raise UnknownId(f"the collection has no item {name[:200]!r}; give an id that it has returned")
    return np.array([found[name] for name in ids], dtype=np.float32)


def persist(call: Callable[[], T], is_passing: Callable[[Exception], bool]) -> T:
    """Try up to five times, waiting 0.5, 1, 2 and 4 seconds, while errors are of a kind that may pass."""
    for attempt in range(ATTEMPTS):
        try:
            return call()
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not is_passing(error):
                raise
            time.sleep(FIRST_WAIT_S * 2**attempt)
    raise AssertionError("unreachable")
