"""Conversion of Arrow views, extension types and dictionaries to plain types.

dualenc and `datasets` read only plain types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types

from dualenc.errors import DualencError
from dualenc.types import StrPath

# By name: not every version of Arrow has a class for each extension type.
_EXTENSIONS = {"arrow.uuid": pa.string(), "arrow.bool8": pa.bool_()}
# Read as the type that they are stored as.
_STORED = ("arrow.json", "arrow.fixed_shape_tensor", "arrow.opaque")


def is_type(kind: pa.DataType, *names: str) -> bool:
    """Return True if `pyarrow.types.is_NAME` is true of an Arrow type for one of the names."""
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def is_list(kind: pa.DataType) -> bool:
    """Return True if values of an Arrow type are lists."""
    return is_type(kind, "list", "large_list", "fixed_size_list")


def plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the plain type as which a column of an Arrow type is read."""
    if isinstance(kind, pa.BaseExtensionType):
        plain = _EXTENSIONS.get(kind.extension_name, kind)
        return plain_type(kind.storage_type) if kind.extension_name in _STORED else plain
    if is_type(kind, "dictionary"):
        return plain_type(kind.value_type)
    if is_type(kind, "string_view"):
        return pa.large_string()
    if is_type(kind, "binary_view", "fixed_size_binary"):
        return pa.large_binary()
    if is_type(kind, "list_view", "list"):
        return _list_of(kind, pa.list_)
    if is_type(kind, "large_list_view", "large_list"):
        return _list_of(kind, pa.large_list)
    return kind


def _list_of(kind: pa.DataType, make: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Return a list type with plain values; the type itself if it is already plain."""
    plain = make(plain_type(kind.value_type))
    return kind if plain == kind else plain


def plain_batch(
    batch: pa.RecordBatch, schema: pa.Schema, keys: Mapping[str, Any]
) -> pa.RecordBatch:
    """Convert a batch to the types of a schema and add the keys of its partition."""
    arrays = []
    # In the order of the schema: files of one table may order their columns differently.
    for column in schema:
        if column.name in batch.schema.names:
            arrays.append(_plain_array(batch.column(column.name), column.type))
        else:
            # The file lacks this column: it is a partition key, or null.
            value = keys.get(column.name)
            if is_type(column.type, "string") and value is not None:
                value = str(value)
            arrays.append(pa.repeat(pa.scalar(value, column.type), len(batch)))
    return pa.record_batch(arrays, schema=schema)


def _plain_array(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Convert an array to a plain type."""
    if array.type == kind:
        return array
    if isinstance(array.type, pa.BaseExtensionType) and array.type.extension_name == "arrow.uuid":
        return pa.array(
            [None if value is None else str(value) for value in array.to_pylist()], kind
        )
    if isinstance(array, pa.ExtensionArray):
        return _plain_array(array.storage, kind)
    if is_type(kind, "list", "large_list"):
        # Arrow's cast from list_view gives invalid lists, so build them from lengths and values.
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
        is_large = is_type(kind, "large_list")
        offsets = pa.array(np.cumsum([0, *lengths]), pa.int64() if is_large else pa.int32())
        values = _plain_array(pc.list_flatten(array), kind.value_type)
        lists = pa.LargeListArray if is_large else pa.ListArray
        return lists.from_arrays(offsets, values, type=kind, mask=array.is_null())
    return array.cast(kind)


def check_types(source: StrPath, schema: pa.Schema) -> None:
    """Raise a `DualencError` for a column type that `datasets` does not support, such as a map."""
    from datasets import Features

    for column in schema:
        try:
            Features.from_arrow_schema(pa.schema([column.remove_metadata()]))
        except ValueError:
            raise DualencError(
                f"column {column.name!r} holds {column.type}, which cannot be read",
                fix="write it as texts, numbers or lists of them, or name another column",
                where=source,
            ) from None
