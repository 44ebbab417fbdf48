"""Read one id per row: lines of a text file, a .npy array, or a column of a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import row_ids
from dualenc.data.readers.detect import detect_locally
from dualenc.data.readers.id_columns import usual_id_column
from dualenc.data.readers.tables import TableSource
from dualenc.errors import DualencError, explain
from dualenc.io.reading import with_home
from dualenc.types import StrPath


def read_ids(path: StrPath, column: str | None = None) -> list[str]:
    """Read the id of each row.

        read_ids("ids.txt")
        read_ids("documents.parquet", "asin")

    Args:
        path: .txt file with an id per line, .npy array (N,) of integers or strings, or table.
        column: column of a table; None finds a usual name, or takes the only column.

    Raises:
        DualencError: the file is missing or unreadable, or a row has no id.
    """
    file = with_home(Path(path))
    if file.suffix == ".txt":
        ids = _lines(file)
    elif file.suffix == ".npy":
        ids = _array(file)
    else:
        ids = _column(file, column)
    for row, name in enumerate(ids):
        if name is None or not name.strip():
            raise DualencError(f"row {row} has no id", fix="give each vector one", where=path)
    return [name for name in ids if name is not None]


def _lines(file: Path) -> list[str | None]:
    """Read an id per line."""
    if not file.is_file():
        raise DualencError("no such file", fix="give a file with an id per line", where=file)
    with explain(f"{file}: not a text in UTF-8", "save it in UTF-8"):
        text = file.read_text("utf-8-sig")
    # Not splitlines: an id may contain other separators, such as U+2028.
    return list(text.removesuffix("\n").split("\n"))


def _array(file: Path) -> list[str | None]:
    """Read integers or strings; pickled objects are never loaded."""
    if not file.is_file():
        raise DualencError("no such file", fix="give an array of ids", where=file)
    with explain(f"{file}: not a readable .npy file", "write it with numpy.save"):
        array: np.ndarray = np.lib.format.open_memmap(file, mode="r")
    if array.ndim != 1 or array.dtype.kind not in "iuU":
        raise DualencError(
            f"holds {array.dtype} of shape {array.shape}, not N integers or strings",
            fix="save an id per row",
            where=file,
        )
    return [str(value) for value in array.tolist()]


def _column(file: Path, column: str | None) -> list[str | None]:
    """Read a column of a table."""
    bad_rows = BadRows(file)
    table = TableSource(file, bad_rows, kind=detect_locally(file))
    if column is None:
        only = list(table.kinds) if len(table.kinds) == 1 else [None]
        column = usual_id_column(table, "") or only[0]
    if column is None:
        raise DualencError(
            "it is unclear which column holds the ids",
            fix=f"name it with --id-column (columns: {', '.join(table.kinds)})",
            where=file,
        )
    opened = table.open({column: "value"})
    bad_rows.report()
    return row_ids(opened, column)
