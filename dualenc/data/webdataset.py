"""Webdataset shards: pairs and corpora with stable ids and random access, by an index of each tar."""

from __future__ import annotations

import hashlib
import os
import re
import tarfile
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

from dualenc.data.bad_rows import BadRows
from dualenc.data.cache import cache_folder
from dualenc.data.corpus import Corpus
from dualenc.data.detect import refuse_url
from dualenc.data.identity import file_identity
from dualenc.data.images import IMAGE_SUFFIXES
from dualenc.data.item_lists import Picked, number_items
from dualenc.data.pairs import PairDataset
from dualenc.decoding import MAX_BYTES, decode_image
from dualenc.errors import BadSample, DualencError, first_line
from dualenc.files import atomic_path
from dualenc.reading import glob_files, is_utf8, open_regular
from dualenc.types import Modality, OnError

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
_EXTENSIONS = {"image": [suffix[1:] for suffix in IMAGE_SUFFIXES], "text": ["txt"]}
_NAMES = {"image": "jpg;jpeg;png;webp;…", "text": "txt"}


class WebDatasetPairs(PairDataset):
    """Images and their captions (.txt) from tars as webdataset and img2dataset write them: one sample, one pair.

    Each tar is scanned once for an index, stored in the cache folder.

    Args:
        path: a tar, a folder of tars, or a glob of tars.
        deduplicate: equal texts and equal images of one side share an id; this reads texts and images of equal size.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.
    """

    def __init__(self, path: str | Path, *, deduplicate: bool = True, on_error: OnError = "skip") -> None:
        bad_rows = BadRows(path, on_error)
        samples = _Samples(path, bad_rows)
        images = _Files(samples, "image")
        texts = _Files(samples, "text")
        rows = images.usable("left", np.arange(len(images)), bad_rows)
        # A sample without a left file is counted once.
        rows = texts.usable("right", rows, bad_rows)
        bad_rows.require(len(rows), "pair")
        left_first, left_id = number_items(images, rows, deduplicate)
        right_first, right_id = number_items(texts, rows, deduplicate)
        super().__init__(
            Picked(images, left_first),
            Picked(texts, right_first),
            left_id,
            right_id,
            left_modality="image",
        )
        self.skipped = bad_rows.report()


def tar_corpus(path: str | Path, modality: Modality, bad_rows: BadRows) -> Corpus:
    """The images or the texts of the samples in tars, as items to embed; ids are the samples' names."""
    files = _Files(_Samples(path, bad_rows), modality)
    rows = files.usable("item", np.arange(len(files)), bad_rows)
    bad_rows.require(len(rows), "item")
    names = [files.name(row) for row in rows]
    # Samples of different tars may have the same name.
    if len(set(names)) < len(names):
        names = [f"{files.tar_of(row).stem}/{files.name(row)}" for row in rows]
    return Corpus(names, Picked(files, rows), modality)


class _Samples:
    """The samples of all tars of a file name, folder or glob, and their files, by the indexes of the tars.

    Of each sample its name and the number of its tar; of each file its sample, extension, offset and size.
    """

    def __init__(self, path: str | Path, bad_rows: BadRows) -> None:
        refuse_url(path)
        self.tars = glob_files(str(Path(path) / "*.tar") if Path(path).is_dir() else str(path))
        if not self.tars:
            fix = "give a .tar file, a folder of them or a glob like 'shards/*.tar'"
            raise DualencError(f"{path}: no such tar; {fix}")
        tables = [index_tar(tar, bad_rows) for tar in self.tars]
        # Numbered in order of appearance, tar by tar: files of a sample need not follow one another.
        samples = [table["sample"].combine_chunks().dictionary_encode() for table in tables]
        counts = [len(names.dictionary) for names in samples]
        starts = np.cumsum([0, *counts])
        self.names = pa.chunked_array([names.dictionary for names in samples])
        self.tar = np.repeat(np.arange(len(tables)), counts)
        self.files = pa.concat_tables(tables)
        sample_of = [names.indices.to_numpy() + start for names, start in zip(samples, starts)]
        self.sample_of_file = np.concatenate(sample_of)


class _Files:
    """The image or the text of each sample, as an item; offset and size -1 where a sample has none."""

    def __init__(self, samples: _Samples, modality: Modality) -> None:
        self.tars = samples.tars
        self.tar = samples.tar
        self.names = samples.names
        self.modality = modality
        chosen = np.full(len(self.names), -1, dtype=np.int64)  # each sample's file
        # The last one written wins: the first in the list.
        for extension in reversed(_EXTENSIONS[modality]):
            files = np.flatnonzero(pc.equal(samples.files["extension"], extension).to_numpy())
            chosen[samples.sample_of_file[files]] = files
        # A further value for samples without a file, whose position is -1.
        self.offset = np.append(samples.files["offset"].to_numpy(), -1)[chosen]
        self.size = np.append(samples.files["size"].to_numpy(), -1)[chosen]
        # Texts are stripped: those of different sizes may be equal.
        self.key_sizes = self.size if modality == "image" else np.zeros(len(self.size))

    def usable(self, side: str, rows: np.ndarray, bad_rows: BadRows) -> np.ndarray:
        """Those of some samples (n,) that have a file that is not empty; the others are bad."""
        size = self.size[rows]
        fix = "add it; a sample's name ends at its first dot"
        for reason, bad in (("sample without", size < 0), ("empty", size == 0)):
            if bad.any():
                position = self.position(rows[bad][0])
                reason = f"{reason} {side} file {_NAMES[self.modality]!r}"
                bad_rows.add(reason, position, fix, int(bad.sum()))
        return rows[size > 0]

    def tar_of(self, row: int) -> Path:
        """The tar of a sample."""
        return self.tars[self.tar[row]]

    def name(self, row: int) -> str:
        """The sample's name in its tar."""
        return self.names[int(row)].as_py().removeprefix("./")

    def position(self, row: int) -> str:
        """Its tar and its name, for messages."""
        return f"{self.tar_of(row)}: {self.name(row)}"

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        position = self.position(index)
        if self.modality == "image":
            return decode_image(data, position)
        try:
            text = data.decode("utf-8-sig").strip()
        except UnicodeDecodeError:
            raise BadSample(f"{position}: its .txt is no UTF-8 text; convert it") from None
        if not text:
            raise BadSample(f"{position}: its .txt holds no text; fill it in or remove the sample")
        return text

    def key(self, index: int) -> bytes | str:
        """The contents of an image's file, which is not decoded; the text."""
        return self.read(index) if self.modality == "image" else self[index]

    def read(self, index: int) -> bytes:
        """The contents of the file of a sample; a `BadSample` if it is too large."""
        size = int(self.size[index])
        # Checked before the bytes are read.
        if size > MAX_BYTES:
            reason = f"file of {size:,} bytes, where {MAX_BYTES:,} are allowed"
            raise BadSample(f"{self.position(index)}: {reason}; remove the sample")
        return read_member(self.tar_of(index), int(self.offset[index]), size)

    def item_identity(self, row: int, read: bool) -> bytes:
        """The tar's identity, and the file's offset and size in it."""
        return b"%s %d %d " % (self._tar_identities[self.tar[row]], self.offset[row], self.size[row])

    @cached_property
    def _tar_identities(self) -> list[bytes]:
        return [tar.name.encode(errors="surrogateescape") + b" " + file_identity(tar) for tar in self.tars]


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
