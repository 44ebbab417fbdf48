"""Collections: connection, the description that dualenc stores in each one, and the hits of a search."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from types import ModuleType
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dualenc.errors import DualencError, UnknownId
from dualenc.full_disk import explain_full_disk
from dualenc.search.hits import Hit
from dualenc.search.where import Kind
from dualenc.types import Metric

Quantization = Literal["none", "scalar", "binary"]
"""Compression of the searched vectors: none, one byte per number, one bit per number. The best candidates are scored
again with the original vectors."""
QUANTIZATIONS = ("none", "scalar", "binary")


@dataclass(frozen=True)
class CollectionInfo:
    """Description of a collection, stored inside it when it is created.

    Attributes:
        fingerprint: checksum over the files of the embeddings.
        count: N, the number of vectors once all have arrived.
        dim: D.
        metric: "cosine" or "ip".
        dtype: "float16" or "float32", of the stored vectors.
        quantization: compression of the searched vectors.
        columns: the kind of each of the user's columns, by name.
        has_snippets: whether each id has a text to show.
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
    def from_dict(cls, values: Any, source: str) -> CollectionInfo:
        """From untrusted JSON.

        Raises:
            DualencError: an entry is missing or has the wrong type.
        """
        # All other entries are strings.
        types = {"count": int, "dim": int, "columns": dict, "has_snippets": bool}
        names = [field.name for field in fields(cls)]
        if not isinstance(values, dict) or any(not isinstance(values.get(n), types.get(n, str)) for n in names):
            raise DualencError(f"{source}: holds no embeddings that dualenc pushed; name another collection")
        return cls(**{name: values[name] for name in names})


class Connection:
    """The place of a collection, and errors that name it in one line.

    Attributes:
        target: URL, or the path of a folder.
        collection: its name in there.
        place: both, for messages.
        is_remote: whether the target is a URL.
    """

    def __init__(self, target: str, collection: str) -> None:
        self.target = target
        self.collection = collection
        self.place = f"{target} collection {collection!r}"
        self.is_remote = "://" in target

    def explain(self, error: Exception) -> str:
        """What an error of the client's library means."""
        return one_line(error)

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """Turn the library's errors, of many types, into one line; its warnings are for developers."""
        full_disk = nullcontext() if self.is_remote else explain_full_disk(self.target)
        try:
            with full_disk, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        except DualencError:
            raise
        except Exception as error:
            raise DualencError(f"{self.place}: {self.explain(error)}") from error


def as_hit(row: Mapping[str, Any], score: float) -> Hit:
    """A hit from a stored row; missing values are left out."""
    columns = {name: value for name, value in row.items() if value is not None}
    return Hit(str(columns.pop("id", "")), score, str(columns.pop("text", "")), columns)


def with_short_strings(schema: pa.Schema) -> pa.Schema:
    """The schema with 32-bit offsets of strings, without which LanceDB builds no index and Spark reads no column."""
    fields = [field.with_type(pa.string()) if pa.types.is_large_string(field.type) else field for field in schema]
    return pa.schema(fields)


def vectors_of(batch: pa.RecordBatch) -> np.ndarray:
    """The vectors (n, D) of a batch, a view of its memory."""
    column = batch.column("vector")
    matrix: np.ndarray = column.flatten().to_numpy(zero_copy_only=False).reshape(-1, column.type.list_size)
    return matrix


def in_order(ids: Sequence[str], vector_of: Mapping[str, Any]) -> np.ndarray:
    """The vectors of the requested ids, in their order: (n, D) float32.

    Raises:
        UnknownId: an id without a vector.
    """
    for name in ids:
        if name not in vector_of:
            raise UnknownId(f"the collection has no item {name[:200]!r}; give an id that it has returned")
    return np.array([vector_of[name] for name in ids], dtype=np.float32)


def one_line(error: Exception) -> str:
    """The beginning of an error's text, without line breaks."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def import_extra(module: str, package: str, extra: str) -> ModuleType:
    """Import a package that an extra installs.

    Raises:
        DualencError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is installed but lacks one of its own dependencies is another problem.
        if error.name is not None and error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise DualencError(f"this engine needs the package {package}: pip install 'dualenc[{extra}]'") from None
