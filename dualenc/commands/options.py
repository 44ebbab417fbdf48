"""Options that several commands share, or that belong together; `dualenc.cli` makes a flat list of
them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from cyclopts import Parameter, convert, validators
from cyclopts.types import NormFloat, PositiveInt

from dualenc.errors import DualencError


def _split(kind: Any, tokens: Sequence[Any]) -> Any:
    """Convert `1,5` and `10`; double quotes protect commas: `"last, first",year`."""
    rows = csv.reader([token.value for token in tokens], skipinitialspace=True)
    return convert(kind, [part.strip() for row in rows for part in row])


def refuse_together(option: str, others: Mapping[str, object]) -> None:
    """Raise if an option is given with others that it would leave without effect.

    Args:
        option: what is given, such as "--verify".
        others: values by option; none, false and empty ones are not given.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise DualencError(f"{option} does not go with {name}; leave one of them out")


def given_options(options: Any) -> dict[str, bool]:
    """Return by option of a dataclass, such as "--batch-size", if it is not its default."""
    default = vars(type(options)())
    changed = {name: value != default[name] for name, value in vars(options).items()}
    return {f"--{name.replace('_', '-')}": is_changed for name, is_changed in changed.items()}


COMMAS = Parameter(converter=_split, n_tokens=1)
"""Marks a list that is split at commas; texts of any other list may hold commas, and its option may
be repeated."""

BatchSize = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1 << 20))]
Workers = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1024))]
Candidates = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1 << 24))]
"""Lists or items that a search visits; an HNSW search reserves memory for each."""


@dataclass(frozen=True)
class SourceOptions:
    """Where the items of a corpus are.

    Args:
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        image_column: column with the images, where it has no usual name.
        vector_column: column with the vectors, where it has no usual name.
        id_column: column with the ids; by default _id, id or another usual name. Without one, or by
            none, row numbers.
        columns: further columns of a table, separated by commas, kept to filter results by; double
            quotes protect the comma of a name.
        quotes: whether " encloses fields; by default of csv files, and of tsv files whose header is
            in quotes.
        allow_outside: let image paths lead out of the table's folder; only for a table that you
            trust.
    """

    split: str = "train"
    text_column: str | None = None
    image_column: str | None = None
    vector_column: str | None = None
    id_column: str | None = None
    columns: Annotated[list[str] | None, COMMAS] = None
    quotes: bool | None = None
    allow_outside: bool = False

    def given(self) -> dict[str, Any]:
        """What is not as by default, but for the columns to keep and trust: how to read the same
        items again."""
        kept = {
            name: value
            for name, value in vars(self).items()
            if name not in ("columns", "allow_outside")
        }
        return {name: value for name, value in kept.items() if value != getattr(type(self), name)}

    @classmethod
    def recorded(cls, meta: Mapping[str, Any], source: str) -> dict[str, Any]:
        """Return what a meta.json records as `given`, so that the same items are read; refuse
        anything else."""
        reading = meta.get("read", {})
        names = {field.name for field in fields(cls)} - {"columns", "allow_outside"}
        if isinstance(reading, dict) and names.issuperset(reading):
            kinds = {"quotes": bool}
            if all(isinstance(value, kinds.get(name, str)) for name, value in reading.items()):
                return reading
        # The meta.json may be a stranger's: paths outside a table's folder are allowed by the user
        # alone.
        problem = f"'read' in meta.json is {str(reading)[:80]}, not how the data was read"
        raise DualencError(f"{source}: {problem}; build it again")


@dataclass(frozen=True)
class EmbedOptions:
    """How items are embedded.

    Args:
        batch_size: items per forward pass.
        dtype: precision of the stored vectors.
        output: embedding for unit vectors, features for what probes use.
        dim: keep only so many of the first components, as models trained with `dims` allow; by
            default all.
        autocast: run the model in this precision.
        num_workers: processes that decode images.
        on_error: skip (and count) bad samples, or raise at the first one.
    """

    batch_size: BatchSize = 32
    dtype: Literal["float16", "float32"] = "float32"
    output: Literal["embedding", "features"] = "embedding"
    dim: PositiveInt | None = None
    autocast: Literal["bfloat16", "float16"] | None = None
    num_workers: Workers | None = None
    on_error: Literal["skip", "raise"] = "skip"


@dataclass(frozen=True)
class BuildOptions:
    """The kind of an index, and how its quality is measured.

    Args:
        factory: auto, or any FAISS factory string such as Flat, HNSW32, IVF1024,Flat or
            OPQ32,IVF4096,PQ32.
        metric: cosine, or ip for the inner product.
        dim: index only so many of the first components of the vectors; queries are cut likewise; by
            default all.
        memory: memory for building and searching, such as 2GiB; by default what the machine has.
        target_recall: recall@10 that auto and the search parameters are chosen for.
        recall_queries: how many queries to measure recall@10 with; 0 measures nothing.
        queries: embeddings of real queries to measure with; by default a sample of the database.
    """

    factory: str = "auto"
    metric: Literal["cosine", "ip"] = "cosine"
    dim: PositiveInt | None = None
    memory: str | None = None
    target_recall: NormFloat = 0.95
    recall_queries: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1 << 20))] = 500
    queries: str | None = None


@dataclass(frozen=True)
class SearchOptions:
    """How an index or an engine is opened.

    Args:
        model: model folder or name, if the one that made the index has moved.
        nprobe: lists that an IVF index visits; by default what the build or the engine chose.
        ef_search: candidates that an HNSW index keeps; by default what the build or the engine
            chose.
        device: such as cpu or cuda:0.
    """

    model: str | None = None
    nprobe: Candidates | None = None
    ef_search: Candidates | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class OutputOptions:
    """Where an evaluation computes and writes.

    Args:
        out: folder to write; by default evaluations/TASK/MODEL-DATA-HASH.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """

    out: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class ColumnOptions:
    """The columns of a table of pairs.

    Args:
        left_column: of a table of pairs, with queries or images, where it has no usual name.
        right_column: of a table of pairs, with documents or captions (one, or a list in each row),
            where it has no usual name.
        left_modality: of the left column; by default as its values look.
        right_modality: of the right column; by default as its values look.
        weight_column: labels, grades or weights of the rows, 0 for those that do not match; by
            default a column with a usual name that holds labels; none reads none.
        quotes: whether " encloses fields; by default of csv files, and of tsv files whose header is
            in quotes.
        allow_outside: let image paths lead out of the table's folder; only for a table that you
            trust.
    """

    left_column: str | None = None
    right_column: str | None = None
    left_modality: Literal["text", "image", "vector"] | None = None
    right_modality: Literal["text", "image", "vector"] | None = None
    weight_column: str | None = None
    quotes: bool | None = None
    allow_outside: bool = False


@dataclass(frozen=True)
class RankingOptions:
    """What decides the order of results beyond the vectors.

    Args:
        hybrid: fuse with BM25: by reciprocal ranks (rrf) or weighted scores (weighted).
        weight: with hybrid, of the vectors, from 0 to 1; BM25 has the rest.
    """

    hybrid: Literal["rrf", "weighted"] | None = None
    weight: NormFloat = 0.5

    def check(self) -> None:
        """Refuse a weight without a fusion."""
        if self.hybrid is None and self.weight != type(self).weight:
            raise DualencError("--weight is for --hybrid; give both, or leave it out")
