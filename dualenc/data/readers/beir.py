"""Retrieval collections: BEIR folders, and data sets of the Hugging Face hub.

A folder has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, or vectors in place of texts. On the
hub, documents, queries and judgements are configurations of a data set, in one of two layouts;
`datasets` loads them by name or from a folder with the same layout. mteb stores the judgements in
the configuration `default`, split by split, with scores. NanoBEIR stores them in `qrels`, without
scores, and calls every split train.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus, RetrievalSet, table_corpus
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.column_names import (
    DOCUMENT_IDS,
    IDS,
    IMAGES,
    LABELS,
    QUERY_IDS,
    columns_named,
    first_of,
)
from dualenc.data.readers.detect import detect_locally
from dualenc.data.readers.hub_data import has_configuration, load_from_hub
from dualenc.data.readers.lines import COMPRESSIONS, read_texts
from dualenc.data.readers.read_options import check_split
from dualenc.data.readers.tables import TableSource, check_columns
from dualenc.data.readers.vectors import matrix_corpus, vector_corpus
from dualenc.data.store.items import rows_of
from dualenc.errors import DualencError
from dualenc.io.reading import with_home
from dualenc.types import Integers, OnError, StrPath

# Six digits, so that a mistaken column, such as a timestamp, is not read as grades.
_GRADE = re.compile(r"[+-]?[0-9]{1,6}(\.0+)?")
_ID_NAMES = {"corpus": IDS, "queries": ("_id", "id", *QUERY_IDS, *IDS)}
Judgement = tuple[str, str, str, int]
"""Position (file:line, or row of a hub data set), query, document and grade."""
NANO_BEIR = "NanoBEIR"
"""Name that stands for the thirteen small collections below."""
_NANO_NAMES = (
    *("ClimateFEVER", "DBPedia", "FEVER", "FiQA2018", "HotpotQA", "MSMARCO", "NFCorpus", "NQ"),
    *("QuoraRetrieval", "SCIDOCS", "ArguAna", "SciFact", "Touche2020"),
)


class BeirPairs(PairDataset):
    """Relevant (query, document) pairs of one split, by query in the order of the qrels file.

    Left ids number the queries of this split that have a relevant document, in the order of
    queries.jsonl. Right ids are positions in the whole corpus: every document is a candidate of the
    global loss.

        BeirPairs("scifact", split="train").corpus.ids

    Texts may be replaced by vectors: folders of embeddings `corpus` and `queries`, or files
    corpus.parquet and queries.parquet with columns `_id` and `vector`.

    Args:
        path: the BEIR folder, or a collection of the Hugging Face hub: mteb/scifact,
            zeta-alpha-ai/NanoSciFact.
        split: the qrels file to train on, without `.tsv`, or the split of the hub's judgements.
        titles: whether to prepend a document's title to its text.
        weigh_grades: multiply a pair's loss by its grade over the mean grade, so that weights are 1
            on average.
        on_error: "skip" leaves out, counts and reports bad lines; "raise" stops at the first.

    Attributes:
        queries: the left items with their ids.
        corpus: the right items with their ids.
    """

    def __init__(
        self,
        path: str | Path,
        split: str = "train",
        *,
        titles: bool = True,
        weigh_grades: bool = False,
        on_error: OnError = "skip",
    ) -> None:
        queries, self.corpus, qrels = read_beir(path, split, titles=titles, on_error=on_error)
        self.queries, left_id, right_id, grades = relevant_pairs(queries, qrels, self.corpus.ids)
        if not len(grades):
            raise DualencError(
                "no usable pair",
                fix="judge a document of the corpus with grade 1 or more",
                where=path,
            )
        super().__init__(
            self.queries.items,
            self.corpus.items,
            left_id,
            right_id,
            weights=grades / np.mean(grades) if weigh_grades else None,
            left_modality=self.queries.modality,
            right_modality=self.corpus.modality,
        )
        self.skipped = self.corpus.skipped


def relevant_pairs(
    queries: Corpus, qrels: Mapping[str, Mapping[str, int]], document_ids: Sequence[str]
) -> tuple[Corpus, Integers, Integers, Integers]:
    """Return the relevant (query, document) pairs of judgements.

    Args:
        queries: the judged queries.
        qrels: judgements, `qrels[query id][document id] = grade`; grade 1 or more is relevant.
        document_ids: (N,) ids of the documents; pairs with other documents are left out.

    Returns:
        The queries with a relevant document; the query row, document row and grade of each pair,
        (M,) each.
    """
    # Grade 0 means judged and not relevant; documents without a grade are unjudged.
    relevant = [
        (query, document, grade)
        for query, judged in qrels.items()
        for document, grade in judged.items()
        if grade >= 1
    ]
    query_rows = rows_of(queries.ids, [query for query, _, _ in relevant])
    right_id = rows_of(document_ids, [document for _, document, _ in relevant])
    grades = np.array([grade for _, _, grade in relevant])
    is_pair = right_id >= 0
    used, left_id = np.unique(query_rows[is_pair], return_inverse=True)
    return queries.take(used), left_id, right_id[is_pair], grades[is_pair]


def read_beir(
    folder: StrPath, split: str = "test", *, titles: bool = True, on_error: OnError = "skip"
) -> RetrievalSet:
    """Read a BEIR folder for evaluation.

    Only queries judged in the split are returned. A judged document that is not in the corpus stays
    in the judgements and counts as never found, as in trec_eval.

    Args:
        folder: folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv (the jsonl files may be
            compressed), or any other path that `BeirPairs` accepts.
        split: the qrels file, without `.tsv`, or the split of the hub's judgements.
        titles: whether to prepend a document's title to its text.
        on_error: "skip" leaves out, counts and reports bad lines; "raise" stops at the first.
    """
    folder = with_home(Path(folder))
    bad_rows = BadRows(folder, on_error)
    if detect_locally(folder) != "hub":
        # A wrong split fails here, before the corpus is read.
        _qrels_file(folder, split)
    corpus = read_corpus(folder, "corpus", titles=titles, bad_rows=bad_rows)
    queries, qrels = read_judged_queries(folder, split, corpus.ids, bad_rows)
    corpus.skipped = bad_rows.report()
    return RetrievalSet(queries, corpus, qrels)


def has_test_judgements(source: StrPath) -> bool:
    """Return True for a BEIR folder that judges test queries.

    Args:
        source: any path.
    """
    return (Path(source) / "qrels" / "test.tsv").is_file()


def _qrels_file(folder: Path, split: str) -> Path:
    """Return the qrels file of a split; raise a `DualencError` if it does not exist."""
    if not folder.is_dir():
        raise DualencError(
            "no such folder",
            fix="give a BEIR folder with corpus.jsonl, queries.jsonl and qrels/",
            where=folder,
        )
    splits = sorted(file.stem for file in (folder / "qrels").glob("*.tsv"))
    if not splits:
        raise DualencError(
            f"no split {split!r}, since qrels/*.tsv is missing",
            fix="write judgements to it",
            where=folder,
        )
    check_split(folder, split, splits)
    return folder / "qrels" / f"{split}.tsv"


def read_judged_queries(
    folder: Path, split: str, document_ids: Sequence[str], bad_rows: BadRows
) -> tuple[Corpus, dict[str, dict[str, int]]]:
    """Return the queries that a split judges, and its judgements, without reading documents.

    Args:
        folder: BEIR folder, or collection of the hub.
        split: the qrels file, without `.tsv`, or the split of the hub's judgements.
        document_ids: (N,) ids of the corpus or index, to report judged documents that are missing.
        bad_rows: counts bad lines.
    """
    folder = with_home(folder)
    if detect_locally(folder) == "hub":
        entries = _hub_judgements(folder, split)
    else:
        entries = _fields_of_lines(_qrels_file(folder, split), bad_rows)
    judgements = list(_judgements(entries, bad_rows))
    queries = read_corpus(folder, "queries", bad_rows=bad_rows)
    query_row = {name: row for row, name in enumerate(queries.ids)}
    document_rows = rows_of(document_ids, [document for _, _, document, _ in judgements])
    qrels: dict[str, dict[str, int]] = {}
    for (position, query, document, grade), document_row in zip(judgements, document_rows):
        if query not in query_row:
            bad_rows.add(
                "judgement of an unknown query", position, f"{query!r} is not among the queries"
            )
            continue
        if document_row < 0:
            bad_rows.add(
                "judged document that is not in the corpus (kept as never found)",
                position,
                f"{document!r} is missing",
            )
        qrels.setdefault(query, {})[document] = grade
    bad_rows.require(len(qrels), "judgement")
    # In the order of queries.jsonl, so that reordered judgements give the same queries.
    rows = sorted(query_row[query] for query in qrels)
    return queries.take(rows), qrels


def check_judged(
    folder: str, qrels: Mapping[str, Mapping[str, int]], document_ids: Sequence[str], index: str
) -> None:
    """Raise a `DualencError` if none of the judged documents is in an index."""
    judged = {name for grades in qrels.values() for name in grades}
    if (rows_of(document_ids, judged) < 0).all():
        raise DualencError(
            f"{index} holds none of its {len(judged):,} judged documents",
            fix="name an index of these documents with their ids",
            where=folder,
        )


def read_corpus(
    folder: StrPath,
    part: str = "corpus",
    *,
    titles: bool = True,
    columns: Sequence[str] = (),
    bad_rows: BadRows,
) -> Corpus:
    """Return the documents (part "corpus") or queries (part "queries") of a BEIR folder.

    Args:
        folder: BEIR folder, or collection of the hub.
        part: "corpus" or "queries".
        titles: whether to prepend a document's title to its text.
        columns: further columns to keep for filters.
        bad_rows: counts bad lines.
    """
    folder = with_home(Path(folder))
    vectors = folder / f"{part}.parquet"
    has_titles = titles and part == "corpus"
    optional = ["title"]
    if detect_locally(folder) == "hub":
        source = _collection_table(folder, part, bad_rows)
        id_column = source.default_column(_ID_NAMES[part], "_id", fix="rename it to _id")
    elif detect_locally(folder / part) == "vectors":
        return matrix_corpus(folder / part, columns, bad_rows)
    elif vectors.is_file():
        source = TableSource(vectors, bad_rows)
        return vector_corpus(source, id_column=_id_column(source, part), columns=columns)
    else:
        files = [folder / f"{part}.jsonl{suffix}" for suffix in ("", *COMPRESSIONS)]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            raise DualencError(
                f"no {part}.jsonl in this folder",
                fix="a BEIR folder needs corpus.jsonl, queries.jsonl and qrels/",
                where=folder,
            )
        source = TableSource(file, bad_rows)
        id_column = _id_column(source, part)
        images = first_of(source.kinds, IMAGES)
        if images is not None and not {"text", "title"} & source.kinds.keys():
            return table_corpus(source, images, "image", id_column=id_column, columns=columns)
        if has_titles:
            # A document may consist of a title alone.
            optional.append("text")
    return table_corpus(
        source,
        "text",
        optional=optional,
        title_column="title" if has_titles else None,
        id_column=id_column,
        columns=columns,
    )


def _id_column(source: TableSource, part: str) -> str:
    """Return the column of ids, `_id` in BEIR."""
    return first_of(source.kinds, _ID_NAMES[part]) or "_id"


def _fields_of_lines(file: Path, bad_rows: BadRows) -> Iterator[tuple[str, list[str]]]:
    """Yield the position and [query, document, grade] of each line of a qrels file.

    A BEIR file has tab-separated `query-id, corpus-id, score`, or these in any order under a
    header; a TREC file has `query 0 document grade`.
    """
    places: list[int] = []
    num_columns = 0
    for number, line in read_texts(file, bad_rows):
        fields = line.split("\t")
        if number == 1 and (places := _header_places([field.strip() for field in fields])):
            num_columns = len(fields)
            continue
        if places and len(fields) == num_columns:
            fields = [fields[place] for place in places]
        # TREC separates fields by any white space. Its second column, iterations, is unused.
        words = line.split()
        if len(fields) != 3 and len(words) == 4:
            fields = [words[0], *words[2:]]
        yield f"{file}:{number}", fields


def _header_places(names: list[str]) -> list[int]:
    """Return the positions of query, document and grade in a header; [] if it is not a header.

    pandas begins a header with the nameless column of its index.
    """
    query = first_of(names, QUERY_IDS)
    document = first_of(names, DOCUMENT_IDS)
    known = [name for name in (query, document) if name is not None]
    if len(known) < 2 and not columns_named(names[-1:], LABELS):
        return []
    others = [name for name in names if name not in ("", "Unnamed: 0", *known)]
    if len(known) == 2:
        # TREC's unused column of iterations is dropped if another column is named like labels.
        others = columns_named(others, LABELS) or others
    return [names.index(name) for name in (*known, *others)]


def _judgements(entries: Iterable[tuple[str, list[str]]], bad_rows: BadRows) -> Iterator[Judgement]:
    """Yield judgements from positions and fields; malformed and repeated ones are bad rows."""
    seen: set[tuple[str, str]] = set()
    for position, fields in entries:
        grade = fields[-1].strip()
        if len(fields) != 3 or not all(fields[:2]) or not _GRADE.fullmatch(grade):
            fix = "write query-id, corpus-id and a whole score of at most 6 digits, by tabs"
            bad_rows.add("malformed judgement", position, fix)
            continue
        query, document, _ = fields
        if (query, document) in seen:
            bad_rows.add("pair judged twice", position, "keep one of them")
            continue
        seen.add((query, document))
        yield position, query, document, int(float(grade))


def expand_name(source: str) -> list[str]:
    """Return the collections that a name stands for: NanoBEIR's thirteen, or the name itself."""
    if source != NANO_BEIR or Path(source).exists():
        return [source]
    return [f"zeta-alpha-ai/Nano{name}" for name in _NANO_NAMES]


def _collection_table(source: StrPath, part: str, bad_rows: BadRows) -> TableSource:
    """Open the documents (part "corpus") or the queries of a collection."""
    splits = load_from_hub(str(source), part)
    if len(splits) > 1:
        raise DualencError(
            f"its {part} has splits ({', '.join(splits)})",
            fix="open one as a table",
            where=source,
        )
    return TableSource(f"{source} {part}", bad_rows, dataset=next(iter(splits.values())))


def _hub_judgements(source: StrPath, split: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the position and [query, document, grade] of each judgement, grade 1 without scores."""
    config = "qrels" if has_configuration(source, "qrels") else "default"
    splits = load_from_hub(str(source), config)
    # NanoBEIR calls its only split train, although it is for testing.
    if split == "test" and config == "qrels" and list(splits) == ["train"]:
        split = "train"
    check_split(source, split, splits)
    name = f"{source} {config}"
    rows = splits[split].data
    query = first_of(rows.column_names, QUERY_IDS) or "query-id"
    document = first_of(rows.column_names, DOCUMENT_IDS) or "corpus-id"
    check_columns(name, rows.column_names, [query, document])
    grades = columns_named(rows.column_names, LABELS)
    if len(grades) > 1:
        raise DualencError(
            f"columns {grades[0]!r} and {grades[1]!r} both look like grades",
            fix="remove one of them",
            where=name,
        )
    for row, record in enumerate(rows.to_pylist()):
        grade = record[grades[0]] if grades else 1
        # str(True) would not be a grade.
        if isinstance(grade, bool):
            grade = int(grade)
        fields = [record[query], record[document], grade]
        yield f"{name} row {row}", ["" if value is None else str(value) for value in fields]
