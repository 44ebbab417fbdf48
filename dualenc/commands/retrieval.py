"""`dualenc evaluate retrieval`: a query-document model on BEIR folders and tables of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dualenc import distributed
from dualenc.commands.checks import MAX_ITEMS, check_range
from dualenc.commands.evaluation import Evaluation, display_name, open_model
from dualenc.commands.options import ENGINE, RANKING, EngineOptions, RankingOptions
from dualenc.data.beir import is_beir, read_beir
from dualenc.data.corpus import held_out
from dualenc.data.sources import open_pairs, usual_split
from dualenc.data.urls import display_name as source_name
from dualenc.data.urls import is_url
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.compression import Size, halvings, size_rows, sizes
from dualenc.evaluation.embedding import embed_into
from dualenc.evaluation.engine import EvaluatedEngine, open_evaluated_engine
from dualenc.evaluation.metrics import CUTOFFS, Run, Scores
from dualenc.evaluation.report import Figure, Gallery, Table, retrieval_galleries
from dualenc.evaluation.retrieval import HEADLINES, Result, by_system, cutoff_rows, metrics_document, summary_rows
from dualenc.evaluation.runs import check_trec_names
from dualenc.evaluation.systems import BM25, HYBRID, RERANKED, Systems
from dualenc.search.rerank import open_cross_encoder
from dualenc.search.where import named_columns, rows_that_meet
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus, RetrievalSet
    from dualenc.encoders import DualEncoder

SIZE_METRICS = ("ndcg@10", "recall@100")
"""Metrics in the table of vector sizes."""
FOLDERS = {BM25: "bm25", HYBRID: "hybrid", RERANKED: "reranked"}
"""Where the run files of the systems besides the model are."""


def retrieval(
    model: str,
    data: str,
    *more: str,
    out: str | None = None,
    split: str | None = None,
    left_column: str | None = None,
    right_column: str | None = None,
    bm25: bool = False,
    ranking: RankingOptions = RANKING,
    depth: int = 100,
    titles: bool = True,
    keep_self_matches: bool = False,
    small_vectors: bool = False,
    dims: str | None = None,
    engine: EngineOptions = ENGINE,
    batch_size: int = 32,
    device: str | None = None,
) -> None:
    """Evaluate a query-document model, or an adapter of vectors, on BEIR folders or pairs of texts.

    Of pairs, left texts are the queries and all right texts the corpus; equal texts count once.

    Writes metrics.json, report.html and, for each data set, run.trec and per_query.ndjson. Embeddings are kept
    below OUT, so that an interrupted evaluation resumes where it stopped. With --rerank, the hybrid ranking is reranked
    if there is one, else the engine's, else the model's.

    Args:
        model: model folder or name.
        data: BEIR folder: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv, or embeddings in their place; or pairs: a table
            of two columns (csv, tsv, jsonl, parquet, a folder of them, a hub name).
        more: further folders or tables; the table of results then has a mean row.
        out: folder to write; by default evaluations/retrieval/MODEL-DATA-HASH.
        split: which judgements of a BEIR folder, or which split of a folder of tables or a hub name, by default test;
            of one table a slice such as train[90%:], by default all.
        left_column: of a table, with the queries, where it has no usual name.
        right_column: of a table, with the documents, where it has no usual name.
        bm25: evaluate BM25 as well as the model; --hybrid does so, too.
        depth: documents to retrieve for each query.
        titles: put a document's title in front of its text.
        keep_self_matches: keep a document whose id is the query's; by default it is removed, as BEIR does.
        small_vectors: compare quality and bytes of vectors cut to their first components, in 8 bits and in one bit a
            number, with and without a second scoring of the best in float32.
        dims: lengths to cut to, such as 256,128,64; by default the whole length and its halves down to 32.
        batch_size: texts encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    _check(ranking, engine, depth, batch_size, len(more) + 1)
    bm25 = bm25 or ranking.hybrid is not None
    evaluation = Evaluation("retrieval", model, data, out, device)
    conditions = engine.where or []
    reader = "bm25" if bm25 else "rerank" if ranking.rerank else None
    collections = _open_collections((data, *more), split, (left_column, right_column), titles, conditions, reader)
    read_split = _split_of(data, split)
    encoder = open_model(model, ("query-document", "vector"), evaluation.device)
    evaluation.check_weights(encoder.left, encoder.right)
    rescore = None
    if ranking.rerank is not None:
        rescore, _ = open_cross_encoder(ranking.rerank, batch_size=batch_size, device=str(evaluation.device))
    asked = _ask_engine(engine, encoder, collections)
    systems = Systems(
        display_name(model),
        depth,
        evaluation.device,
        keep_self_matches=keep_self_matches,
        bm25=bm25,
        hybrid=ranking.hybrid,
        weight=ranking.weight,
        rescore=rescore,
        rerank_top=ranking.rerank_top,
        engine=asked,
    )
    lengths = _lengths(dims, encoder.dim) if small_vectors or dims is not None else []

    runs: dict[str, dict[str, Run]] = {}
    size_means: dict[str, dict[Size, Scores]] = {}
    places = {name: evaluation.folder / name if more else evaluation.folder for name in collections}
    for name, collection in collections.items():
        kept = places[name] / "embeddings"
        texts = collection.queries
        queries = embed_into(kept / f"queries-{read_split}", encoder.left, texts, batch_size, side="left", model=model)
        if asked is not None:
            documents = asked.embeddings
        else:
            texts = collection.corpus
            documents = embed_into(kept / "documents", encoder.right, texts, batch_size, side="right", model=model)
        runs[name] = systems.rank(collection, queries, documents)
        size_means[name] = systems.rank_compressed(collection, queries, documents, sizes(lengths))

    if distributed.is_main():
        facts: dict[str, object] = {"model": model, "split": read_split, "depth": depth}
        facts |= {"keep_self_matches": keep_self_matches, **_facts(ranking, conditions, engine.filter)}
        results = {
            name: [systems.score(system, name, run, collections[name]) for system, run in runs[name].items()]
            for name in collections
        }
        sizes_rows = {name: size_rows(means, SIZE_METRICS) for name, means in size_means.items()} if lengths else {}
        _report(evaluation, facts, collections, results, places, sizes_rows, asked)
    distributed.barrier()


def _check(ranking: RankingOptions, engine: EngineOptions, depth: int, batch_size: int, num_folders: int) -> None:
    """Refuse options out of range, and those that exclude each other."""
    check_range(1, MAX_ITEMS, depth=depth, batch_size=batch_size, rerank_top=ranking.rerank_top)
    check_range(0, 1, weight=ranking.weight)
    if depth < max(CUTOFFS):
        raise DualencError(f"depth={depth}: the metrics look at {max(CUTOFFS)} documents; retrieve that many or more")
    if engine.engine is None and (engine.qdrant_path is not None or engine.filter):
        raise DualencError("--qdrant-path and --filter are for an engine; name it with --engine, or leave them out")
    if engine.engine is not None and engine.where:
        raise DualencError("an engine filters in its own language; give --filter instead of --where")
    if engine.engine is not None and (num_folders > 1 or distributed.world_size() > 1):
        raise DualencError("--engine is asked about one BEIR folder, by one process; evaluate them one by one")


def _facts(ranking: RankingOptions, conditions: Sequence[str], filter: str) -> dict[str, object]:
    """The options that differ from plain retrieval, for the record."""
    facts: dict[str, object] = {}
    if conditions:
        facts["where"] = ",".join(conditions)
    if filter:
        facts["filter"] = filter
    if ranking.hybrid is not None:
        facts |= {"hybrid": ranking.hybrid, "weight": ranking.weight}
    if ranking.rerank is not None:
        facts |= {"rerank": ranking.rerank, "rerank_top": ranking.rerank_top}
    return facts


def _ask_engine(
    options: EngineOptions, encoder: DualEncoder, collections: dict[str, RetrievalSet]
) -> EvaluatedEngine | None:
    """Open the engine, if one is asked, and restrict the one collection to the documents that match --filter."""
    if options.engine is None:
        return None
    name, collection = next(iter(collections.items()))
    ids = collection.corpus.ids
    asked = open_evaluated_engine(options.engine, options.filter, encoder.right, ids, options.qdrant_path)
    if options.filter:
        matching = set(asked.embeddings.ids)
        collections[name] = _among(collection, np.array([each in matching for each in ids]), name, "--filter")
    return asked


def _report(
    evaluation: Evaluation,
    facts: Mapping[str, object],
    collections: Mapping[str, RetrievalSet],
    results: Mapping[str, list[Result]],
    places: Mapping[str, Path],
    sizes_rows: Mapping[str, list[dict[str, object]]],
    asked: EvaluatedEngine | None,
) -> None:
    """Write the run files of each collection and system, the metrics and the report."""
    galleries: list[Gallery] = []
    for name, of_systems in results.items():
        galleries += _galleries(of_systems[0], collections[name])
        for result in of_systems:
            folder = FOLDERS.get(result.system, "")
            if asked is not None and result.system == asked.system:
                folder = "engine"
            result.write(places[name] / folder)
    every = [result for of_systems in results.values() for result in of_systems]
    document: dict[str, object] = {"systems": metrics_document(every)}
    first_tables = [Table("Retrieval", summary_rows(every))]
    if sizes_rows:
        document["small_vectors"] = sizes_rows
        first_tables += [Table(f"Bytes of a vector, {name}", rows) for name, rows in sizes_rows.items()]
    if asked is not None:
        document["engine"] = asked.measured
        first_tables.append(Table("Engine against exact search", [asked.measured]))
    evaluation.conclude(
        f"Retrieval: {display_name(evaluation.model)} on {', '.join(collections)}",
        facts,
        document,
        [*first_tables, Table("All metrics", cutoff_rows(every))],
        printed=len(first_tables),
        figures=_figures(by_system(every)),
        galleries=galleries,
        files="metrics, run files and report.html",
    )


def _open_collections(
    sources: Sequence[str],
    split: str | None,
    pair_columns: tuple[str | None, str | None],
    titles: bool,
    where: Sequence[str],
    reader: str | None,
) -> dict[str, RetrievalSet]:
    """The collections by the names of their folders or files, restricted to the documents that meet `where`.

    Args:
        pair_columns: left and right column of tables, where the user named them.
        reader: the option that needs texts, if there is one.
    """
    collections: dict[str, RetrievalSet] = {}
    for source in sources:
        name = Path(source).resolve().name
        if _is_beir(source):
            collection = read_beir(source, _split_of(source, split), titles=titles, columns=named_columns(where))
        else:
            name = Path(source_name(source)).stem
            if where:
                raise DualencError(f"{source_name(source)}: --where is for fields of a BEIR folder; leave it out")
            collection = _open_pairs(source, split, pair_columns)
        if name in collections:
            raise DualencError(f"two folders are named {name}; rename one, or evaluate them one by one")
        if where:
            collection = _among(collection, rows_that_meet(where, collection.corpus.columns), name, "--where")
        if reader is not None and collection.corpus.modality != "text":
            raise DualencError(f"{source}: --{reader} needs texts, and it holds vectors; leave it out")
        check_trec_names(collection.queries.ids, f"{source}: query id")
        check_trec_names(collection.corpus.ids, f"{source}: document id")
        collections[name] = collection
    return collections


def _is_beir(source: str) -> bool:
    """Whether a folder is meant to be BEIR's, even if a part of it is missing."""
    folder = Path(source)
    return is_beir(folder) or (folder / "qrels").is_dir() or (folder / "queries.jsonl").is_file()


def _split_of(source: str, split: str | None) -> str:
    """The split to read: as named, or the usual one."""
    if split is not None:
        return split
    return "test" if _is_beir(source) else usual_split(source, "test")


def _open_pairs(source: str, split: str | None, columns: tuple[str | None, str | None]) -> RetrievalSet:
    """Pairs as a test: left items are the queries, the right items of all pairs the corpus."""
    shown = source_name(source)
    try:
        pairs = open_pairs(source, *columns, split=_split_of(source, split))
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


def _lengths(dims: str | None, whole: int) -> list[int]:
    """The lengths asked for, or the whole one and its halves."""
    if dims is None:
        return halvings(whole)
    words = [word.strip() for word in dims.split(",")]
    if not all(word.isdigit() and 1 <= int(word) <= whole for word in words):
        raise DualencError(f"--dims is {dims!r}; give numbers from 1 to {whole}, such as {whole},{max(1, whole // 2)}")
    return sorted({int(word) for word in words}, reverse=True)


def _figures(systems: dict[str, list[Result]]) -> list[Figure]:
    heights = {
        system: {r.dataset: r.means["ndcg@10"] for r in own}
        if len(own) > 1
        else {m: own[0].means[m] for m in HEADLINES}
        for system, own in systems.items()
    }
    spread = {system: [s["ndcg@10"] for r in own for s in r.per_query.values()] for system, own in systems.items()}
    return [
        Figure("Mean scores by metric, or nDCG@10 by collection", plots.bars(heights)),
        Figure("nDCG@10 over queries", plots.histograms(spread, xlabel="nDCG@10", ylabel="share of queries", bins=20)),
    ]


def _galleries(result: Result, collection: RetrievalSet) -> list[Gallery]:
    query_row = {name: row for row, name in enumerate(collection.queries.ids)}
    document_row = {name: row for row, name in enumerate(collection.corpus.ids)}

    def shown(corpus: Corpus, row: int) -> str:
        return str(corpus[row]) if corpus.modality == "text" else "(a vector)"

    def document(name: str) -> str:
        return shown(collection.corpus, document_row[name]) if name in document_row else "(not in the corpus)"

    return retrieval_galleries(result, lambda name: shown(collection.queries, query_row[name]), document)
