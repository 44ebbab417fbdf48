"""Evaluate retrieval on BEIR collections and tables of pairs, with BM25 and fusion as baselines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Unpack

import numpy as np

from dualenc import distributed
from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus, RetrievalSet, held_out
from dualenc.data.item_lists import VectorItems
from dualenc.data.readers.beir import (
    check_judged,
    expand_name,
    read_beir,
    read_corpus,
    read_judged_queries,
)
from dualenc.data.readers.detect import RETRIEVAL_KINDS, default_split, detect
from dualenc.data.readers.sources import open_pairs
from dualenc.data.store.items import rows_of
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import Run
from dualenc.evaluation.report_page import Table
from dualenc.evaluation.retrieval import (
    Result,
    bm25_run,
    cutoff_rows,
    first_documents,
    metrics_document,
    report_self_matches,
    retrieve,
    split_by_training,
    summary_rows,
)
from dualenc.evaluation.runs import check_trec_names, ranked
from dualenc.io.files import removed_if_refused
from dualenc.search.documents import open_documents
from dualenc.search.fusion import fuse
from dualenc.search.searcher import check_encoder
from dualenc.types import StrPath, one_or_several
from dualenc.workflows.evaluation_folder import EvaluationFolder, EvaluationResult, evaluation_of
from dualenc.workflows.pair_columns import PairColumns
from dualenc.workflows.result_folder import RESULT
from dualenc.workflows.session import short_name

if TYPE_CHECKING:
    from dualenc.data.store.vector_shards import Embeddings
    from dualenc.encoders import DualEncoder

DEPTH = 100
"""Documents retrieved for each query: the largest cutoff of the metrics."""
BM25 = "BM25"
HYBRID = "hybrid"
FOLDERS = {BM25: "bm25", HYBRID: "hybrid"}
"""Folders of the run files of systems other than the model."""
WEIGHT = 0.5


class _Settings(NamedTuple):
    """Settings that several steps of a retrieval evaluation need."""

    split: str | None
    columns: PairColumns
    documents: str | None
    bm25: bool
    hybrid: Literal["rrf", "weighted"] | None
    weight: float
    keep_self_matches: bool
    batch_size: int

    @property
    def needs_texts(self) -> bool:
        """True if a system scores words."""
        return self.bm25 or self.hybrid is not None


def evaluate_retrieval(
    model: str,
    data: str | Sequence[str],
    *,
    split: str | None = None,
    documents: str | None = None,
    bm25: bool = False,
    hybrid: Literal["rrf", "weighted"] | None = None,
    weight: float = WEIGHT,
    keep_self_matches: bool = False,
    batch_size: int = 32,
    out: StrPath | None = None,
    device: str | None = None,
    progress: bool = True,
    **columns: Unpack[PairColumns],
) -> EvaluationResult:
    """Evaluate a query-document model, or an adapter of vectors, on collections or pairs of texts.

    Writes metrics.json, report.html and, for each collection, run.trec, per_query.ndjson and the
    embeddings, which the next evaluation of the same model reuses. Same as
    `dualenc evaluate retrieval`.

        result = dualenc.evaluate_retrieval("runs/first/model", "data/scifact", bm25=True)
        result.metrics["systems"]["first"]["mean"]["ndcg@10"]

    Args:
        model: model folder or name. A model that was adapted to an index needs `documents`, and is
            scored on all queries, on those with a relevant document that was in training, and on
            the others.
        data: one or several BEIR folders, hub collections or tables of pairs. Left texts of pairs
            are the queries, all right texts the corpus.
        split: split to evaluate; by default "test", and all of a single table.
        documents: an index, embeddings or a folder that `push` wrote. Its vectors are the documents
            of the BEIR folder, by id, instead of embedding the corpus.
        bm25: evaluate BM25 as well.
        hybrid: also fuse the model's ranking with BM25: "rrf" (reciprocal ranks) or "weighted"
            (weighted scores).
        weight: weight of the model in the fusion, from 0 to 1; BM25 gets 1 - weight.
        keep_self_matches: keep an unjudged document whose id is the query's. By default it is
            removed as a copy of the query.
        batch_size: number of texts per forward pass.
        out: folder to write; by default evaluations/retrieval/MODEL-DATA-HASH.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.
        columns: how the columns of a table are read, see
            `dualenc.workflows.pair_columns.PairColumns`.

    Returns:
        The metrics by system, and the folder with all files.

    Raises:
        DualencError: if the model cannot rank the data, or the folder holds something else.
    """
    # A weight without a fusion would be ignored, and the numbers mistaken for weighted ones.
    if hybrid is None and weight != WEIGHT:
        raise DualencError("--weight is for --hybrid", fix="give both, or leave it out")
    sources = [str(source) for source in one_or_several(data)]
    with evaluation_of("retrieval", model, sources[0], out, device, progress) as evaluation:
        # NanoBEIR stands for its thirteen collections.
        names = [name for source in sources for name in expand_name(source)]
        settings = _Settings(
            split, columns, documents, bm25, hybrid, weight, keep_self_matches, batch_size
        )
        _check_columns(names, columns)
        return _evaluate(evaluation, names, settings)


def _check_columns(data: Sequence[str], columns: PairColumns) -> None:
    """Raise if columns are named and none of the data has pairs in columns."""
    defaults = {"allow_outside": False}
    given = [name for name, value in columns.items() if value is not defaults.get(name)]
    if given and all(detect(source) in RETRIEVAL_KINDS for source in data):
        option = given[0].replace("_", "-")
        raise DualencError(
            f"--{option} is for tables of pairs, and {data[0]} is not one", fix="leave it out"
        )


def _evaluate(
    evaluation: EvaluationFolder, data: Sequence[str], settings: _Settings
) -> EvaluationResult:
    """Rank the documents of every collection with every system, and score the rankings."""
    split = settings.split or default_split(data[0])
    # A refused evaluation leaves no new folder behind.
    with removed_if_refused(evaluation.folder, RESULT):
        indexed = None
        if settings.documents is not None:
            indexed = open_documents(settings.documents, evaluation.folder)
        encoder = _open_encoder(evaluation, indexed, settings)
        collections = _open_collections(data, settings, indexed)
    results: list[Result] = []
    for name, collection in collections.items():
        folder = Path(name if len(data) > 1 else "")
        dense = _rank_by_model(evaluation, folder, encoder, collection, indexed, split, settings)
        # All processes embed and search; the main one scores and writes.
        if not distributed.is_main():
            continue
        own = short_name(evaluation.model)
        # A model may be called like one of the other systems.
        runs: dict[str, Run] = {f"{own} (model)" if own in FOLDERS else own: dense}
        runs |= _other_runs(dense, collection, settings)
        for system, run in runs.items():
            result = Result(system, name, run, collection.qrels, len(collection.corpus))
            result.write(evaluation.folder / folder / FOLDERS.get(system, ""))
            results.append(result)
            # Adapted models are also scored by whether a document was in training.
            if run is dense and isinstance(encoder, IndexEncoder) and encoder.trained_ids:
                results += split_by_training(result, encoder.trained_ids)
    return distributed.from_main(
        lambda: evaluation.conclude(
            "Retrieval",
            ", ".join(collections),
            _facts(split, settings),
            {"systems": metrics_document(results)},
            [_summary(results), Table("All metrics", cutoff_rows(results))],
        )
    )


def _summary(results: Sequence[Result]) -> Table:
    """Return the main metrics; what is equal in all rows is in the caption."""
    rows = summary_rows(results)
    about = {(row["data"], row["queries"], row["documents"]) for row in rows}
    systems = {row["system"] for row in rows}
    caption, said = "Retrieval", set()
    if len(about) == 1:
        data, queries, documents = about.pop()
        caption += f" on {data}: {queries:,} queries, {documents:,} documents"
        said = {"data", "queries", "documents"}
    elif len(systems) == 1:
        caption += f" by {systems.pop()}"
        said = {"system"}
    return Table(
        caption,
        [{name: value for name, value in row.items() if name not in said} for row in rows],
    )


def _open_encoder(
    evaluation: EvaluationFolder, indexed: Embeddings | None, settings: _Settings
) -> DualEncoder:
    """Load the model; raise if it does not fit the vectors of `documents`."""
    # Opened before the data: an adapted model without --documents may come with no corpus.
    encoder = evaluation.open("query-document", "vector", "query-index")
    if indexed is not None:
        check_encoder(encoder, indexed.provenance, indexed.dim, str(settings.documents))
    elif isinstance(encoder, IndexEncoder):
        raise DualencError(
            "encodes queries for the vectors of an index",
            fix="name it by --documents INDEX",
            where=evaluation.model,
        )
    return encoder


def _open_collections(
    data: Sequence[str], settings: _Settings, indexed: Embeddings | None
) -> dict[str, RetrievalSet]:
    """Open every collection, by the name of its folder or file."""
    collections: dict[str, RetrievalSet] = {}
    for source in data:
        name, collection = _open_collection(source, settings, indexed)
        if name in collections:
            raise DualencError(
                f"two folders are named {name}", fix="rename one, or evaluate them one by one"
            )
        report_self_matches(name, collection, settings.keep_self_matches)
        # Metrics, run files and folders go by this name.
        collections[name] = collection
    return collections


def _open_collection(
    source: str, settings: _Settings, indexed: Embeddings | None
) -> tuple[str, RetrievalSet]:
    """Open one collection; return the name of its folder or file with it."""
    split = settings.split or default_split(source)
    if detect(source) in RETRIEVAL_KINDS:
        # Resolved, because the name of "." is empty.
        name = Path(source).resolve().name
        if indexed is None:
            collection = read_beir(source, split)
        else:
            collection = _over_index(indexed, source, split, settings)
    elif indexed is not None:
        raise DualencError(
            "does not name documents of the index",
            fix="--documents needs a BEIR folder",
            where=source,
        )
    else:
        name = Path(source).stem
        collection = _open_pairs(source, split, settings.columns)
    if collection.corpus.modality != "text" and settings.needs_texts:
        raise DualencError(
            "--bm25 needs texts, and it holds vectors", fix="leave it out", where=source
        )
    # Run files cannot hold some names; refuse them before hours of embedding.
    check_trec_names(collection.queries.ids, f"{source}: query id")
    check_trec_names(collection.corpus.ids, f"{source}: document id")
    return name, collection


def _over_index(indexed: Embeddings, source: str, split: str, settings: _Settings) -> RetrievalSet:
    """Return the judged queries of a BEIR folder, and the documents of an index in its order.

    The documents' texts are read from the folder if they are needed; otherwise the snippets of the
    index stand for them.
    """
    index = str(settings.documents)
    bad_rows = BadRows(source)
    queries, qrels = read_judged_queries(Path(source), split, indexed.ids, bad_rows)
    check_judged(source, qrels, indexed.ids, index)
    if settings.needs_texts:
        # In the order of the index, whose vectors are not copied.
        texts = read_corpus(source, bad_rows=bad_rows)
        rows = rows_of(texts.ids, indexed.ids)
        if (rows < 0).any():
            missing = indexed.ids[int(np.argmin(rows))][:80]
            raise DualencError(
                f"its corpus lacks {missing!r}, which is in {index}",
                fix="leave --bm25 out",
                where=source,
            )
        corpus = texts.take(rows)
    elif indexed.snippets is not None:
        corpus = Corpus(indexed.ids, indexed.snippets)
    else:
        corpus = Corpus(indexed.ids, VectorItems(indexed.vectors), "vector")
    bad_rows.report()
    return RetrievalSet(queries, corpus, qrels)


def _open_pairs(source: str, split: str, columns: PairColumns) -> RetrievalSet:
    """Open pairs as a collection: left items are the queries, right items (up to 100,000) the
    corpus."""
    try:
        pairs = open_pairs(source, **columns, split=split)
    except DualencError as error:
        if Path(source).is_file():
            raise
        # A path that is not a file may also be a misspelled or incomplete BEIR folder.
        reason = str(error).removeprefix(f"{source}: ")
        raise DualencError(
            "neither a BEIR folder (corpus.jsonl, queries.jsonl, qrels/) nor pairs "
            f"(csv, jsonl, parquet, hub name): {reason}",
            where=source,
        ) from error
    if "image" in (pairs.left_modality, pairs.right_modality):
        raise DualencError("holds images", fix="use `dualenc evaluate image-text`", where=source)
    return held_out(pairs)


def _rank_by_model(
    evaluation: EvaluationFolder,
    folder: Path,
    encoder: DualEncoder,
    collection: RetrievalSet,
    indexed: Embeddings | None,
    split: str,
    settings: _Settings,
) -> Run:
    """Embed a collection below a folder of the output, and search it exactly."""
    embeddings = folder / "embeddings"
    batch_size = settings.batch_size
    queries = evaluation.embed(
        embeddings / f"queries-{split}", encoder, "left", collection.queries, batch_size
    )
    if indexed is None:
        documents = evaluation.embed(
            embeddings / "documents", encoder, "right", collection.corpus, batch_size
        )
    else:
        documents = indexed
        # The index may hold only the first components of a Matryoshka model.
        queries = queries.first(documents.dim)
    return retrieve(
        queries.ids,
        queries.vectors,
        documents.ids,
        documents.vectors,
        depth=DEPTH,
        qrels=None if settings.keep_self_matches else collection.qrels,
        device=evaluation.device,
    )


def _other_runs(dense: Run, collection: RetrievalSet, settings: _Settings) -> dict[str, Run]:
    """Return the runs of BM25, and of the model's run fused with BM25's."""
    if not settings.needs_texts:
        return {}
    # One document more takes the place of a self-match.
    words = bm25_run(collection, DEPTH + 1)
    qrels = None if settings.keep_self_matches else collection.qrels
    words = first_documents(words, DEPTH, qrels)
    if settings.hybrid is None:
        return {BM25: words}
    weights = [settings.weight, 1 - settings.weight]
    fused = {}
    for query in dense:
        rankings = [
            [(name, run[query][name]) for name in ranked(run[query])] for run in (dense, words)
        ]
        fused[query] = dict(fuse(rankings, settings.hybrid, weights=weights)[:DEPTH])
    return {BM25: words, HYBRID: fused}


def _facts(split: str, settings: _Settings) -> dict[str, object]:
    """Return the settings that metrics.json and the report record."""
    facts: dict[str, object] = {
        "split": split,
        "depth": DEPTH,
        "keep_self_matches": settings.keep_self_matches,
    }
    if settings.documents is not None:
        facts["documents"] = settings.documents
    if settings.hybrid is not None:
        facts |= {"hybrid": settings.hybrid, "weight": settings.weight}
    return facts
