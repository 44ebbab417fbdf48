"""Retrieval: a query-document model on BEIR folders and tables of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dualenc import distributed
from dualenc.data.beir import read_beir
from dualenc.data.corpus import held_out
from dualenc.data.detect import default_split, detect
from dualenc.data.sources import open_pairs
from dualenc.data.urls import display_name as source_name
from dualenc.data.urls import is_url
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.embedding import embed_into
from dualenc.evaluation.engine import EvaluatedEngine, open_evaluated_engine
from dualenc.evaluation.metrics import CUTOFFS
from dualenc.evaluation.output import Evaluation, display_name, open_model
from dualenc.evaluation.query_scores import best_and_worst_rows, snippet
from dualenc.evaluation.report import Figure, Table
from dualenc.evaluation.retrieval import (
    HEADLINES,
    Result,
    by_system,
    cutoff_rows,
    metrics_document,
    report_self_matches,
    summary_rows,
)
from dualenc.evaluation.runs import check_trec_names, ranked
from dualenc.evaluation.systems import BM25, HYBRID, RERANKED, Systems
from dualenc.search.rerank import open_cross_encoder
from dualenc.search.where import named_columns, rows_that_meet
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import RetrievalSet
    from dualenc.encoders import DualEncoder
    from dualenc.evaluation.options import ColumnOptions, EngineOptions, OutputOptions, RankingOptions, RetrievalOptions

FOLDERS = {BM25: "bm25", HYBRID: "hybrid", RERANKED: "reranked"}
"""Where the run files of systems other than the model and an engine are."""


def evaluate(
    model: str,
    data: Sequence[str],
    options: RetrievalOptions,
    columns: ColumnOptions,
    ranking: RankingOptions,
    engine_options: EngineOptions,
    output: OutputOptions,
) -> None:
    """Rank the documents of every collection by the model and the other systems, and score the rankings."""
    _check(options, engine_options, len(data))
    evaluation = Evaluation("retrieval", model, data[0], output)
    conditions = engine_options.where or []
    collections = {}
    for source in data:
        name, collection = _open_collection(source, options, columns, conditions)
        if name in collections:
            raise DualencError(f"two folders are named {name}; rename one, or evaluate them one by one")
        _check_collection(source, collection, options.bm25 or ranking.hybrid is not None, ranking)
        report_self_matches(name, collection, options.keep_self_matches)
        collections[name] = collection
    split = _split_of(data[0], options.split)
    encoder = open_model(model, ("query-document", "vector"), evaluation.device)
    evaluation.check_weights(encoder.left, encoder.right)
    rescore = None
    if ranking.rerank is not None:
        device = str(evaluation.device)
        rescore, _ = open_cross_encoder(ranking.rerank, batch_size=options.batch_size, device=device)
    engine = _open_engine(engine_options, encoder, collections)
    systems = Systems(display_name(model), options, ranking, evaluation.device, rescore, engine)

    results: list[Result] = []
    folders = {name: evaluation.folder / name if len(data) > 1 else evaluation.folder for name in collections}
    for name, collection in collections.items():
        kept = folders[name] / "embeddings"
        how: dict[str, Any] = {"batch_size": options.batch_size, "model": model}
        queries = embed_into(kept / f"queries-{split}", encoder.left, collection.queries, side="left", **how)
        if engine is not None:
            documents = engine.embeddings
        else:
            documents = embed_into(kept / "documents", encoder.right, collection.corpus, side="right", **how)
        results += systems.rank(name, collection, queries, documents)
    if engine is not None:
        engine.index.close()

    if distributed.is_main():
        facts: dict[str, object] = {"model": model, "split": split, "depth": options.depth}
        facts |= {"keep_self_matches": options.keep_self_matches, **_facts(ranking, engine_options)}
        _report(evaluation, facts, collections, results, folders, engine)
    distributed.barrier()


def _check(options: RetrievalOptions, engine: EngineOptions, num_collections: int) -> None:
    """Refuse options that exclude each other."""
    if options.depth < max(CUTOFFS):
        least = max(CUTOFFS)
        raise DualencError(f"depth={options.depth}: the metrics look at {least} documents; retrieve that many or more")
    if engine.engine is None and (engine.qdrant_path is not None or engine.filter):
        raise DualencError("--qdrant-path and --filter are for an engine; name it with --engine, or leave them out")
    if engine.engine is not None and engine.where:
        raise DualencError("an engine filters in its own language; give --filter instead of --where")
    if engine.engine is not None and (num_collections > 1 or distributed.world_size() > 1):
        raise DualencError("--engine is asked about one BEIR folder, by one process; evaluate them one by one")


def _facts(ranking: RankingOptions, engine: EngineOptions) -> dict[str, object]:
    """The options that differ from plain retrieval, for the record."""
    facts: dict[str, object] = {}
    if engine.where:
        facts["where"] = ",".join(engine.where)
    if engine.filter:
        facts["filter"] = engine.filter
    if ranking.hybrid is not None:
        facts |= {"hybrid": ranking.hybrid, "weight": ranking.weight}
    if ranking.rerank is not None:
        facts |= {"rerank": ranking.rerank, "rerank_top": ranking.rerank_top}
    return facts


def _open_engine(
    options: EngineOptions, encoder: DualEncoder, collections: dict[str, RetrievalSet]
) -> EvaluatedEngine | None:
    """Open the engine, if one is named, and restrict the one collection to the documents that match --filter."""
    if options.engine is None:
        return None
    name, collection = next(iter(collections.items()))
    ids = collection.corpus.ids
    engine = open_evaluated_engine(options.engine, options.filter, encoder.right, ids, options.qdrant_path)
    if options.filter:
        matching = set(engine.embeddings.ids)
        collections[name] = _among(collection, np.array([each in matching for each in ids]), name, "--filter")
    return engine


def _report(
    evaluation: Evaluation,
    facts: Mapping[str, object],
    collections: Mapping[str, RetrievalSet],
    results: Sequence[Result],
    folders: Mapping[str, Path],
    engine: EvaluatedEngine | None,
) -> None:
    """Write the run files of each collection and system, the metrics and the report."""
    queries: list[Table] = []
    for result in results:
        if result.system == results[0].system:
            rows = _query_rows(result, collections[result.dataset])
            queries.append(Table(f"Best and worst queries of {result.system} on {result.dataset}", rows))
        folder = FOLDERS.get(result.system, "")
        if engine is not None and result.system == engine.system:
            folder = "engine"
        result.write(folders[result.dataset] / folder)
    document: dict[str, object] = {"systems": metrics_document(results)}
    tables = [Table("Retrieval", summary_rows(results))]
    if engine is not None:
        document["engine"] = engine.measured
        tables.append(Table("Engine against exact search", [engine.measured]))
    evaluation.conclude(
        f"Retrieval: {display_name(evaluation.model)} on {', '.join(collections)}",
        facts,
        document,
        [*tables, Table("All metrics", cutoff_rows(results)), *queries],
        printed=len(tables),
        figures=_figures(by_system(results)),
        files="metrics, run files and report.html",
    )


def _open_collection(
    source: str, options: RetrievalOptions, columns: ColumnOptions, where: Sequence[str]
) -> tuple[str, RetrievalSet]:
    """A collection, restricted to the documents that meet `where`, and its name: that of its folder or file."""
    if detect(source) != "beir":
        shown = source_name(source)
        if where:
            raise DualencError(f"{shown}: --where is for fields of a BEIR folder; leave it out")
        return Path(shown).stem, _open_pairs(source, _split_of(source, options.split), columns)
    name = Path(source).resolve().name
    split = _split_of(source, options.split)
    collection = read_beir(source, split, titles=options.titles, columns=named_columns(where))
    if where:
        collection = _among(collection, rows_that_meet(where, collection.corpus.columns), name, "--where")
    return name, collection


def _check_collection(source: str, collection: RetrievalSet, bm25: bool, ranking: RankingOptions) -> None:
    """Refuse vectors where an option needs texts, and ids that run files cannot hold."""
    if collection.corpus.modality != "text" and (bm25 or ranking.rerank is not None):
        option = "bm25" if bm25 else "rerank"
        raise DualencError(f"{source}: --{option} needs texts, and it holds vectors; leave it out")
    check_trec_names(collection.queries.ids, f"{source}: query id")
    check_trec_names(collection.corpus.ids, f"{source}: document id")


def _split_of(source: str, split: str | None) -> str:
    """The split to read: as named, or the usual one."""
    if split is not None:
        return split
    return default_split(source, "test")


def _open_pairs(source: str, split: str, columns: ColumnOptions) -> RetrievalSet:
    """Pairs as a test: left items are the queries, the right items of all pairs the corpus."""
    shown = source_name(source)
    try:
        pairs = open_pairs(source, **vars(columns), split=split)
    except DualencError as error:
        if Path(source).is_file() or is_url(source):
            raise
        forms = "a BEIR folder (corpus.jsonl, queries.jsonl, qrels/) nor pairs (csv, jsonl, parquet, hub name)"
        reason = str(error).removeprefix(f"{shown}: ")
        raise DualencError(f"{shown}: neither {forms}: {reason}") from error
    if "image" in (pairs.left_modality, pairs.right_modality):
        raise DualencError(f"{shown}: holds images; use `dualenc evaluate image-text`")
    return held_out(pairs)


def _among(collection: RetrievalSet, kept: np.ndarray, name: str, option: str) -> RetrievalSet:
    """The collection restricted to the documents that meet an option's condition; prints what is left of it."""
    try:
        restricted = collection.among(kept)
    except DualencError as error:
        raise DualencError(f"{option}, {name}: {error}") from None
    if distributed.is_main():
        documents = f"{len(restricted.corpus):,} of {len(collection.corpus):,} documents meet {option}"
        before = len(collection.queries)
        queries = f"{before - len(restricted.queries):,} of {before:,} queries have no relevant one among them"
        print(printable(f"{name}: {documents}; {queries} and are left out"))
    return restricted


def _figures(systems: dict[str, list[Result]]) -> list[Figure]:
    heights = {}
    for system, own in systems.items():
        heights[system] = {metric: own[0].means[metric] for metric in HEADLINES}
        if len(own) > 1:
            heights[system] = {result.dataset: result.means["ndcg@10"] for result in own}
    spread = {system: [s["ndcg@10"] for r in own for s in r.per_query.values()] for system, own in systems.items()}
    return [
        Figure("Mean scores by metric, or nDCG@10 by collection", plots.bars(heights)),
        Figure("nDCG@10 over queries", plots.histograms(spread, xlabel="nDCG@10", ylabel="share of queries", bins=20)),
    ]


def _query_rows(result: Result, collection: RetrievalSet) -> list[dict[str, object]]:
    """The best and the worst queries by nDCG@10: their text, their first document, the rank of the first relevant."""
    query_row = {name: row for row, name in enumerate(collection.queries.ids)}
    document_row = {name: row for row, name in enumerate(collection.corpus.ids)}

    def describe(query: str) -> dict[str, object]:
        ranking = ranked(result.run.get(query, {}))
        relevant = {name for name, grade in result.qrels[query].items() if grade > 0}
        ranks = [rank for rank, name in enumerate(ranking, start=1) if name in relevant]
        row: dict[str, object] = {"first relevant at rank": ranks[0] if ranks else None}
        if collection.queries.modality == "text":
            row["text"] = snippet(str(collection.queries[query_row[query]]))
        if ranking:
            text = str(collection.corpus[document_row[ranking[0]]]) if collection.corpus.modality == "text" else ""
            row["first document"] = snippet(f"{ranking[0]}: {text}")
        return row

    scores = {query: metrics["ndcg@10"] for query, metrics in result.per_query.items()}
    return best_and_worst_rows(scores, "ndcg@10", describe)
