"""`dualenc evaluate retrieval`: a query-document model on BEIR folders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dualenc import distributed
from dualenc.commands.evaluation import (
    MOST_ITEMS,
    check_range,
    display_name,
    embed_into,
    open_model,
    output_folder,
    start_processes,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.bm25 import bm25_run
from dualenc.evaluation.gallery import retrieval_galleries
from dualenc.evaluation.metrics import CUTOFFS, Run, remove_self_matches
from dualenc.evaluation.report import Figure, Gallery, write_report
from dualenc.evaluation.retrieval import (
    HEADLINES,
    Result,
    cutoff_rows,
    first_documents,
    metrics_document,
    retrieve,
    summary_rows,
)
from dualenc.evaluation.runs import check_trec_names
from dualenc.evaluation.tables import Table, print_table
from dualenc.files import write_json
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import RetrievalSet
    from dualenc.embeddings import Embeddings
    from dualenc.encoders import DualEncoder

BM25 = "BM25"

Runs = dict[str, dict[str, Run]]
"""Runs by collection and system."""


def retrieval(
    model: str,
    data: str,
    *more: str,
    out: str | None = None,
    split: str = "test",
    bm25: bool = False,
    depth: int = 100,
    titles: bool = True,
    keep_self_matches: bool = False,
    batch_size: int = 32,
    device: str | None = None,
) -> None:
    """Evaluate a query-document model on BEIR folders.

    Writes metrics.json, report.html and, for each BEIR folder, run.trec and per_query.ndjson. Embeddings are kept
    below OUT, so that an interrupted evaluation goes on where it stopped.

    Args:
        model: model folder or name.
        data: BEIR folder: corpus.jsonl, queries.jsonl, qrels/SPLIT.tsv.
        more: further BEIR folders; the table then has a mean row.
        out: folder to write; by default evaluations/retrieval/MODEL-DATA.
        split: which judgements to use.
        bm25: evaluate BM25 beside the model.
        depth: documents to retrieve for each query.
        titles: put a document's title in front of its text.
        keep_self_matches: keep a document whose id is the query's; by default it is removed, as BEIR does.
        batch_size: texts encoded at once.
        device: such as cpu or cuda:0; by default a GPU if there is one.

    Raises:
        DualencError: the model is of another kind, a folder or split is missing, or nothing is judged.
    """
    check_range(1, MOST_ITEMS, depth=depth, batch_size=batch_size)
    target = output_folder(out, "retrieval", model, data)
    if depth < max(CUTOFFS):
        raise DualencError(f"depth={depth}: the metrics look at {max(CUTOFFS)} documents; retrieve that many or more")
    device_to_use = start_processes(device)
    collections = _read_collections((data, *more), split, titles)
    places = {name: target / name if more else target for name in collections}
    encoder = open_model(model, "query-document", device_to_use)
    runs: Runs = {}
    for name, collection in collections.items():
        queries, documents = _embed(encoder, collection, places[name] / "embeddings", split, model, batch_size)
        found = retrieve(
            queries.ids,
            queries.vectors,
            documents.ids,
            documents.vectors,
            depth=depth,
            keep_self_matches=keep_self_matches,
        )
        runs[name] = {display_name(model): found}
        if bm25 and distributed.is_main():
            runs[name][BM25] = _bm25(collection, depth, keep_self_matches)
    if distributed.is_main():
        facts = {"model": model, "split": split, "depth": depth, "keep_self_matches": keep_self_matches}
        _conclude(runs, collections, places, target, facts)
    distributed.barrier()


def _read_collections(folders: Sequence[str], split: str, titles: bool) -> dict[str, RetrievalSet]:
    """The collections by the name of their folder, read before anything is encoded, so that mistakes show at once."""
    from dualenc.data.beir import read_beir

    collections: dict[str, RetrievalSet] = {}
    for folder in folders:
        name = Path(folder).resolve().name
        if name in collections:
            raise DualencError(f"two folders are named {name}; rename one, or evaluate them one by one")
        collections[name] = read_beir(folder, split, titles=titles)
        check_trec_names(collections[name].queries.ids, f"{folder}: query id")
        check_trec_names(collections[name].corpus.ids, f"{folder}: document id")
    return collections


def _embed(
    encoder: DualEncoder, collection: RetrievalSet, folder: Path, split: str, model: str, batch_size: int
) -> tuple[Embeddings, Embeddings]:
    """The queries and the documents."""
    queries = embed_into(folder / f"queries-{split}", encoder, "left", collection.queries, model, batch_size)
    return queries, embed_into(folder / "documents", encoder, "right", collection.corpus, model, batch_size)


def _bm25(collection: RetrievalSet, depth: int, keep_self_matches: bool) -> Run:
    queries, corpus = collection.queries, collection.corpus
    texts = [queries[row] for row in range(len(queries))]
    documents = [corpus[row] for row in range(len(corpus))]
    if keep_self_matches:
        return bm25_run(queries.ids, texts, corpus.ids, documents, depth)
    return first_documents(remove_self_matches(bm25_run(queries.ids, texts, corpus.ids, documents, depth + 1)), depth)


def _conclude(
    runs: Runs, collections: Mapping[str, RetrievalSet], places: Mapping[str, Path], out: Path, facts: dict[str, object]
) -> None:
    """Score the runs; write and print what came out."""
    keep = bool(facts["keep_self_matches"])
    results, galleries = [], []
    for name, systems in runs.items():
        collection = collections[name]
        scored = [
            Result(system, name, run, collection.qrels, len(collection.corpus), keep_self_matches=keep)
            for system, run in systems.items()
        ]
        for result in scored:
            result.write(places[name] / "bm25" if result.system == BM25 else places[name])
        results += scored
        galleries += _galleries(scored[0], collection)
    write_json(out / "metrics.json", {"task": "retrieval", **facts, "systems": metrics_document(results)})
    summary = Table("Retrieval", summary_rows(results))
    everything = Table("All metrics", cutoff_rows(results))
    title = f"Retrieval: {display_name(str(facts['model']))} on {', '.join(runs)}"
    tables = [summary, everything]
    write_report(out / "report.html", title, facts=facts, tables=tables, figures=_figures(results), galleries=galleries)
    print_table(summary)
    print(printable(f"metrics, run files and report.html are in {out}"))


def _figures(results: Sequence[Result]) -> list[Figure]:
    by_system = {
        system: [r for r in results if r.system == system] for system in dict.fromkeys(r.system for r in results)
    }
    heights = {
        system: {r.dataset: r.means["ndcg@10"] for r in own}
        if len(own) > 1
        else {m: own[0].means[m] for m in HEADLINES}
        for system, own in by_system.items()
    }
    spread = {system: [s["ndcg@10"] for r in own for s in r.per_query.values()] for system, own in by_system.items()}
    return [
        Figure("Mean scores by metric, or nDCG@10 by collection", plots.bars(heights)),
        Figure("nDCG@10 over queries", plots.histograms(spread, xlabel="nDCG@10", ylabel="share of queries", bins=20)),
    ]


def _galleries(result: Result, collection: RetrievalSet) -> list[Gallery]:
    query_row = {name: row for row, name in enumerate(collection.queries.ids)}
    document_row = {name: row for row, name in enumerate(collection.corpus.ids)}

    def document(name: str) -> str:
        return collection.corpus[document_row[name]] if name in document_row else "(not in the corpus)"

    return retrieval_galleries(result, lambda name: collection.queries[query_row[name]], document)
