"""`dualenc evaluate retrieval`: a query-document model on BEIR folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.commands.evaluation import (
    MOST_ITEMS,
    begin,
    check_range,
    check_weights,
    conclude,
    display_name,
    embed_into,
    open_model,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.compression import Size, compressed_run, halvings, size_rows, sizes
from dualenc.evaluation.engine import open_evaluated_engine
from dualenc.evaluation.metrics import CUTOFFS, Run, Scores
from dualenc.evaluation.report import Figure, Gallery, Table, retrieval_galleries
from dualenc.evaluation.retrieval import (
    HEADLINES,
    Result,
    bm25_run,
    by_system,
    cutoff_rows,
    first_documents,
    metrics_document,
    retrieve,
    summary_rows,
)
from dualenc.evaluation.runs import check_trec_names, ranked
from dualenc.search.fusion import fuse
from dualenc.search.rerank import Rescore, open_cross_encoder
from dualenc.search.rerank import rerank as rerank_pairs
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus, RetrievalSet

BM25 = "BM25"
HYBRID = "hybrid"
RERANKED = "reranked"
SIZE_METRICS = ("ndcg@10", "recall@100")
"""What the table of bytes shows."""


def retrieval(
    model: str,
    data: str,
    *more: str,
    out: str | None = None,
    split: str = "test",
    bm25: bool = False,
    hybrid: Literal["rrf", "weighted"] | None = None,
    weight: float = 0.5,
    rerank: str | None = None,
    rerank_top: int = 100,
    depth: int = 100,
    titles: bool = True,
    keep_self_matches: bool = False,
    small_vectors: bool = False,
    dims: str | None = None,
    engine: str | None = None,
    qdrant_path: str | None = None,
    where: list[str] | None = None,
    filter: str = "",
    batch_size: int = 32,
    device: str | None = None,
) -> None:
    """Evaluate a query-document model, or an adapter of vectors, on BEIR folders.

    Writes metrics.json, report.html and, for each BEIR folder, run.trec and per_query.ndjson. Embeddings are kept
    below OUT, so that an interrupted evaluation resumes where it stopped.

    Args:
        model: model folder or name.
        data: BEIR folder: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv; or embeddings in their place.
        more: further BEIR folders; the table then has a mean row.
        out: folder to write; by default evaluations/retrieval/MODEL-DATA.
        split: which judgements to use.
        bm25: evaluate BM25 as well as the model.
        hybrid: evaluate BM25, and both fused: by reciprocal ranks (rrf) or weighted scores (weighted).
        weight: with hybrid, of the model, from 0 to 1; BM25 has the rest.
        rerank: folder or name of a sentence-transformers CrossEncoder that scores the best documents again, of the
            hybrid ranking if there is one, else of the engine's, else of the model's.
        rerank_top: how many of the best it scores; the others are left out, as BEIR's reranking does.
        depth: documents to retrieve for each query.
        titles: put a document's title in front of its text.
        keep_self_matches: keep a document whose id is the query's; by default it is removed, as BEIR does.
        small_vectors: compare quality and bytes of vectors cut to their first components, in 8 bits and in one bit a
            number, with and without a second scoring of the best in float32.
        dims: lengths to cut to, such as 256,128,64; by default the whole length and its halves down to 32.
        engine: folder that `dualenc push` wrote for the documents: ask that engine, too, and compare with exact search.
        qdrant_path: the folder of Qdrant's embedded mode, if ENGINE was pushed there; its files can run code, so name
            only one that you trust.
        where: search only documents that meet this: year>=2020, lang=en,de, lang!=en; may be repeated. Judgements of
            others, and queries without a relevant document among them, are left out. The columns are fields of
            corpus.jsonl or what embeddings have kept (`--columns`).
        filter: the same with an engine, in its own language: SQL for LanceDB (year >= 2020 AND lang = 'en'), JSON for
            Qdrant ({"must": [{"key": "year", "range": {"gte": 2020}}]}).
        batch_size: texts encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(1, MOST_ITEMS, depth=depth, batch_size=batch_size, rerank_top=rerank_top)
    check_range(0, 1, weight=weight)
    bm25 = bm25 or hybrid is not None
    if depth < max(CUTOFFS):
        raise DualencError(f"depth={depth}: the metrics look at {max(CUTOFFS)} documents; retrieve that many or more")
    target, device_to_use = begin("retrieval", model, data, out, device)
    conditions = where or []
    reader = "bm25" if bm25 else "rerank" if rerank else None
    collections = _open_collections((data, *more), split, titles, conditions, reader)
    encoder = open_model(model, ("query-document", "vector"), device_to_use)
    weights = check_weights(target, model, encoder.left, encoder.right)
    judge = None
    if rerank is not None:
        judge = open_cross_encoder(rerank, batch_size=batch_size, device=str(device_to_use))[0]
    asked = None
    if engine is None and (qdrant_path is not None or filter):
        raise DualencError("--qdrant-path and --filter are for an engine; name it with --engine, or leave them out")
    if engine is not None and conditions:
        raise DualencError("an engine filters in its own language; give --filter instead of --where")
    if engine is not None:
        if more or distributed.world_size() > 1:
            raise DualencError("--engine is asked about one BEIR folder, by one process; evaluate them one by one")
        name, collection = next(iter(collections.items()))
        asked = open_evaluated_engine(engine, filter, encoder.right, collection.corpus.ids, qdrant_path)
        if filter:
            names = set(asked.embeddings.ids)
            collections[name] = _among(collection, np.array([one in names for one in collection.corpus.ids]), name)
    lengths = _lengths(dims, encoder.dim) if small_vectors or dims is not None else []
    small: dict[str, dict[Size, Scores]] = {}  # by collection and how vectors are kept
    places = {name: target / name if more else target for name in collections}
    runs: dict[str, dict[str, Run]] = {}  # by collection and system
    for name, collection in collections.items():
        kept, queries, corpus = places[name] / "embeddings", collection.queries, collection.corpus
        left = embed_into(kept / f"queries-{split}", encoder.left, queries, batch_size, side="left", model=model)
        if asked is None:
            right = embed_into(kept / "documents", encoder.right, corpus, batch_size, side="right", model=model)
        else:
            right = asked.embeddings
        found = retrieve(
            left.ids,
            left.vectors,
            right.ids,
            right.vectors,
            depth=depth,
            keep_self_matches=keep_self_matches,
            device=device_to_use,
        )
        runs[name] = {display_name(model): found}
        small[name] = {}
        for size in sizes(lengths):
            run = compressed_run(
                left.ids,
                left.vectors,
                right.ids,
                right.vectors,
                size,
                depth=depth,
                keep_self_matches=keep_self_matches,
                device=device_to_use,
            )
            kept_as = Result(size.name, name, run, collection.qrels, len(corpus), keep_self_matches=keep_self_matches)
            small[name][size] = kept_as.means
        if asked is not None:
            run = asked.run(left, depth + 1)
            runs[name][asked.system] = first_documents(run, depth, keep_self_matches=keep_self_matches)
        if bm25 and distributed.is_main():
            words = bm25_run(queries.ids, _texts(queries), corpus.ids, _texts(corpus), depth + 1)
            runs[name][BM25] = first_documents(words, depth, keep_self_matches=keep_self_matches)
            if hybrid is not None:
                runs[name][HYBRID] = _fused((found, runs[name][BM25]), hybrid, [weight, 1 - weight], depth)
        if judge is not None:
            first = HYBRID if hybrid is not None else display_name(model) if asked is None else asked.system
            runs[name][RERANKED] = _reranked(
                judge, distributed.broadcast_object(runs[name].get(first)), collection, rerank_top
            )
    if distributed.is_main():
        results: list[Result] = []
        galleries: list[Gallery] = []
        tables = {name: size_rows(means, SIZE_METRICS) for name, means in small.items()} if lengths else {}
        for name, collection in collections.items():
            scored = [
                Result(system, name, run, collection.qrels, len(collection.corpus), keep_self_matches=keep_self_matches)
                for system, run in runs[name].items()
            ]
            for result in scored:
                below = {BM25: "bm25", HYBRID: "hybrid", RERANKED: "reranked"}
                below |= {asked.system: "engine"} if asked is not None else {}
                result.write(places[name] / below.get(result.system, ""))
            results += scored
            galleries += _galleries(scored[0], collection)
        conclude(
            target,
            "retrieval",
            f"Retrieval: {display_name(model)} on {', '.join(collections)}",
            {"model": model, "split": split, "depth": depth, "keep_self_matches": keep_self_matches}
            | ({"where": ",".join(conditions)} if conditions else {})
            | ({"filter": filter} if filter else {})
            | ({} if hybrid is None else {"hybrid": hybrid, "weight": weight})
            | ({} if rerank is None else {"rerank": rerank, "rerank_top": rerank_top}),
            {"systems": metrics_document(results)}
            | ({} if asked is None else {"engine": asked.measured})
            | ({"small_vectors": tables} if lengths else {}),
            [
                Table("Retrieval", summary_rows(results)),
                *(Table(f"Bytes of a vector, {name}", rows) for name, rows in tables.items()),
                *([] if asked is None else [Table("Engine against exact search", [asked.measured])]),
                Table("All metrics", cutoff_rows(results)),
            ],
            weights=weights,
            printed=1 + len(tables) + (asked is not None),
            figures=_figures(by_system(results)),
            galleries=galleries,
            wrote="metrics, run files and report.html",
        )
    distributed.barrier()


def _open_collections(
    folders: Sequence[str], split: str, titles: bool, where: Sequence[str], reader: str | None
) -> dict[str, RetrievalSet]:
    """The collections by the names of their folders, among the documents that meet `where`.

    Args:
        reader: the option that needs texts, if there is one.
    """
    from dualenc.data.beir import read_beir
    from dualenc.search.engines import named_columns, rows_that_meet

    collections: dict[str, RetrievalSet] = {}
    for folder in folders:
        name = Path(folder).resolve().name
        if name in collections:
            raise DualencError(f"two folders are named {name}; rename one, or evaluate them one by one")
        collection = read_beir(folder, split, titles=titles, columns=named_columns(where))
        if where:
            collection = _among(collection, rows_that_meet(where, collection.corpus.columns), name)
        if reader is not None and collection.corpus.modality != "text":
            raise DualencError(f"{folder}: --{reader} needs texts, and it holds vectors; leave it out")
        check_trec_names(collection.queries.ids, f"{folder}: query id")
        check_trec_names(collection.corpus.ids, f"{folder}: document id")
        collections[name] = collection
    return collections


def _among(collection: RetrievalSet, kept: np.ndarray, name: str) -> RetrievalSet:
    """The collection among the documents that meet --where; tells what is left of it."""
    try:
        some = collection.among(kept)
    except DualencError as error:
        raise DualencError(f"--where, {name}: {error}") from None
    if distributed.is_main():
        documents = f"{len(some.corpus):,} of {len(collection.corpus):,} documents meet --where"
        before = len(collection.queries)
        queries = f"{before - len(some.queries):,} of {before:,} queries have no relevant one among them"
        print(printable(f"{name}: {documents}; {queries} and are left out"))
    return some


def _texts(corpus: Corpus) -> list[str]:
    return [corpus[row] for row in range(len(corpus))]


def _fused(runs: Sequence[Run], how: Literal["rrf", "weighted"], weights: Sequence[float], depth: int) -> Run:
    """The best of what several systems found for the same queries."""
    fused = {}
    for query in runs[0]:
        rankings = [[(name, run[query][name]) for name in ranked(run[query])] for run in runs]
        fused[query] = dict(fuse(rankings, how, weights=weights)[:depth])
    return fused


def _reranked(judge: Rescore, run: Run, collection: RetrievalSet, top: int) -> dict[str, dict[str, float]]:
    """The best of a run in the scores of a cross-encoder; each process asks it about its share of the queries."""
    queries, corpus = collection.queries, collection.corpus
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    share = range(len(queries))[distributed.rank_slice(len(queries))]
    own: dict[str, dict[str, float]] = {}
    for row in tqdm(share, desc="rerank", unit=" queries", disable=not distributed.is_main()):
        names = ranked(run[queries.ids[row]])[:top]
        order, scores = rerank_pairs(judge, [[(queries[row], corpus[row_of[name]]) for name in names]])[0]
        own[queries.ids[row]] = {names[place]: score for place, score in zip(order.tolist(), scores.tolist())}
    return {query: found for part in distributed.gather_objects(own) for query, found in part.items()}


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
