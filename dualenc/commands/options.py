"""Groups of options, most of them shared by several commands; `dualenc.cli` flattens them."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter, convert, validators
from cyclopts.types import NormFloat, PositiveInt

from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.search.engines.column_names import TableColumnNames


def _split(kind: Any, tokens: Sequence[Any]) -> Any:
    """Convert `1,5` and `10`; double quotes protect commas: `"last, first",year`."""
    # As csv, since names of columns may hold commas.
    rows = csv.reader([token.value for token in tokens], skipinitialspace=True)
    return convert(kind, [part.strip() for row in rows for part in row])


def refuse_together(option: str, others: Mapping[str, object]) -> None:
    """Raise if an option comes with others that it would leave without effect.

    Args:
        option: the given option, such as "--rollback".
        others: values by option; None and False mean that the option was not given.
    """
    for name, value in others.items():
        if value is not None and value is not False:
            raise DualencError(f"{option} does not go with {name}", fix="leave one of them out")


def given_options(options: Any) -> dict[str, bool]:
    """Return for each option of a group, such as "--batch-size", if it differs from its default."""
    # cyclopts does not say which options were typed; one that equals its default changes nothing.
    default = vars(type(options)())
    changed = {name: value != default[name] for name, value in vars(options).items()}
    return {f"--{name.replace('_', '-')}": is_changed for name, is_changed in changed.items()}


COMMAS = Parameter(converter=_split, n_tokens=1)
"""Marks a list that is split at commas. Other lists repeat their option, so that texts may hold
commas."""

BatchSize = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1 << 20))]
Workers = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1024))]
Candidates = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=1 << 24))]
"""Number of lists or items that a search visits. HNSW reserves memory for each, hence the limit."""


@dataclass(frozen=True)
class SourceOptions:
    """How the items of a corpus are read.

    Args:
        split: split of a data set that has several.
        text_column: column with the texts; by default one with a usual name.
        image_column: column with the images; by default one with a usual name.
        vector_column: column with the vectors; by default one with a usual name.
        id_column: column with the ids; by default _id, id or another usual name. Without such a
            column, or with none, ids are row numbers.
        columns: further columns of a table to filter results by, separated by commas; double quotes
            protect a comma inside a name.
        quotes: read " as enclosing fields; by default in csv files, and in tsv files whose header
            is quoted.
        allow_outside: let image paths lead out of the folder of the table; only for a table that
            you trust.
    """

    split: str = "train"
    text_column: str | None = None
    image_column: str | None = None
    vector_column: str | None = None
    id_column: str | None = None
    columns: Annotated[list[str] | None, COMMAS] = None
    quotes: bool | None = None
    allow_outside: bool = False


@dataclass(frozen=True)
class EmbedOptions:
    """How items are embedded.

    Args:
        batch_size: items per forward pass.
        dtype: precision of the stored vectors.
        output: embedding for unit vectors, features for what probes use.
        dim: number of components to keep, for models trained with `dims`; by default all.
        autocast: precision of the forward passes.
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
        metric: cosine, or ip for the inner product; by default that of a FAISS file, or cosine.
        dim: number of components of the vectors to index; queries are cut likewise. By default
            all.
        memory: memory for building and searching, such as 2GiB; by default that of the machine.
        target_recall: recall@10 that auto and the search parameters aim at.
        recall_queries: number of queries to measure recall@10 with; 0 measures nothing.
        queries: embeddings of real queries to measure with; by default a sample of the database.
    """

    factory: str = "auto"
    metric: Literal["cosine", "ip"] | None = None
    dim: PositiveInt | None = None
    memory: str | None = None
    target_recall: NormFloat = 0.95
    recall_queries: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=1 << 20))] = 500
    queries: str | None = None


@dataclass(frozen=True)
class TableNames:
    """A table of PostgreSQL, or a collection of Qdrant, for a URL.

    Args:
        table: table, as table or schema.table, with double quotes around a name with a dot
            ('"a.b"'); or collection, by its name or alias.
        id: column of unique ids, by default the primary key; in Qdrant the payload field with the
            ids of --data, by default the ids of points.
        text: column or field of texts; by default the only one of its type.
        vector: column of vectors, or named vector; by default the only one.
    """

    table: str | None = None
    id: str | None = None
    text: str | None = None
    vector: str | None = None

    def columns(self) -> TableColumnNames:
        """Return the names of the columns."""
        from dualenc.search.engines.column_names import TableColumnNames

        return TableColumnNames(self.id, self.text, self.vector)


@dataclass(frozen=True)
class SearchOptions:
    """How an index or an engine is opened.

    Args:
        model: model folder or name, if the model that built the index has moved.
        nprobe: number of lists that an IVF index visits; by default chosen by the build or engine.
        ef_search: number of candidates of an HNSW index; by default chosen by the build or engine.
        device: device, such as cpu or cuda:0.
    """

    model: str | None = None
    nprobe: Candidates | None = None
    ef_search: Candidates | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class OutputOptions:
    """Output folder and device of an evaluation.

    Args:
        out: folder to write; by default evaluations/TASK/MODEL-DATA-HASH.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """

    out: str | None = None
    device: str | None = None


@dataclass(frozen=True)
class ColumnOptions:
    """The columns of a table of pairs.

    Args:
        left_column: column with queries or images; by default one with a usual name.
        right_column: column with documents or captions (one, or a list in each row); by default one
            with a usual name.
        left_modality: modality of the left column; by default detected from its values.
        right_modality: modality of the right column; by default detected from its values.
        weight_column: column with labels, grades or weights of the rows, 0 for pairs that do not
            match; by default a column of labels with a usual name; none reads no weights.
        quotes: read " as enclosing fields; by default in csv files, and in tsv files whose header
            is quoted.
        allow_outside: let image paths lead out of the folder of the table; only for a table that
            you trust.
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
    """Options that change the ranking beyond similarity.

    Args:
        hybrid: fuse with BM25 by reciprocal ranks (rrf) or weighted scores (weighted).
        weight: weight of the vectors in a fusion, from 0 to 1; BM25 has the rest.
    """

    hybrid: Literal["rrf", "weighted"] | None = None
    weight: NormFloat = 0.5

    def check(self) -> None:
        """Raise if a weight is given without a fusion."""
        if self.hybrid is None and self.weight != type(self).weight:
            raise DualencError("--weight is for --hybrid", fix="give both, or leave it out")
