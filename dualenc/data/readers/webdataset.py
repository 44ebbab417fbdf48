"""WebDataset shards: pairs and corpora with stable ids and random access by an index."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from tqdm import tqdm

from dualenc.data.bad_rows import BadRows
from dualenc.data.columns import ItemColumn
from dualenc.data.corpus import Corpus
from dualenc.data.item_lists import Picked
from dualenc.data.readers.detect import refuse_url
from dualenc.data.readers.images import IMAGE_SUFFIXES
from dualenc.data.readers.lines import MAX_LINE_CHARACTERS
from dualenc.data.readers.table_pairs import ColumnPairs
from dualenc.data.readers.tables import FILE, LINE, DataTable
from dualenc.data.store.cache import cached_dataset, record_batches
from dualenc.data.store.identity import file_identity
from dualenc.errors import BadSample, DualencError, first_line
from dualenc.io.decoding import MAX_BYTES, decode_image
from dualenc.io.reading import glob_files, is_utf8, open_regular, with_home
from dualenc.types import Modality, OnError, StrPath

# webdataset's convention: a sample's name ends at the first dot of the file name.
_MEMBER = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
# Modality and rank of each extension; if a sample has several images, the lowest rank is read.
_ROLES = {suffix[1:]: ("image", rank) for rank, suffix in enumerate(IMAGE_SUFFIXES)} | {
    "txt": ("text", 0)
}
_NAMES = {"image": "jpg;jpeg;png;webp;…", "text": "txt"}
_FIX_NAME = "add it; a sample's name ends at its first dot"
_POSITIONS = ("image_offset", "image_size", "text_offset", "text_size")
# A sample's name serves as its "line" in error messages.
_SCHEMA = pa.schema([(LINE, pa.large_string()), *((name, pa.int64()) for name in _POSITIONS)])


class WebDatasetPairs(ColumnPairs):
    """Images and their captions (.txt) from tars written by webdataset or img2dataset.

    One sample makes one pair. Each tar is scanned once for an index; indexes of large tars are kept
    in the cache folder.

        WebDatasetPairs("shards/*.tar")[0].right

    Args:
        path: a tar, a folder of tars, or a glob of tars.
        deduplicate: give equal texts, and equal images, one id; reads texts and all images whose
            file sizes occur more than once.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.
    """

    def __init__(
        self, path: str | Path, *, deduplicate: bool = True, on_error: OnError = "skip"
    ) -> None:
        samples = _open_tars(path, BadRows(path, on_error))
        super().__init__(
            _column(samples, "image"), _column(samples, "text"), deduplicate=deduplicate
        )


def tar_corpus(path: StrPath, modality: Modality, bad_rows: BadRows) -> Corpus:
    """Return the images or texts of the samples in tars, with sample names as ids."""
    samples = _open_tars(path, bad_rows)
    files = _column(samples, modality)
    files.skip()
    rows = np.flatnonzero(files.usable())
    bad_rows.require(len(rows), "item")
    names = samples.column(LINE).take(rows).to_pylist()
    # Samples of different tars may have the same name.
    if len(set(names)) < len(names):
        tars = samples.column(FILE).take(rows).to_pylist()
        names = [f"{samples.files[tar].stem}/{name}" for tar, name in zip(tars, names)]
    return Corpus(names, Picked(files.items, rows), modality)


def _open_tars(path: StrPath, bad_rows: BadRows) -> DataTable:
    """Open the samples in all tars of a file name, folder or glob."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    refuse_url(path)
    path = with_home(path)
    tars = glob_files(str(Path(path) / "*.tar") if Path(path).is_dir() else str(path))
    if not tars:
        raise DualencError(
            "no such tar",
            fix="give a .tar file, a folder of them or a glob like 'shards/*.tar'",
            where=path,
        )
    indexes = []
    for number, tar in enumerate(tars):
        index = _index(tar, bad_rows)
        indexes.append(
            index.append_column(FILE, pa.repeat(pa.scalar(number, pa.int32()), len(index)))
        )
    dataset = Dataset(InMemoryTable(pa.concat_tables(indexes)))
    return DataTable(str(path), dataset, bad_rows, tars[0].parent, tars)


def _column(samples: DataTable, modality: Modality) -> ItemColumn:
    """Return the images or the texts of samples."""
    files = _TarFiles(samples, modality)
    max_bytes = MAX_BYTES if modality == "image" else min(MAX_BYTES, MAX_LINE_CHARACTERS)
    faults = {
        f"missing or empty file {_NAMES[modality]!r}": (files.size <= 0, _FIX_NAME),
        f"file of more than {max_bytes:,} bytes": (files.size > max_bytes, "remove the sample"),
    }
    return ItemColumn(samples, modality, False, np.arange(len(samples)), files, faults)


class _TarFiles:
    """The image or the text of each sample, as an item; offset and size are -1 if it has none."""

    def __init__(self, samples: DataTable, modality: Modality) -> None:
        self.samples = samples
        self.modality = modality
        self.tar = samples.column(FILE).to_numpy()
        self.offset = pc.fill_null(samples.column(f"{modality}_offset"), -1).to_numpy()
        self.size = pc.fill_null(samples.column(f"{modality}_size"), -1).to_numpy()
        # Texts are stripped, so texts of different sizes may be equal: compare all of them.
        self.key_sizes = self.size if modality == "image" else np.zeros(len(self.size))

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, index: int) -> Any:
        data = self.read(index)
        position = self.samples.position(index)
        if self.modality == "image":
            return decode_image(data, position)
        text = data.decode("utf-8-sig", "surrogateescape").strip()
        if not text or not is_utf8(text):
            raise BadSample(
                "its .txt is empty or not UTF-8",
                fix="convert it or remove the sample",
                where=position,
            )
        return text

    def key(self, index: int) -> bytes | str:
        """Return the contents of an image file without decoding it, or the text."""
        return self.read(index) if self.modality == "image" else self[index]

    def read(self, index: int) -> bytes:
        """Return the contents of a sample's file; raise a `BadSample` if it cannot be read."""
        tar = self.samples.files[self.tar[index]]
        try:
            # Opened for each read: safe to fork, and thousands of shards stay below the limit of
            # open files.
            with open_regular(tar) as stream:
                stream.seek(self.offset[index])
                data = stream.read(self.size[index])
        except (OSError, DualencError) as error:
            raise BadSample(
                f"cannot be read ({error})",
                fix="check the path",
                where=tar,
            ) from None
        if len(data) < self.size[index]:
            raise BadSample(
                "ends inside a sample",
                fix="fetch it again",
                where=tar,
            )
        return data

    def item_identity(self, row: int, read: bool) -> bytes:
        """Return the tar's identity, and the file's offset and size in it."""
        return b"%s %d %d " % (
            self._tar_identities[self.tar[row]],
            self.offset[row],
            self.size[row],
        )

    @cached_property
    def _tar_identities(self) -> list[bytes]:
        names = [tar.name.encode(errors="surrogateescape") for tar in self.samples.files]
        return [name + b" " + file_identity(tar) for name, tar in zip(names, self.samples.files)]


def _index(tar: Path, bad_rows: BadRows) -> pa.Table:
    """Return a row of `_SCHEMA` for each sample of a tar, in order of appearance.

    Files of one sample need not follow each other in the tar.
    """

    def batches(own: BadRows) -> Iterator[pa.RecordBatch]:
        samples: dict[str, dict[str, Any]] = {}
        try:
            for member in _members(tar):
                _add_member(member, f"{tar}: {member.name}", samples, own)
        except DualencError:
            raise
        except Exception as error:  # tarfile raises many kinds on broken headers
            fix = f"{first_line(error)}; fetch it again, or decompress it"
            own.add("truncated, broken or compressed tar", str(tar), fix)
        yield from record_batches(samples.values(), _SCHEMA)

    return cached_dataset(batches, _SCHEMA, [tar], ("tar", _ROLES), bad_rows).data.table


def _members(tar: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the members of a tar; raise a `tarfile.ReadError` where the tar is broken."""
    end = 0
    tar_size = tar.stat().st_size
    with open_regular(tar) as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in tqdm(archive, desc=tar.name, unit=" files", delay=2, leave=False):
            # A negative size, or a header that points backwards, would make an endless loop.
            if member.size < 0 or member.offset < end:
                raise tarfile.ReadError("a member has a negative size")
            if (
                member.isreg()
                and not member.issparse()
                and member.offset_data + member.size > tar_size
            ):
                raise tarfile.ReadError(f"{member.name} is cut off")
            end = member.offset + 1
            # Forget earlier members: tarfile would keep millions of them in memory.
            archive.members = []  # type: ignore[attr-defined]
            yield member


def _add_member(
    member: tarfile.TarInfo, position: str, samples: dict[str, dict[str, Any]], bad_rows: BadRows
) -> None:
    """Record the position of a tar member with its sample; ignore members that belong to none."""
    match = _MEMBER.match(member.name)
    if member.isdir() or match is None or member.name.startswith("__"):
        return
    if not is_utf8(member.name):
        bad_rows.add("name in a tar that is not UTF-8", repr(position), "rename the file")
        return
    if not member.isreg() or member.issparse():
        bad_rows.add("link, device, pipe or sparse file in a tar", position, "pack the file itself")
        return
    # `tar cf x.tar .` prefixes every name, other ways of packing do not.
    name = match[1].removeprefix("./")
    sample = samples.setdefault(name, {LINE: name})
    extension = match[2].lower()
    if extension not in _ROLES:
        return
    role, rank = _ROLES[extension]
    best = sample.get(role, len(_ROLES))
    if rank == best:
        bad_rows.add("duplicate file in a tar", position, "remove one of them")
    elif rank < best:
        sample |= {role: rank, f"{role}_offset": member.offset_data, f"{role}_size": member.size}
