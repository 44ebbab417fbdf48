"""Indexes of webdataset tars: where the files of each sample lie, found by one scan and kept."""

from __future__ import annotations

import os
import re
import tarfile
from array import array
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from dualenc.data.cache import cache_folder
from dualenc.data.identity import file_identity
from dualenc.data.skips import Skips
from dualenc.errors import BadSample, DualencError
from dualenc.files import atomic_path
from dualenc.reading import open_regular

_VERSION = 2  # of what an index holds; raise it when the scan changes
_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # path up to the first dot of the file name, and what follows it
_UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstandard

_NUMBERS = pa.list_(pa.int64())
_SCHEMA = pa.schema(
    [("sample", pa.large_string()), ("extension", pa.list_(pa.string())), ("offset", _NUMBERS), ("size", _NUMBERS)]
)


class Tars:
    """Random reads in several tars; safe to fork and to pickle."""

    _MAX_OPEN = 64

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._open: dict[int, BinaryIO] = {}
        self._process = os.getpid()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """`size` bytes of tar `number` from `offset`.

        Raises:
            BadSample: the tar cannot be read any more.
        """
        path = self.paths[number]
        # A forked child shares its parent's file positions.
        if self._process != os.getpid():
            self._open = {}
            self._process = os.getpid()
        try:
            if number not in self._open:
                # Thousands of shards would exceed the limit of open files.
                if len(self._open) >= self._MAX_OPEN:
                    self._open.pop(next(iter(self._open))).close()
                self._open[number] = open_regular(path)
            self._open[number].seek(offset)
            return self._open[number].read(size)
        except (OSError, DualencError) as error:
            raise BadSample(f"{path}: cannot be read ({error}); check the path") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def index_tar(tar: Path, skips: Skips, index_folder: Path | None = None) -> pa.Table:
    """The samples of one tar, from its index if that is up to date; otherwise the tar is scanned once.

    `skips` counts broken members. A row per sample: its name, and lists of its files' extensions, offsets and sizes.
    """
    size, stamp, places = _places_of_index(tar, index_folder)
    for place in places:
        index = _read_index(place, stamp, size)
        if index is not None:
            return index
    before = skips.total
    table = _scan(tar, skips).replace_schema_metadata({"tar": stamp})
    # The faults of a broken tar must be reported again next time.
    if skips.total > before:
        return table
    for place in places:
        with suppress(OSError, UnicodeError, pa.ArrowException), atomic_path(place) as part:
            pq.write_table(table, part)
            break
    return table


def _places_of_index(tar: Path, index_folder: Path | None) -> tuple[int, str, list[Path]]:
    """The size and version of a tar, and where its index may be, best place first."""
    try:
        with open_regular(tar) as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise DualencError(f"{tar}: cannot be read ({error.strerror or error}); check the path") from None
    stamp = f"{_VERSION} {status.st_mtime_ns} {file_identity(tar).decode()}"
    # In a shared folder the whole path keeps indexes of equal names apart.
    unique = re.sub(r"[^\w.-]", "_", str(tar.resolve())) + ".index"
    chosen = tar.with_name(f"{tar.name}.index") if index_folder is None else index_folder / unique
    return status.st_size, stamp, [chosen, cache_folder() / unique]


def _read_index(place: Path, stamp: str, tar_size: int) -> pa.Table | None:
    """The index at a place, if it is one of this very tar. It may have come with the tar, so it is untrusted."""
    if not place.is_file():
        return None
    try:
        schema = pq.read_schema(place)
        if (schema.metadata or {}).get(b"tar") != stamp.encode() or not schema.equals(_SCHEMA):
            return None
        table = pq.read_table(place)
        # The offsets of its lists come from the file too: unchecked, Arrow would read beyond its memory.
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError):
        return None
    starts, sizes = (pc.list_flatten(table[name]).to_numpy() for name in ("offset", "size"))
    lengths = [pc.list_value_length(table[name]).to_numpy() for name in ("extension", "offset", "size")]
    same_lengths = all(np.array_equal(lengths[0], other) for other in lengths[1:])
    if not same_lengths or table["sample"].null_count or len(starts) != len(sizes):
        return None
    # An index from elsewhere must not lead out of its tar.
    inside = (starts >= 0) & (sizes >= 0) & (starts + sizes <= tar_size)
    return table if inside.all() else None


class _Scan:
    """The files of a tar's samples, collected in the order of the tar.

    Attributes:
        rows: the number of each sample by its name.
        extensions: the number of each extension.
        files: of each file its sample, extension, offset and size. Objects would take ten times the memory.
    """

    def __init__(self, tar: Path, skips: Skips) -> None:
        self.tar = tar
        self.skips = skips
        self.rows: dict[str, int] = {}
        self.extensions: dict[str, int] = {}
        self.files = array("q")

    def read(self, stream: BinaryIO) -> None:
        """Walk through the headers; a `tarfile.ReadError` where the tar is broken."""
        size = stream.seek(0, os.SEEK_END)
        stream.seek(0)
        end = 0
        with (
            tarfile.open(fileobj=stream, mode="r:") as archive,
            tqdm(desc=self.tar.name, unit=" files", delay=2, leave=False) as bar,
        ):
            for member in archive:
                bar.update()
                # A header that leads back would be read for ever.
                if member.size < 0 or member.offset < end:
                    raise tarfile.ReadError("a member has a negative size")
                end = member.offset + 1
                # tarfile would keep them: a million in memory.
                archive.members = []  # type: ignore[attr-defined]
                self._add(member, size)

    def _add(self, member: tarfile.TarInfo, tar_size: int) -> None:
        match = _MEMBER.match(member.name)
        if member.isdir() or match is None or member.name.startswith("__"):
            return
        where = f"{self.tar}: {member.name!r}"
        if not member.isreg() or member.issparse():
            self.skips.bad("link, device, pipe or sparse file in a tar", where, "pack the file itself")
        elif member.name.startswith("/") or ".." in member.name.split("/"):
            self.skips.bad("name that leads out of a tar", where, "pack it with relative names")
        elif _UNREADABLE.search(member.name):
            self.skips.bad("name in a tar that is no text", where, "rename the file")
        elif member.offset_data + member.size > tar_size:
            raise tarfile.ReadError(f"{member.name} is cut off")
        else:
            row = self.rows.setdefault(match[1], len(self.rows))
            extension = self.extensions.setdefault(match[2].lower(), len(self.extensions))
            self.files.extend((row, extension, member.offset_data, member.size))

    def table(self) -> pa.Table:
        """One row per sample, in the order of their first files; `skips` counts repeated files."""
        names = pa.array(list(self.rows), pa.large_string())
        kinds = pa.array(list(self.extensions), pa.string())
        files = np.frombuffer(self.files, dtype=np.int64).reshape(-1, 4)
        _, first = np.unique(files[:, 0] * max(1, len(kinds)) + files[:, 1], return_index=True)
        for row, extension in np.delete(files, first, axis=0)[:, :2].tolist():
            place = f"{self.tar}: {names[row]}.{kinds[extension]}"
            self.skips.bad("duplicate file in a tar", place, "remove one of them")
        # Of duplicates the first one counts, as it does for tar readers that scan.
        files = files[np.sort(first)]
        files = files[np.argsort(files[:, 0], kind="stable")]
        # Files are sorted by sample now: the lists follow from their lengths.
        counts = np.bincount(files[:, 0], minlength=len(names))
        starts = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
        values = [kinds.take(pa.array(files[:, 1])), pa.array(files[:, 2]), pa.array(files[:, 3])]
        lists = [pa.ListArray.from_arrays(starts, value) for value in values]
        return pa.Table.from_arrays([names, *lists], schema=_SCHEMA)


def _scan(tar: Path, skips: Skips) -> pa.Table:
    """The index of a tar; `skips` counts what is no plain file of a sample."""
    scan = _Scan(tar, skips)
    with open_regular(tar) as stream:
        try:
            scan.read(stream)
        except DualencError:
            raise
        except Exception as error:  # tarfile raises many kinds on broken headers
            stream.seek(0)
            if isinstance(error, tarfile.ReadError) and stream.read(6).startswith(_COMPRESSED):
                raise DualencError(f"{tar}: a compressed tar cannot be read at random; decompress it first") from None
            reason = " ".join(str(error).split()) or type(error).__name__
            skips.bad("truncated or broken tar", str(tar), f"{reason}; fetch it again")
    return scan.table()
