"""Opening tables: local files, saved datasets and hub names, all as a memory-mapped `datasets.Dataset`."""

from __future__ import annotations

import difflib
import glob
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal

from tqdm import tqdm

from dualenc.data.identity import file_identity
from dualenc.data.lines import LINE_FORMATS, file_format, read_records
from dualenc.data.pairs import Skips
from dualenc.data.remote import RemoteFile, expand, is_url, open_files, shown, url_suffix
from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json, write_json

if TYPE_CHECKING:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq
    from datasets import Dataset

TableFile = Path | RemoteFile
ColumnKind = Literal["value", "list", "vector", "vectors"]
Reshape = Callable[[dict[str, Any]], dict[str, Any]]
ONLY_SPLIT = "train"
"""What `datasets` calls the rows of a file."""
FILE, LINE = "__file__", "__line__"
TABLE_FORMATS = (*LINE_FORMATS, ".parquet")

IN_MEMORY_BYTES = 32 << 20
"""Files that are smaller than this together are kept in memory instead of the cache folder."""

_BATCH_ROWS = 2000
_ROWS_PEEKED = 100
_ROWS_BEFORE_MISSING = 1000  # a column absent from that many records is taken for a typing error
_VERSION = 2  # of what the cache holds; raise it when the reading changes


@dataclass
class DataTable:
    """Rows of named columns.

    Attributes:
        source: as the user named it.
        dataset: the rows, memory-mapped Arrow.
        skips: counts the bad samples of these rows.
        root: where relative image paths start.
        files: the local files behind it, empty for a hub name.
        allow_outside: whether image paths may lead out of `root`.
    """

    source: str
    dataset: Dataset
    skips: Skips
    root: Path
    files: list[Path] = field(default_factory=list)
    allow_outside: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def has(self, name: str) -> bool:
        """Whether there is such a column with at least one value in it."""
        return name in self.dataset.column_names and self.dataset.data.column(name).null_count < len(self)

    def tell(self, reason: str, rows: np.ndarray, mend: str) -> None:
        """Note some rows (n,) as bad samples, the first of them with its place."""
        if len(rows):
            self.skips.bad(reason, self.where(int(rows[0])), mend, len(rows))

    def where(self, row: int) -> str:
        """Where a row stands: file:line if it was read from lines."""
        if LINE not in self.dataset.column_names:
            return f"{self.source} row {row}"
        place = self.dataset.data.slice(row, 1)
        return f"{self.files[place.column(FILE)[0].as_py()]}:{place.column(LINE)[0].as_py()}"


def open_table(
    source: str | Path,
    columns: Mapping[str, ColumnKind],
    skips: Skips,
    *,
    optional: Collection[str] = (),
    split: str = "train",
    subset: str | None = None,
    limit: int | None = None,
    quotes: bool = True,
    reshape: Reshape | None = None,
    allow_outside: bool = False,
) -> DataTable:
    """Open a table wherever it is.

    Args:
        source: a .jsonl, .json, .csv, .tsv, .txt or .parquet file, a glob of such files, a folder of them, a folder
            written by `datasets.save_to_disk`, the name of a dataset on the Hugging Face hub, or a URL of such files
            (`dualenc.data.remote`), which go into the cache folder; of parquet only the named columns.
        columns: the columns to read, and whether each may hold a list; other columns are left alone.
        skips: is told of malformed lines.
        optional: columns of these that may be missing.
        split: which split of a folder, saved dataset or hub name, or slices of it as `datasets` writes them, such as
            train[:90%]; of a file the only one is train.
        subset: configuration of a hub dataset.
        limit: read the first rows of that only.
        quotes: whether `"` encloses fields of csv and tsv files.
        reshape: applied to each record of a line-based file before its columns are taken.
        allow_outside: whether image paths may lead out of the table's folder.

    Raises:
        DualencError: no such file, column or split; a broken file.
    """
    source = str(source)
    if limit is not None and not 1 <= limit <= sys.maxsize:
        raise DualencError(f"{shown(source)}: limit is {limit}; give the number of rows to read, from 1 on")
    files = find_files(source, split)
    required = [name for name in columns if name not in optional]
    first_rows = limit if is_whole(split) else None  # the rows of a slice are known once all have been read
    if not files:
        dataset = _from_datasets(source, subset, split)
    elif is_parquet(files[0]):
        check_columns(source, _parquet_schema(files[0]).names, required)  # before all of it is read
        dataset = _from_parquet(files, columns)
    else:
        files = [*_local(files)]
        dataset = table_of_lines(_local(files), columns, optional, skips, quotes, first_rows, reshape)
    check_columns(source, dataset.column_names, required)
    if files:
        dataset = _select_split({split_name(split): dataset}, split, shown(source))
    if limit is not None:
        dataset = dataset.select(range(min(limit, len(dataset))))
    if dataset._indices is not None:  # rows in another order than stored; columns are read as stored
        dataset = dataset.flatten_indices()
    from datasets import config

    root = Path(source if is_saved(source) else config.HF_CACHE_HOME)
    if files:  # a remote table has no folder: nothing lies in that of its key
        first = files[0]
        root = cache_folder() / "remote" / first.key if isinstance(first, RemoteFile) else first.parent
    here = [file for file in files if isinstance(file, Path)]
    return DataTable(shown(source), dataset, skips, root, here, allow_outside and not is_url(source))


def peek_columns(source: str | Path, split: str = "train", subset: str | None = None) -> dict[str, ColumnKind]:
    """The columns a table has and what they hold, without reading it whole: of records, the columns of the first, and
    what most of the first hundred hold.

    Lists of floating-point numbers are vectors ("vector"), lists of those several vectors ("vectors"); all other lists
    are lists.

    Raises:
        DualencError: no such file or split; a broken file.
    """
    files = find_files(str(source), split)
    if not files:
        schema = _from_datasets(str(source), subset, split).data.schema
    elif is_parquet(files[0]):
        schema = _parquet_schema(files[0])
    else:
        file = _local(files)[0]
        skips = Skips(file)
        kinds = _kinds_of_records(file, skips)
        skips.demand(len(kinds), "record")
        return kinds
    return {field.name: _kind_of_type(field.type) for field in schema}


def peek_lines(source: str | Path, split: str = "train", quotes: bool = True) -> dict[str, ColumnKind]:
    """What the columns of a line-based file hold, by its first records: how to read them, which other sources know.

    Raises:
        DualencError: no such file or split.
    """
    files = find_files(str(source), split)
    if not files or is_parquet(files[0]):
        return {}
    file = _local(files)[0]
    return _kinds_of_records(file, Skips(file), quotes)


def _kinds_of_records(file: Path, skips: Skips, quotes: bool = True) -> dict[str, ColumnKind]:
    head = [record for _, record in islice(read_records(file, skips, quotes), _ROWS_PEEKED)]
    result: dict[str, ColumnKind] = {}
    for name in head[0] if head else ():
        values = [record.get(name) for record in head]
        kinds = Counter(kind for kind in map(_kind_of_value, values) if kind is not None)
        otherwise: ColumnKind = "list" if any(isinstance(value, list) for value in values) else "value"
        result[name] = kinds.most_common(1)[0][0] if kinds else otherwise
    return result


def _kind_of_value(value: Any) -> ColumnKind | None:
    """None of nothing, and of lists of whole numbers, which may be meant either way."""
    if not isinstance(value, list):
        return None if value is None else "value"
    nested = all(isinstance(entry, (list, NoneType)) for entry in value) and any(value)
    lists = [entry or [] for entry in value] if nested else [value]
    types = {type(number) for entry in lists for number in entry}
    if types <= {int, NoneType}:
        return None
    if types <= {int, float, NoneType}:
        return "vectors" if nested else "vector"
    return "list"


def _kind_of_type(kind: pa.DataType) -> ColumnKind:
    import pyarrow as pa

    if "list" not in str(kind).partition("<")[0]:
        return "value"
    if pa.types.is_floating(kind.value_type):
        return "vector"
    return "vectors" if _kind_of_type(kind.value_type) == "vector" else "list"


def check_columns(source: str, available: Iterable[str], wanted: Iterable[str]) -> None:
    """Insist that columns are there: a `DualencError` names the missing one, the nearest one and all there are."""
    names = [name for name in available if name not in (FILE, LINE)]
    for name in wanted:
        if name not in names:
            nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
            hint = f"did you mean {nearest[0]!r}? (columns: {', '.join(names)})" if nearest else "it has no columns"
            raise DualencError(f"{shown(source)}: no column {name!r}; {hint}")


def cache_folder() -> Path:
    """Where converted files are kept: `dualenc` in the cache folder of `datasets` ($HF_DATASETS_CACHE)."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "dualenc"


# Line-based files: read once, into memory or into an Arrow file in the cache folder.


def table_of_lines(
    files: Sequence[Path],
    columns: Mapping[str, ColumnKind],
    optional: Collection[str],
    skips: Skips,
    quotes: bool = True,
    limit: int | None = None,
    reshape: Reshape | None = None,
) -> Dataset:
    """Read the named columns of line-based files of one format; the arguments are those of `open_table`.

    Returns:
        The columns, as strings ("value"), lists of strings ("list"; a single text is a list of one), lists of numbers
        ("vector") or lists of those ("vectors"; a single one is a list of one), and with them the file number and line
        of each row. What `skips` was told is remembered in the cache, too.

    Raises:
        DualencError: an unreadable file, a column that no record has, a cache that is damaged or cannot be written.
    """
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import InMemoryTable

    vector = pa.large_list(pa.float32())
    types = {"value": pa.large_string(), "list": pa.list_(pa.large_string())}
    types |= {"vector": vector, "vectors": pa.large_list(vector)}
    fields = [(name, types[kind]) for name, kind in columns.items()]
    schema = pa.schema([*fields, (FILE, pa.int32()), (LINE, pa.int64())])
    rows = islice(_rows(files, columns, optional, skips, quotes, reshape), limit)
    blocks = iter(lambda: list(islice(rows, _BATCH_ROWS)), [])
    batches = (pa.RecordBatch.from_pylist(block, schema=schema) for block in blocks)
    if sum(file.stat().st_size for file in files) <= IN_MEMORY_BYTES:
        return Dataset(InMemoryTable(pa.Table.from_batches(batches, schema=schema)))
    facts = [(str(file.resolve()), file.stat().st_mtime_ns, file_identity(file).decode()) for file in files]
    reshaped = str(reshape and reshape.__qualname__)
    key = json.dumps([_VERSION, facts, list(columns.items()), quotes, limit, skips.on_error, reshaped])
    return _cached_arrow(key, schema, batches, skips)


def _cached_arrow(key: str, schema: pa.Schema, batches: Iterable[pa.RecordBatch], skips: Skips | None) -> Dataset:
    """Batches as a file of the cache folder, mapped into memory; they are read only if it is not there.

    Args:
        key: tells what is in the file from everything else.
        schema: of the batches.
        batches: the rows; only one at a time is in memory.
        skips: what reading tells it is kept beside the file and told again.

    Raises:
        DualencError: a cache that is damaged or cannot be written, or what reading raises.
    """
    import pyarrow as pa
    from datasets import Dataset

    target = cache_folder() / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.arrow"
    counts = target.with_suffix(".json")
    if target.is_file() and (skips is None or counts.is_file()):
        known = {"counts": {}, "first": {}} if skips is None else read_json(counts)
        if not isinstance(known, dict) or not all(isinstance(known.get(part), dict) for part in ("counts", "first")):
            raise DualencError(f"{counts}: damaged data cache; remove this file")
        if skips is not None:
            skips.counts.update(known["counts"])
            skips.first.update(known["first"])
    else:
        # Not Dataset.from_generator: a million rows of jsonl took 40 s with it (20 s with datasets' ArrowWriter) and
        # take 11 s here, of which 7 s are reading; and it would turn our errors into its own DatasetGenerationError.
        try:
            with atomic_path(target) as part:
                with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
                    for batch in batches:
                        writer.write_batch(batch)
                if skips is not None:
                    write_json(counts, {"counts": skips.counts, "first": skips.first})
        except OSError as error:
            reason = error.strerror or _first_line(error)
            raise DualencError(
                f"{target.parent}: cannot write the data cache ({reason}); set HF_DATASETS_CACHE to another folder"
            ) from None
    try:
        return Dataset.from_file(str(target))
    except (pa.ArrowException, OSError) as error:
        raise DualencError(f"{target}: damaged data cache ({_first_line(error)}); remove this file") from None


def _rows(
    files: Sequence[Path],
    columns: Mapping[str, ColumnKind],
    optional: Collection[str],
    skips: Skips,
    quotes: bool,
    reshape: Reshape | None,
) -> Iterator[dict[str, Any]]:
    """Each record's wanted columns; insists early that every one that must be there is met with."""
    convert_to = {"value": _text, "list": _texts, "vector": _vector, "vectors": _vectors}
    converters = [(name, convert_to[kind]) for name, kind in columns.items()]
    absent = {name for name in columns if name not in optional}
    seen: dict[str, None] = {}
    count = 0
    for number, file in enumerate(files):
        for line, record in read_records(file, skips, quotes):
            try:
                if reshape is not None:
                    record = reshape(record)
                if absent:
                    seen.update(dict.fromkeys(record))
                    absent -= record.keys()
                    if count >= _ROWS_BEFORE_MISSING:
                        check_columns(str(file), seen, absent)
                count += 1
                row = {name: convert(record.get(name)) for name, convert in converters}
            except (TypeError, UnicodeEncodeError) as error:
                skips.bad("value of a wrong type", f"{file}:{line}", f"{error}; mend the line")
            else:
                yield {**row, FILE: number, LINE: line}
    if count:
        check_columns(str(files[0]), seen, absent)


def _text(value: Any) -> str | None:
    """A record's value as one text; a TypeError or UnicodeEncodeError if it is none."""
    if isinstance(value, str):
        if not value.isascii():
            value.encode()  # half a surrogate pair, which JSON can escape, is no text
        if "\0" in value:
            raise TypeError("a NUL character stands in the text, as when UTF-16 is read as UTF-8")
        return value
    if isinstance(value, (dict, list)):
        raise TypeError(f"a {type(value).__name__} stands where one text is expected")
    return None if value is None else json.dumps(value)  # numbers and truth values


def _texts(value: Any) -> list[str | None]:
    if value is None:
        return []
    return [_text(entry) for entry in value] if isinstance(value, list) else [_text(value)]


def _vector(value: Any) -> list[float] | None:
    """A record's value as numbers; a TypeError if it is something else. null in it becomes NaN, which is told later."""
    if value is None:
        return None
    if not isinstance(value, list) or not all(type(entry) in (int, float, NoneType) for entry in value):
        raise TypeError(f"a {type(value).__name__} stands where a list of numbers is expected")
    return [math.nan if entry is None or abs(entry) > 1e300 else float(entry) for entry in value]


def _vectors(value: Any) -> list[list[float] | None]:
    if isinstance(value, list) and all(isinstance(entry, (list, NoneType)) for entry in value):
        return [_vector(entry) for entry in value]
    return [] if value is None else [_vector(value)]


# Every other source.


def find_files(source: str, split: str) -> list[TableFile]:
    """The table files that a path, glob, folder or URL means, sorted; none of a saved data set or a hub name.

    Of a folder, the files named SPLIT.*, SPLIT-* or SPLIT_* in it or in its `data` folder, as the hub lays them out;
    everything else is one split, train.

    Raises:
        DualencError: nothing matches, the formats differ, or there is no such split.
    """
    if has_one_split(source) and split_name(split) != ONLY_SPLIT:
        raise DualencError(f"{shown(source)}: no split {split!r}; there are: {ONLY_SPLIT}")
    if is_url(source):
        urls = expand(source)
        formats = {url_suffix(url) for url in urls}
        if len(formats) > 1 or not formats <= set(TABLE_FORMATS):
            raise DualencError(
                f"{shown(source)}: no table ({', '.join(sorted(formats)) or 'no suffix'}); give the URL of files of "
                f"one format among {', '.join(TABLE_FORMATS)}, or of .tar files"
            )
        return [*open_files(urls)]
    path = Path(source)
    files: list[Path] = []
    if is_saved(path):
        return []
    if path.is_file():
        files = [path]
    elif path.is_dir():
        inside = [p for folder in (path, path / "data") if folder.is_dir() for p in folder.iterdir() if p.is_file()]
        split_of = {p: re.split(r"[._-]", p.name)[0] for p in sorted(inside) if file_format(p) in TABLE_FORMATS}
        files = [p for p, found in split_of.items() if found == split_name(split)]
        if split_of and not files:
            raise DualencError(f"{path}: no split {split!r}; there are: {', '.join(sorted(set(split_of.values())))}")
    elif any(c in source for c in "*?["):
        files = sorted(Path(match) for match in glob.glob(source, recursive=True) if Path(match).is_file())
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source) and file_format(path) not in TABLE_FORMATS:
        return []
    if not files:
        raise DualencError(f"{source}: no such file; give a file, folder or glob of {', '.join(TABLE_FORMATS)}")
    formats = {file_format(file) for file in files}
    if len(formats) > 1 or not formats <= set(TABLE_FORMATS):
        raise DualencError(
            f"{source}: cannot be read as one table ({', '.join(sorted(formats))}); "
            f"give files of one format among {', '.join(TABLE_FORMATS)}"
        )
    return [*files]


def has_one_split(source: str | Path) -> bool:
    """Whether a source is one split and no more: files by name, glob or URL, or a saved data set without splits."""
    path = Path(source)
    if is_url(source) or path.is_file() or (path / "state.json").is_file():
        return True
    return not path.is_dir() and any(c in str(source) for c in "*?[")


def split_name(split: str) -> str:
    """The one name in a split such as train[:10%]+train[90%:]; several of different names as they stand."""
    names = {part.partition("[")[0].strip() for part in split.split("+")}
    return names.pop() if len(names) == 1 else split


def is_whole(split: str) -> bool:
    """Whether a split is a name alone, and no slice."""
    return split_name(split) == split


def check_whole(source: str | Path, split: str) -> None:
    """Insist that no other split, and no slice, is wanted of what has neither: tars and vectors."""
    if split != ONLY_SPLIT:
        raise DualencError(f"{shown(source)}: no split {split!r}, for it has neither splits nor slices; leave it out")


def _select_split(splits: Mapping[str, Dataset], split: str, source: str) -> Dataset:
    """The rows of a split, or of slices of splits, as `datasets` reads them."""
    from datasets import ReadInstruction, concatenate_datasets

    if split in splits:
        return splits[split]
    try:
        parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    except (ValueError, AssertionError) as error:
        raise DualencError(
            f"{source}: no split {split!r}; there are: {', '.join(splits)}, and slices such as train[:90%] "
            f"({_first_line(error).rstrip('.')})"
        ) from None
    slices = [splits[part.splitname].select(range(part.from_, part.to)) for part in parts if part.from_ < part.to]
    if not slices:
        sizes = ", ".join(f"{name} {len(rows):,}" for name, rows in splits.items())
        raise DualencError(f"{source}: split {split!r} has no rows (of {sizes}); widen the slice")
    return concatenate_datasets(slices)


def is_parquet(file: TableFile) -> bool:
    """Whether that is how to read a file of a table."""
    return file_format(Path(file.name)) == ".parquet"


def _local(files: Sequence[TableFile]) -> list[Path]:
    """The files on this machine, remote ones as copies in the cache folder."""
    return [file.copy() if isinstance(file, RemoteFile) else file for file in files]


def is_saved(source: str | Path) -> bool:
    """Whether `datasets.save_to_disk` wrote this folder."""
    return any((Path(source) / name).is_file() for name in ("state.json", "dataset_dict.json"))


def _from_datasets(source: str, subset: str | None, split: str) -> Dataset:
    """A saved data set, or one of the hub; both raise errors of many kinds."""
    import datasets

    if is_saved(source):
        try:
            loaded = datasets.load_from_disk(source)
        except Exception as error:
            reason = f"saved data set cannot be read ({_first_line(error)}); save it again"
            raise DualencError(f"{source}: {reason}") from None
        return _select_split(loaded if isinstance(loaded, dict) else {ONLY_SPLIT: loaded}, split, source)
    try:
        return datasets.load_dataset(source, subset, split=split)
    except Exception as error:
        raise DualencError(
            f"{source}: no such file here, and as a dataset of the hub it does not load ({_first_line(error)}); "
            "check the name, subset and split, and the network"
        ) from error


def _from_parquet(files: Sequence[TableFile], columns: Mapping[str, ColumnKind]) -> Dataset:
    """The named columns of parquet files, as far as they have them; row group after row group goes into the cache.

    Not `datasets.load_dataset`: of 306 MiB of texts it had 270 MiB in memory, and took four times as long.
    """
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import InMemoryTable

    schema = _parquet_schema(files[0])
    names = [name for name in schema.names if name in columns] or schema.names
    for file in files:
        check_columns(str(file), _parquet_schema(file).names, names)
    fields = [schema.field(name) for name in names]
    plain = [f.with_type(f.type.value_type) if pa.types.is_dictionary(f.type) else f for f in fields]
    schema = pa.schema(plain, metadata=schema.metadata)

    def batches() -> Iterator[pa.RecordBatch]:
        with tqdm(desc=files[0].name, unit=" rows", delay=2, leave=False) as bar:
            for file in files:
                try:
                    with _open_parquet(file) as opened:
                        for group in range(opened.num_row_groups):  # of which pyarrow keeps what it has buffered
                            for batch in opened.iter_batches(_BATCH_ROWS, row_groups=[group], columns=names):
                                bar.update(len(batch))
                                yield from pa.Table.from_batches([batch]).select(names).cast(schema).to_batches()
                except (pa.ArrowException, OSError, ValueError) as error:  # broken pages, files that differ
                    raise DualencError(f"{file}: cannot be read ({_first_line(error)}); fetch it again") from None

    remote = [file for file in files if isinstance(file, RemoteFile)]
    sizes = [file.size if isinstance(file, RemoteFile) else file.stat().st_size for file in files]
    if sum(sizes) <= IN_MEMORY_BYTES:
        return Dataset(InMemoryTable(pa.Table.from_batches(batches(), schema=schema)))
    facts = [file.key for file in remote] or [file_identity(file).decode() for file in _local(files)]
    return _cached_arrow(json.dumps([_VERSION, "parquet", facts, names]), schema, batches(), None)


def _open_parquet(file: TableFile) -> pq.ParquetFile:
    import pyarrow.parquet as pq

    return pq.ParquetFile(file.stream(buffered=False) if isinstance(file, RemoteFile) else file)


def _parquet_schema(file: TableFile) -> pa.Schema:
    import pyarrow as pa

    try:
        with _open_parquet(file) as opened:
            schema = opened.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise DualencError(f"{file}: not a readable parquet file ({_first_line(error)}); fetch it again") from None
    twice = next((name for i, name in enumerate(schema.names) if name in schema.names[:i]), None)
    if twice is not None:
        raise DualencError(f"{file}: two columns are called {twice!r}; rename one of them")
    return schema


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
