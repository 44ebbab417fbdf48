"""Provenance: the typed record in the meta.json of vectors, indexes and pushed collections."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dualenc.errors import DualencError
from dualenc.io.files import write_json
from dualenc.io.reading import JSON_TYPES, read_json_object
from dualenc.types import Metric, Modality, Output, Side, StrPath

META = "meta.json"
MODEL_ENTRIES = ("model", "model_checksum", "side", "modality", "output", "kind")
SOURCE_ENTRIES = (*MODEL_ENTRIES, "data", "read", "skipped")
"""Entries that an index or a pushed collection takes over from its embeddings."""
MEASURED = ("target_recall", "recall_at_10", "recall_queries", "recall_queries_from", "latency_ms")
"""Entries that were measured when an index was built."""


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What is recorded about vectors: the model and data they came from, and what was made of them.

    An entry that is not recorded has its default. Unknown entries, which a later version may have
    written, are kept and written again.

        provenance = Index.open("index").provenance
        print(provenance.model, provenance.dim, provenance.recall_at_10)

    Attributes:
        format: kind of folder, such as "dualenc index".
        version: version of that format.
        model: path or name of the model that made the vectors.
        model_checksum: `dualenc.search.embed.encode.tower_checksum` of its tower.
        side: side of the model.
        modality: modality of the items.
        output: embeddings, or the features before the projector.
        kind: kind of the model.
        data: path or name of the data.
        read: options that the data was read with.
        skipped: number of items without a vector.
        dim: D, number of components of a vector.
        count: N, number of vectors.
        metric: similarity of an index or collection.
        complete: whether all embeddings are written.
        dtype: precision of stored vectors.
        autocast: precision of the forward passes, if not that of the weights.
        normalized: whether all vectors have length one.
        shard_rows: number of vectors in each shard.
        first_skipped: `id` and `reason` of up to 100 items without a vector.
        ids_checksum: checksum of the ids of all items.
        ids: further checksum of ids; in a BM25 folder, that of the items of the index.
        made_by: command that wrote temporary embeddings.
        factory: FAISS factory string.
        requested_factory: factory string that was asked for, such as "auto".
        faiss: version of FAISS that wrote the index.
        trained_on: number of vectors that trained the index.
        build_seconds: time to train and fill it.
        bytes_per_vector: memory per vector.
        search_parameters: tuned parameters of FAISS by name.
        target_recall: recall@10 that tuning aimed for.
        recall_at_10: measured recall.
        recall_queries: number of queries that measured it.
        recall_queries_from: "database" or "given".
        latency_ms: percentiles of the latency of a query, in milliseconds.
        when_built: measurements that later changes of the index have outdated.
        appended: number of vectors appended since the build.
        removed: number of vectors removed since the build.
        mapped: number of vectors that a migration has mapped from the old model.
        settings: search settings that were tuned under filters.
        target: URL of an engine, without credentials.
        collection: table or collection.
        schema: schema of a table; "" for the first one in the search path.
        columns: kind of value of each column.
        has_snippets: whether texts are stored.
        fingerprint: checksum of pushed vectors and metric.
        type: type of the vectors in PostgreSQL.
        index: kind of index in PostgreSQL.
        embeddings: folder of the pushed embeddings.
        live: whether clients write the table, so that its rows are not those of a push.
        names: columns of `id`, `text` and `vector` in a table that dualenc did not make.
        of: checksum of the items that stored texts belong to.
        sizes: bytes of each file.
        files: SHA-256 of each file.
        other: unknown entries.
        order: names of all recorded entries, in the order of the file.
    """

    format: str = ""
    version: int = 0
    # Model and data.
    model: str | None = None
    model_checksum: str | None = None
    side: Side | None = None
    modality: Modality | None = None
    output: Output | None = None
    kind: str | None = None
    data: str | None = None
    read: Mapping[str, Any] = field(default_factory=dict)
    skipped: int = 0
    # Vectors of any kind.
    dim: int = 0
    count: int = 0
    metric: Metric = "cosine"
    # Embeddings.
    complete: bool = False
    dtype: str = ""
    autocast: str | None = None
    normalized: bool = False
    shard_rows: Sequence[int] = ()
    first_skipped: Sequence[Mapping[str, str]] = ()
    ids_checksum: str | None = None
    ids: str | None = None
    made_by: str | None = None
    # FAISS indexes.
    factory: str | None = None
    requested_factory: str | None = None
    faiss: str | None = None
    trained_on: int | None = None
    build_seconds: float | None = None
    bytes_per_vector: int | None = None
    search_parameters: Mapping[str, int] = field(default_factory=dict)
    target_recall: float | None = None
    recall_at_10: float | None = None
    recall_queries: int | None = None
    recall_queries_from: str | None = None
    latency_ms: Mapping[str, float] = field(default_factory=dict)
    when_built: Mapping[str, Any] | None = None
    appended: int = 0
    removed: int = 0
    mapped: int | None = None
    # Engines, and filtered searches.
    settings: Mapping[str, Any] = field(default_factory=dict)
    target: str = ""
    collection: str = ""
    schema: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    has_snippets: bool = False
    fingerprint: str = ""
    type: str = ""
    index: Literal["hnsw", "ivfflat", "none"] | None = None
    embeddings: str | None = None
    live: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    # Files of the folder.
    of: str | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    # Equal records may list their entries in another order.
    other: Mapping[str, Any] = field(default_factory=dict)
    order: Sequence[str] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.order:
            default = {each.name: each.default for each in fields(self)}
            given = (name for name in NAMES if getattr(self, name) not in (default[name], {}))
            # The class is frozen.
            object.__setattr__(self, "order", (*given, *self.other))

    @classmethod
    def from_entries(cls, entries: Mapping[str, Any]) -> Provenance:
        """Return the record of a JSON object, without checking it."""
        other = dict(entries)
        known = {name: other.pop(name) for name in entries if name in NAMES}
        return cls(**known, other=other, order=tuple(entries))

    @classmethod
    def unchecked(cls, folder: StrPath, kinds: Mapping[str, Any] | None = None) -> Provenance:
        """Read the meta.json of a folder that was checked before, or is checked by the caller.

        Args:
            folder: folder with the file meta.json.
            kinds: types of required entries, see `read_json_object`.
        """
        return cls.from_entries(read_json_object(Path(folder) / META, kinds))

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        expected_format: str,
        version: int,
        required: Iterable[str],
        other: str,
        remedy: str,
    ) -> Provenance:
        """Read the meta.json of a folder, which may be corrupt or hostile, and check it.

        Args:
            folder: folder with the file meta.json.
            expected_format: required value of `format`.
            version: required value of `version`.
            required: names of entries that the folder must have.
            other: error message for a folder of another format.
            remedy: fix to suggest in errors.

        Raises:
            DualencError: the folder has another format, or an entry is missing or of another type.
        """
        if folder.is_dir() and not (folder / META).exists():
            raise DualencError(f"has no {META}: {other}", where=folder)
        entries = read_json_object(folder / META)
        if entries.get("format") != expected_format:
            raise DualencError(other, where=folder)
        if entries.get("version") != version:
            raise DualencError(
                f"has format {entries.get('version')} of another dualenc; "
                f"this one reads format {version}",
                fix="make the folder again, or install that dualenc",
                where=folder,
            )
        provenance = cls.from_entries(entries)
        provenance.check(folder / META, required, remedy)
        return provenance

    def check(self, source: StrPath, required: Iterable[str], remedy: str) -> None:
        """Raise unless entries are recorded and all have the types of their attributes.

        Args:
            source: path of the file, for the error.
            required: names of entries.
            remedy: fix to suggest.
        """
        for name in required:
            if name not in self.order:
                raise DualencError(f"lacks {name!r}", fix=remedy, where=source)
        for name in self.order:
            known = name in NAMES
            if known and (problem := _problem(name, getattr(self, name), _HINTS[name])):
                raise DualencError(problem, fix=remedy, where=source)

    def entries(self) -> dict[str, Any]:
        """Return the recorded entries, as they are written to meta.json."""
        recorded = {**vars(self), **self.other}
        return {name: recorded[name] for name in self.order}

    def updated(self, **entries: Any) -> Provenance:
        """Return the record with changed entries, which keep their places; new ones come last."""
        return self.from_entries({**self.entries(), **entries})

    def only(self, names: Iterable[str]) -> Provenance:
        """Return the record of the given entries, in that order, as far as they are recorded."""
        entries = self.entries()
        return self.from_entries({name: entries[name] for name in names if name in entries})

    def without(self, names: Iterable[str]) -> Provenance:
        """Return the record without the given entries."""
        left_out = set(names)
        return self.only([name for name in self.order if name not in left_out])

    def difference(self, expected: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
        """Return the first entry with another value: name, recorded value and expected one."""
        entries = self.entries()
        for name, value in expected.items():
            if entries.get(name) != value:
                return name, entries.get(name), value
        return None

    @property
    def measured(self) -> Provenance:
        """The measurements of the build, also if the index was changed afterwards."""
        return self if self.when_built is None else self.from_entries(self.when_built)

    def write(self, folder: StrPath) -> None:
        """Write the meta.json of a folder."""
        write_json(Path(folder) / META, self.entries())


class Recorded:
    """Base class of vectors with a record: embeddings, indexes and collections of an engine."""

    provenance: Provenance

    def record(self, **entries: Any) -> None:
        """Change entries of the provenance, such as the search `settings`."""
        self.provenance = self.provenance.updated(**entries)


_HINTS = get_type_hints(Provenance)
NAMES = tuple(name for name in _HINTS if name not in ("other", "order"))


def _problem(label: str, value: object, hint: Any) -> str:
    """Return why a JSON value is not of an annotated type; "" if it is.

    Args:
        label: name of the value.
        value: the value.
        hint: a union with None, a Literal, Mapping, Sequence, or plain type.
    """
    options = get_args(hint)
    if NoneType in options:
        # null stands for an entry that is not recorded.
        return "" if value is None else _problem(label, value, options[0])
    if get_origin(hint) is Literal:
        expected = " or ".join(options)
        return "" if value in options else f"{label!r} is {str(value)[:40]!r}, not {expected}"
    kind = {Mapping: dict, Sequence: list}.get(get_origin(hint), hint)
    # Not isinstance: a bool is an instance of int. JSON has one type of numbers.
    if kind is not Any and type(value) not in ((int, float) if kind is float else (kind,)):
        actual = JSON_TYPES.get(type(value), type(value).__name__)
        return f"{label!r} is {actual}, not {JSON_TYPES[kind]}"
    nested = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(nested, list) or not options:
        return ""
    problems = (_problem(f"value of {label}", each, options[-1]) for each in nested)
    return next(filter(None, problems), "")
