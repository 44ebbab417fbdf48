"""Indexes of webdataset tars: where the files of each sample lie, found by one scan and kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

from dualenc.data.bad_rows import BadRows
from dualenc.data.cache import cache_folder
from dualenc.data.identity import file_identity
from dualenc.errors import BadSample, DualencError, first_line
from dualenc.files import atomic_path
from dualenc.reading import is_utf8, open_regular

_VERSION = 4  # of what an index holds; raise it when the scan changes
_MEMBER = re.compile(
    r"^((?:.*/|)[^.]+)[.]([^/]*)$"
)  # up to the first dot of the file name, and what follows it
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, zstandard
_SCHEMA = pa.schema(
    [
        ("sample", pa.large_string()),
        ("extension", pa.string()),
        ("offset", pa.int64()),
        ("size", pa.int64()),
    ]
)

Files = dict[tuple[str, str], tuple[int, int]]
"""Offset and size of each file, by the sample's name and its extension."""


def read_member(tar: Path, offset: int, size: int) -> bytes:
    """`size` bytes of a tar from `offset`; a `BadSample` if they are not there."""
    try:
        # Opened for each read: safe to fork, and thousands of shards do not exceed the limit of open files.
        with open_regular(tar) as stream:
            stream.seek(offset)
            data = stream.read(size)
    except (OSError, DualencError) as error:
        raise BadSample(f"{tar}: cannot be read ({error}); check the path") from None
    if len(data) < size:
        raise BadSample(f"{tar}: ends inside a sample; fetch it again")
    return data


def index_tar(tar: Path, bad_rows: BadRows) -> pa.Table:
    """The files of one tar: a row for each, with its sample's name, its extension, offset and size."""
    try:
        changed = tar.stat().st_mtime_ns
    except OSError as error:
        raise DualencError(f"{tar}: cannot be read ({error.strerror or error}); check the path") from None
    facts = f"{_VERSION} {tar.resolve()} {changed} {file_identity(tar).decode()}"
    key = hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()
    stored = cache_folder() / "tars" / f"{key[:32]}.parquet"
    with suppress(OSError, pa.ArrowException):
        return pq.read_table(stored, schema=_SCHEMA)
    before = bad_rows.total
    files = _scan(tar, bad_rows)
    rows = [(*names, *place) for names, place in files.items()]
    columns = [list(values) for values in zip(*rows)] or [[]] * len(_SCHEMA)
    table = pa.Table.from_arrays(columns, schema=_SCHEMA)
    # The faults of a broken tar must be reported again next time.
    if bad_rows.total == before:
        with suppress(OSError, pa.ArrowException), atomic_path(stored) as part:
            pq.write_table(table, part)
    return table


def _scan(tar: Path, bad_rows: BadRows) -> Files:
    files: Files = {}
    with open_regular(tar) as stream:
        try:
            _read_headers(tar, stream, files, bad_rows)
        except DualencError:
            raise
        except Exception as error:  # tarfile raises many kinds on broken headers
            stream.seek(0)
            if isinstance(error, tarfile.ReadError) and stream.read(6).startswith(_COMPRESSED):
                raise DualencError(
                    f"{tar}: a compressed tar cannot be read at random; decompress it first"
                ) from None
            bad_rows.add("truncated or broken tar", str(tar), f"{first_line(error)}; fetch it again")
    return files


def _read_headers(tar: Path, stream: BinaryIO, files: Files, bad_rows: BadRows) -> None:
    """Add all files; a `tarfile.ReadError` where the tar is broken."""
    tar_size = stream.seek(0, os.SEEK_END)
    stream.seek(0)
    end = 0
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in tqdm(archive, desc=tar.name, unit=" files", delay=2, leave=False):
            # A header that leads back would be read for ever.
            if member.size < 0 or member.offset < end:
                raise tarfile.ReadError("a member has a negative size")
            end = member.offset + 1
            # tarfile would keep them: a million in memory.
            archive.members = []  # type: ignore[attr-defined]
            match = _MEMBER.match(member.name)
            if member.isdir() or match is None or member.name.startswith("__"):
                continue
            position = f"{tar}: {member.name}"
            name = (match[1], match[2].lower())
            if not is_utf8(member.name):
                bad_rows.add("name in a tar that is not UTF-8", repr(position), "rename the file")
            elif not member.isreg() or member.issparse():
                bad_rows.add(
                    "link, device, pipe or sparse file in a tar", position, "pack the file itself"
                )
            elif member.offset_data + member.size > tar_size:
                raise tarfile.ReadError(f"{member.name} is cut off")
            elif name in files:
                bad_rows.add("duplicate file in a tar", position, "remove one of them")
            else:
                files[name] = (member.offset_data, member.size)
