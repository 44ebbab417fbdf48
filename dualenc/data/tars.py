"""Tar shards of samples, as webdataset writes them: indexed once, then read at random like any other data.

Files of one shard that share their path up to the first dot of the name make a sample: `000/17.jpg`, `000/17.txt`.
The index of `shard.tar` is `shard.tar.index`, a parquet table with one row per sample.
"""

from __future__ import annotations

import glob
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
from tqdm import tqdm

from dualenc.data.arrow_cache import cache_folder
from dualenc.data.identity import file_identity
from dualenc.data.skips import Skips
from dualenc.errors import BadSample, DualencError
from dualenc.files import atomic_path, open_regular

if TYPE_CHECKING:
    import pyarrow as pa

_VERSION = 2  # of what an index holds; raise it when the scan changes
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # path up to the first dot of the file name, and what follows it

_UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8


class Member(NamedTuple):
    """One file of a tar: its sample, its extension and where its bytes are."""

    sample: str
    extension: str
    offset: int
    size: int


class Tars:
    """Reads bytes of several tars at random; safe to fork and to pickle."""

    _MOST_OPEN = 64

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open: dict[int, BinaryIO] = {}
        self._process = os.getpid()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """`size` bytes of tar `number` from `offset`.

        Raises:
            BadSample: the tar cannot be read any more.
        """
        try:
            return self._read(number, offset, size)
        except (OSError, DualencError) as error:
            raise BadSample(f"{self.paths[number]}: cannot be read ({error}); check the path") from None

    def _read(self, number: int, offset: int, size: int) -> bytes:
        if self._process != os.getpid():  # a forked child shares its parent's file positions
            self._open, self._process = {}, os.getpid()
        if number not in self._open:
            if len(self._open) >= self._MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = open_regular(self.paths[number])
        self._open[number].seek(offset)
        return self._open[number].read(size)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def find_tars(path: str | Path) -> list[Path]:
    """The tars that a file name, a folder or a glob means, sorted.

    Raises:
        DualencError: there is none.
    """
    pattern = str(Path(path) / "*.tar") if Path(path).is_dir() else str(path)
    found = [Path(pattern)] if Path(pattern).is_file() else sorted(Path(p) for p in glob.glob(pattern, recursive=True))
    if not found:
        raise DualencError(f"{path}: no such tar; give a .tar file, a folder of them or a glob like 'shards/*.tar'")
    return found


def index_tar(tar: Path, skips: Skips, index_folder: Path | None = None) -> pa.Table:
    """The samples of one tar, from its index if that is up to date; otherwise the tar is scanned once.

    Args:
        tar: an uncompressed tar.
        skips: is told of broken members.
        index_folder: where indexes are kept; by default beside the tar, or in the cache folder if that cannot be
            written to.

    Returns:
        Columns `sample`, and the lists `extension`, `offset` and `size` of its files; a row per sample.

    Raises:
        DualencError: not an uncompressed tar.
        BadSample: a truncated tar or a repeated member, under on_error="raise".
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with open_regular(tar) as stream:
            size, changed = os.fstat(stream.fileno()).st_size, os.fstat(stream.fileno()).st_mtime_ns
    except OSError as error:
        raise DualencError(f"{tar}: cannot be read ({error.strerror or error}); check the path") from None
    stamp = f"{_VERSION} {changed} {file_identity(tar).decode()}"
    places = [_index_path(tar, index_folder), _index_path(tar, cache_folder())]
    for place in places:
        known = _known_index(place, stamp, size)
        if known is not None:
            return known
    before = skips.total
    table = _grouped(tar, skips).replace_schema_metadata({"tar": stamp})
    if skips.total == before:  # the faults of a broken tar are to be told again next time
        for place in places:
            try:
                with atomic_path(place) as beside:
                    pq.write_table(table, beside)
                break
            except (OSError, pa.ArrowException):
                continue
    return table


def _known_index(place: Path, stamp: str, tar_size: int) -> pa.Table | None:
    """The index at a place, if it is one of this very tar; it came with the tar, perhaps, and is looked at like it."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    if not place.is_file():
        return None
    try:
        schema = pq.read_schema(place)
        if (schema.metadata or {}).get(b"tar") != stamp.encode() or not schema.equals(_schema()):
            return None
        table = pq.read_table(place)
        table.validate(full=True)
        starts, sizes = (pc.list_flatten(table[name]).to_numpy() for name in ("offset", "size"))
        lengths = [pc.list_value_length(table[name]).to_numpy() for name in ("extension", "offset", "size")]
    except (pa.ArrowException, OSError, ValueError):
        return None
    inside = len(starts) == len(sizes) and (starts >= 0).all() and (sizes >= 0).all()
    same = all(np.array_equal(lengths[0], other) for other in lengths[1:]) and not table["sample"].null_count
    return table if same and inside and (starts + sizes <= tar_size).all() else None


def _schema() -> pa.Schema:
    import pyarrow as pa

    numbers = pa.list_(pa.int64())
    fields = {"sample": pa.large_string(), "extension": pa.list_(pa.string()), "offset": numbers, "size": numbers}
    return pa.schema(list(fields.items()))


def _index_path(tar: Path, folder: Path | None) -> Path:
    if folder is None:
        return tar.with_name(f"{tar.name}.index")
    return Path(folder) / (re.sub(r"[^\w.-]", "_", str(tar.resolve())) + ".index")


def _members(tar: Path, skips: Skips) -> Iterator[Member]:
    """Files that belong to samples, in the order of the tar; what is no plain file in it is told to `skips`."""
    try:
        with (
            open_regular(tar) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
            tqdm(desc=tar.name, unit=" files", delay=2, leave=False) as bar,
        ):
            size, end = os.fstat(stream.fileno()).st_size, 0
            for info in archive:
                bar.update()
                if info.size < 0 or info.offset < end:  # a header that leads back would be read for ever
                    raise tarfile.ReadError("a member has a negative size")
                end = info.offset + 1
                match = _NAME.match(info.name)
                archive.members = []  # type: ignore[attr-defined]  # or a million of them stay in memory
                if info.isdir() or match is None or info.name.startswith("__"):
                    continue
                if not info.isreg() or info.issparse():
                    skips.bad(
                        "link, device, pipe or sparse file in a tar", f"{tar}: {info.name!r}", "pack the file itself"
                    )
                elif info.name.startswith("/") or ".." in info.name.split("/"):
                    skips.bad("name that leads out of a tar", f"{tar}: {info.name!r}", "pack it with relative names")
                elif _UNREADABLE.search(info.name):
                    skips.bad("name in a tar that is no text", f"{tar}: {info.name!r}", "rename the file")
                elif info.offset_data + info.size > size:
                    raise tarfile.ReadError(f"{info.name} is cut off")
                else:
                    yield Member(match[1], match[2].lower(), info.offset_data, info.size)
    except DualencError:
        raise
    except Exception as error:  # tarfile raises many kinds on broken headers
        if isinstance(error, tarfile.ReadError) and _is_compressed(tar):
            raise DualencError(f"{tar}: a compressed tar cannot be read at random; decompress it first") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        skips.bad("truncated or broken tar", str(tar), f"{reason}; fetch it again")


def _is_compressed(tar: Path) -> bool:
    with open(tar, "rb") as stream:
        return stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"))


def _grouped(tar: Path, skips: Skips) -> pa.Table:
    """One row per sample, in the order of their first files."""
    import pyarrow as pa

    samples: dict[str, dict[str, tuple[int, int]]] = {}
    for sample, extension, offset, size in _members(tar, skips):
        files = samples.setdefault(sample, {})
        if extension in files:
            skips.bad("file that stands twice in a tar", f"{tar}: {sample}.{extension}", "remove one of them")
        else:
            files[extension] = (offset, size)
    files_of = list(samples.values())
    columns = {
        "sample": list(samples),
        "extension": [list(files) for files in files_of],
        "offset": [[offset for offset, _ in files.values()] for files in files_of],
        "size": [[size for _, size in files.values()] for files in files_of],
    }
    return pa.table(columns, schema=_schema())
