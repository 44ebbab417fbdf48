"""Pairs and corpora from webdataset shards, with stable ids and random access."""

from __future__ import annotations

import glob
import json
import os
import re
import tarfile
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from tqdm import tqdm

from dualenc.data.columns import Picked, number_distinct
from dualenc.data.corpus import Corpus
from dualenc.data.identity import file_identity
from dualenc.data.images import IMAGE_SUFFIXES, MOST_BYTES, decode_image
from dualenc.data.lines import MOST_LINE_BYTES
from dualenc.data.pairs import PairDataset, Skips
from dualenc.data.remote import RemoteFile, expand, is_url, open_files, url_suffix
from dualenc.data.tables import cache_folder
from dualenc.errors import BadSample, DualencError
from dualenc.files import atomic_path, open_regular
from dualenc.types import Modality, OnError

if TYPE_CHECKING:
    import pyarrow as pa

IMAGES = "jpg;jpeg;png;webp"
_IMAGE_ENDS = tuple(suffix[1:] for suffix in IMAGE_SUFFIXES)
_VERSION = 2  # of what an index holds; raise it when the scan changes
_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")  # path up to the first dot of the file name, and what follows it

Tar = Path | RemoteFile

_UNREADABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")  # control characters, and bytes that are not UTF-8


class Tars:
    """Reads bytes of several tars at random; safe to fork and to pickle."""

    _MOST_OPEN = 64

    def __init__(self, paths: Sequence[Tar]) -> None:
        self.paths = list(paths)
        self._open: dict[int, BinaryIO] = {}
        self._process = os.getpid()

    def read(self, number: int, offset: int, size: int) -> bytes:
        """`size` bytes of tar `number` from `offset`.

        Raises:
            BadSample: the tar cannot be read any more.
            DualencError: a remote one cannot; its server being away makes no sample bad.
        """
        path = self.paths[number]
        if isinstance(path, RemoteFile):
            return path.read(offset, size)
        if self._process != os.getpid():  # a forked child shares its parent's file positions
            self._open, self._process = {}, os.getpid()
        try:
            if number not in self._open:
                if len(self._open) >= self._MOST_OPEN:
                    self._open.pop(next(iter(self._open))).close()
                self._open[number] = open_regular(path)
            self._open[number].seek(offset)
            return self._open[number].read(size)
        except (OSError, DualencError) as error:
            raise BadSample(f"{path}: cannot be read ({error}); check the path") from None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}


def index_tar(tar: Tar, skips: Skips, index_folder: Path | None = None) -> pa.Table:
    """The samples of one tar, from its index if that is up to date; otherwise the tar is scanned once.

    Args:
        tar: an uncompressed tar.
        skips: is told of broken members.
        index_folder: where indexes are kept; by default beside the tar, or in the cache folder if that cannot be
            written to or the tar is remote.

    Returns:
        Columns `sample`, and the lists `extension`, `offset` and `size` of its files; a row per sample.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    if isinstance(tar, RemoteFile):
        size, told, unique = tar.size, tar.identity(), f"{tar.key}.index"
        places = [(index_folder or cache_folder()) / unique]
    else:
        try:
            with open_regular(tar) as stream:
                facts = os.fstat(stream.fileno())
        except OSError as error:
            raise DualencError(f"{tar}: cannot be read ({error.strerror or error}); check the path") from None
        size, told = facts.st_size, f"{facts.st_mtime_ns} {file_identity(tar).decode()}".encode()
        unique = re.sub(r"[^\w.-]", "_", str(tar.resolve())) + ".index"
        chosen = tar.with_name(f"{tar.name}.index") if index_folder is None else index_folder / unique
        places = [chosen, cache_folder() / unique]
    stamp = f"{_VERSION} {told.decode()}"
    for place in places:
        known = _known_index(place, stamp, size)
        if known is not None:
            return known
    before = skips.total
    table = _scan(tar, skips).replace_schema_metadata({"tar": stamp})
    if skips.total == before:  # the faults of a broken tar are to be told again next time
        for place in places:
            try:
                with atomic_path(place) as part:
                    pq.write_table(table, part)
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


def _scan(tar: Tar, skips: Skips) -> pa.Table:
    """One row per sample, in the order of their first files; what is no plain file of a sample is told to `skips`."""
    import pyarrow as pa

    rows: dict[str, int] = {}  # of each sample
    extensions: dict[str, int] = {}
    places = array("q")  # of each file its sample, extension, offset and size: objects would take ten times as much
    try:
        with (
            _stream(tar) as stream,
            tarfile.open(fileobj=stream, mode="r:") as archive,
            tqdm(desc=tar.name, unit=" files", delay=2, leave=False) as bar,
        ):
            size, end = stream.seek(0, os.SEEK_END), 0
            stream.seek(0)
            for info in archive:
                bar.update()
                if info.size < 0 or info.offset < end:  # a header that leads back would be read for ever
                    raise tarfile.ReadError("a member has a negative size")
                end = info.offset + 1
                match = _NAME.match(info.name)
                archive.members = []  # type: ignore[attr-defined]  # or a million of them stay in memory
                if info.isdir() or match is None or info.name.startswith("__"):
                    continue
                where = f"{tar}: {info.name!r}"
                if not info.isreg() or info.issparse():
                    skips.bad("link, device, pipe or sparse file in a tar", where, "pack the file itself")
                elif info.name.startswith("/") or ".." in info.name.split("/"):
                    skips.bad("name that leads out of a tar", where, "pack it with relative names")
                elif _UNREADABLE.search(info.name):
                    skips.bad("name in a tar that is no text", where, "rename the file")
                elif info.offset_data + info.size > size:
                    raise tarfile.ReadError(f"{info.name} is cut off")
                else:
                    row = rows.setdefault(match[1], len(rows))
                    extension = extensions.setdefault(match[2].lower(), len(extensions))
                    places.extend((row, extension, info.offset_data, info.size))
    except DualencError:
        raise
    except Exception as error:  # tarfile raises many kinds on broken headers
        if isinstance(error, tarfile.ReadError):
            with _stream(tar) as stream:
                compressed = stream.read(6).startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd"))
            if compressed:
                raise DualencError(f"{tar}: a compressed tar cannot be read at random; decompress it first") from None
        reason = " ".join(str(error).split()) or type(error).__name__
        skips.bad("truncated or broken tar", str(tar), f"{reason}; fetch it again")
    files = np.frombuffer(places, dtype=np.int64).reshape(-1, 4)
    _, first = np.unique(files[:, 0] * max(1, len(extensions)) + files[:, 1], return_index=True)
    names, kinds = pa.array(list(rows), pa.large_string()), pa.array(list(extensions), pa.string())
    for row, extension in files[np.setdiff1d(np.arange(len(files)), first), :2].tolist():
        place = f"{tar}: {names[row]}.{kinds[extension]}"
        skips.bad("file that stands twice in a tar", place, "remove one of them")
    files = files[np.sort(first)]
    files = files[np.argsort(files[:, 0], kind="stable")]
    starts = pa.array(np.concatenate([[0], np.cumsum(np.bincount(files[:, 0], minlength=len(rows)))]), pa.int32())
    values = [kinds.take(pa.array(files[:, 1])), pa.array(files[:, 2]), pa.array(files[:, 3])]
    lists = [pa.ListArray.from_arrays(starts, value) for value in values]
    return pa.Table.from_arrays([names, *lists], schema=_schema())


def _stream(tar: Tar) -> BinaryIO:
    return tar.stream() if isinstance(tar, RemoteFile) else open_regular(tar)


class WebDatasetPairs(PairDataset):
    """Pairs from tars as webdataset and img2dataset write them: one sample, one pair.

    Each tar is scanned once; where its files lie is kept in an index beside it, or in the cache folder if the tar is
    remote. Ids come from the position of the sample in the sorted tars.

    Args:
        path: a tar, a folder of tars, a glob of tars, or a URL (`dualenc.data.remote`; `{000..123}` names many).
        left: extension of the left file, or several by ";" of which the first that a sample has is taken.
        right: the same for the right file; `json:FIELD` is a text in a field of a JSON file.
        deduplicate: equal texts on the right share an id; reads every text once at the start.
        index_folder: where indexes are kept; by default beside the tars, or in the cache folder of `datasets` if that
            cannot be written to.
        on_error: "skip" leaves out, counts and reports bad samples; "raise" stops at the first.

    Raises:
        DualencError: no such tar, a compressed tar, nothing usable.
        BadSample: a truncated tar, a repeated, missing or empty file, under on_error="raise".
    """

    def __init__(
        self,
        path: str | Path,
        left: str = IMAGES,
        right: str = "txt",
        *,
        deduplicate: bool = False,
        index_folder: str | Path | None = None,
        on_error: OnError = "skip",
    ) -> None:
        skips = Skips(path, on_error)
        shards = _Shards(path, skips, None if index_folder is None else Path(index_folder))
        left_files, right_files = _Files(shards, left), _Files(shards, right)
        good = left_files.there("left", skips)
        good[good] = right_files.there("right", skips, among=good)
        rows = np.flatnonzero(good)
        skips.demand(len(rows), "pair")
        first, right_id = rows, np.arange(len(rows))
        if deduplicate and right_files.modality == "text":
            readable = []
            for row in rows.tolist():
                try:
                    right_files[row]
                    readable.append(row)
                except BadSample:
                    skips.bad(f"unreadable file {right!r}", right_files.where(row))
            skips.demand(len(readable), "pair")
            rows = np.array(readable)
            first, right_id = number_distinct(right_files, rows)
        super().__init__(
            Picked(left_files, rows),
            Picked(right_files, first),
            right_id=right_id,
            left_modality=left_files.modality,
            right_modality=right_files.modality,
        )
        self.skipped = skips.report()


def tar_corpus(path: str | Path, member: str = IMAGES, *, on_error: OnError = "skip") -> Corpus:
    """One file of every sample in tars as items to embed; ids are the samples' names.

    The arguments and errors are those of `WebDatasetPairs`; `member` is as `left` there.
    """
    skips = Skips(path, on_error)
    files = _Files(_Shards(path, skips), member)
    rows = np.flatnonzero(files.there("item", skips))
    skips.demand(len(rows), "item")
    names = [files.name(row) for row in rows.tolist()]
    if len(set(names)) < len(names):  # samples of different tars may be called alike
        names = [f"{files.tars.paths[files.tar[row]].stem}/{name}" for row, name in zip(rows, names, strict=True)]
    corpus = Corpus(names, Picked(files, rows), files.modality)
    corpus.skipped = skips.report()
    return corpus


class _Shards:
    """The tars that a file name, a folder or a glob means, sorted, and their indexes one behind the other."""

    def __init__(self, path: str | Path, skips: Skips, index_folder: Path | None = None) -> None:
        import pyarrow as pa

        found: list[Tar]
        if is_url(path):
            found = [*open_files(expand(str(path)))]
        else:
            pattern = str(Path(path) / "*.tar") if Path(path).is_dir() else str(path)
            there = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
            found = [*sorted(map(Path, there))]
        if not found:
            raise DualencError(f"{path}: no such tar; give a .tar file, a folder of them or a glob like 'shards/*.tar'")
        self.tars = Tars(found)
        tables = [index_tar(tar, skips, index_folder) for tar in self.tars.paths]
        self.table = pa.concat_tables([table.replace_schema_metadata(None) for table in tables])
        self.tar = np.repeat(np.arange(len(tables)), [len(table) for table in tables])


class _Files:
    """The file of each sample that `spec` names as an item; position -1 where a sample has none."""

    def __init__(self, shards: _Shards, spec: str) -> None:
        import pyarrow.compute as pc

        extensions, _, field = spec.partition(":")
        self.tars, self.tar, self.spec, self.field = shards.tars, shards.tar, spec, field
        self.samples: pa.ChunkedArray = shards.table["sample"]
        names = pc.list_flatten(shards.table["extension"]).to_numpy(zero_copy_only=False)
        row = np.repeat(np.arange(len(shards.table)), pc.list_value_length(shards.table["extension"]).to_numpy())
        chosen = np.full(len(shards.table), -1, dtype=np.int64)
        for extension in reversed(extensions.lower().split(";")):
            there = np.flatnonzero(names == extension.lstrip("."))
            chosen[row[there]] = there
        values = [pc.list_flatten(shards.table[name]).to_numpy() for name in ("offset", "size")]
        self.offset, self.size = (np.where(chosen >= 0, v[chosen] if len(v) else -1, -1) for v in values)
        self._tar_identities: list[bytes] | None = None
        images = [extension.endswith(_IMAGE_ENDS) for extension in extensions.lower().split(";")]
        self.modality: Modality = "image" if all(images) else "text"
        if field and not spec.lower().startswith("json:"):
            raise DualencError(f"{spec!r}: a field is named, but only JSON files have fields; write json:{field}")

    def there(self, side: str, skips: Skips, among: np.ndarray | None = None) -> np.ndarray:
        """Which samples have a file that is not empty; the others are told to `skips`."""
        rows = np.arange(len(self)) if among is None else np.flatnonzero(among)
        for reason, bad in (("sample without", self.size[rows] < 0), ("empty", self.size[rows] == 0)):
            if bad.any():
                reason = f"{reason} {side} file {self.spec!r}"
                skips.bad(reason, self.where(rows[bad][0]), "add it, name another one", int(bad.sum()))
        return self.size[rows] > 0

    def name(self, row: int) -> str:
        """The sample's name in its tar."""
        return self.samples[int(row)].as_py().removeprefix("./")

    def where(self, row: int) -> str:
        """Its tar and its name."""
        return f"{self.tars.paths[self.tar[row]]}: {self.name(row)}"

    def __len__(self) -> int:
        return len(self.offset)

    def __getitem__(self, index: int) -> Any:
        number, size = int(self.tar[index]), int(self.size[index])
        where = self.where(index)
        most = MOST_BYTES if self.modality == "image" else MOST_LINE_BYTES
        if size > most:
            raise BadSample(f"{where}: file of {size:,} bytes, where {most:,} are allowed; remove the sample")
        data = self.tars.read(number, int(self.offset[index]), size)
        if len(data) < size:
            raise BadSample(f"{where}: the tar ends inside this sample; fetch it again")
        if self.modality == "image":
            return decode_image(data, where)
        try:
            text = json.loads(data)[self.field] if self.field else data.decode("utf-8-sig")
        except (ValueError, KeyError, TypeError, RecursionError):
            what = f"JSON object with a field {self.field!r}" if self.field else "UTF-8 text"
            raise BadSample(f"{where}: {self.spec!r} is no {what}; mend the sample or name another file") from None
        if not isinstance(text, str) or not text.strip():
            raise BadSample(f"{where}: {self.spec!r} holds no text; fill it in or remove the sample")
        return text.strip()

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """As `dualenc.data.identity` asks for: the tar's own identity, and where in it the file lies."""
        if self._tar_identities is None:
            paths = self.tars.paths
            self._tar_identities = [p.identity() if isinstance(p, RemoteFile) else file_identity(p) for p in paths]
        names = [path.name.encode(errors="surrogateescape") for path in self.tars.paths]
        places = zip(*(part[rows].tolist() for part in (self.tar, self.offset, self.size)), strict=True)
        return [
            b"%s %s %d %d %s" % (names[tar], self._tar_identities[tar], offset, size, self.spec.encode())
            for tar, offset, size in places
        ]


def is_tars(path: str | Path) -> bool:
    """Whether a path, folder, glob or URL means tars."""
    if is_url(path):
        return url_suffix(str(path)) == ".tar"
    folder = Path(path)
    return str(path).endswith(".tar") or (folder.is_dir() and any(folder.glob("*.tar")))
