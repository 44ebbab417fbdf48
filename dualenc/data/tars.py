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

from tqdm import tqdm

from dualenc.data.arrow_cache import cache_folder
from dualenc.data.skips import Skips
from dualenc.errors import DualencError
from dualenc.files import atomic_path

if TYPE_CHECKING:
    import pyarrow as pa

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # path up to the first dot of the file name, and what follows it


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
        """`size` bytes of tar `number` from `offset`."""
        if self._process != os.getpid():  # a forked child shares its parent's file positions
            self._open, self._process = {}, os.getpid()
        if number not in self._open:
            if len(self._open) >= self._MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[number] = open(self.paths[number], "rb")  # noqa: SIM115  kept open for the next read
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

    stamp = f"{tar.stat().st_size} {tar.stat().st_mtime_ns}"
    places = [_index_path(tar, index_folder), _index_path(tar, cache_folder())]
    for place in places:
        if place.is_file() and (pq.read_schema(place).metadata or {}).get(b"tar") == stamp.encode():
            return pq.read_table(place)
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


def _index_path(tar: Path, folder: Path | None) -> Path:
    if folder is None:
        return tar.with_name(f"{tar.name}.index")
    return Path(folder) / (re.sub(r"[^\w.-]", "_", str(tar.resolve())) + ".index")


def _members(tar: Path, skips: Skips) -> Iterator[Member]:
    """Files that belong to samples, in the order of the tar."""
    size = tar.stat().st_size
    try:
        with tarfile.open(tar, "r:") as archive, tqdm(desc=tar.name, unit=" files", delay=2, leave=False) as bar:
            for info in archive:
                bar.update()
                match = _NAME.match(info.name)
                if not info.isfile() or match is None or info.name.startswith("__"):
                    continue
                if info.offset_data + info.size > size:
                    raise tarfile.ReadError(f"{info.name} is cut off")
                yield Member(match[1], match[2].lower(), info.offset_data, info.size)
                archive.members = []  # type: ignore[attr-defined]  # or a million of them stay in memory
    except tarfile.ReadError as error:
        if _is_compressed(tar):
            raise DualencError(f"{tar}: a compressed tar cannot be read at random; decompress it first") from None
        skips.bad("truncated or broken tar", str(tar), f"{error}; fetch it again")


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
    return pa.table(
        {
            "sample": pa.array(list(samples), pa.large_string()),
            "extension": pa.array([list(files) for files in files_of], pa.list_(pa.string())),
            "offset": pa.array([[o for o, _ in files.values()] for files in files_of], pa.list_(pa.int64())),
            "size": pa.array([[s for _, s in files.values()] for files in files_of], pa.list_(pa.int64())),
        }
    )
