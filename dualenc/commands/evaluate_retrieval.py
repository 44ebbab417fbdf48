"""Retrieval: a query-document model on BEIR folders and tables of pairs, beside BM25 and both
fused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dualenc import distributed
from dualenc.commands.options import given_options
from dualenc.commands.output import RESULT, Evaluation
from dualenc.data.bad_rows import BadRows
from dualenc.data.corpus import Corpus, RetrievalSet, held_out
from dualenc.data.item_lists import VectorItems
from dualenc.data.readers.beir import (
    check_judged,
    expand_name,
    is_collection,
    read_beir,
    read_corpus,
    read_judged_queries,
)
from dualenc.data.readers.detect import default_split, detect
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
from dualenc.workflows.session import short_name

if TYPE_CHECKING:
    from dualenc.commands.evaluate import RetrievalOptions
    from dualenc.commands.options import ColumnOptions, OutputOptions, RankingOptions
    from dualenc.data.store.vector_shards import Embeddings
    from dualenc.encoders import DualEncoder

DEPTH = 100
"""Documents that are retrieved for each query: as many as the metrics look at."""
BM25 = "BM25"
HYBRID = "hybrid"
FOLDERS = {BM25: "bm25", HYBRID: "hybrid"}
"""Where the run files of systems other than the model are."""


def evaluate_retrieval(
    model: str,
    data: Sequence[str],
    options: RetrievalOptions,
    columns: ColumnOptions,
    ranking: RankingOptions,
    output: OutputOptions,
) -> None:
    """Rank the documents of every collection by the model and the other systems, and score the
    rankings."""
    ranking.check()
    evaluation = Evaluation("retrieval", model, data[0], output)
    data = [name for source in data for name in expand_name(source)]
    split = options.split or default_split(data[0])
    _check_columns(data, columns)
    with removed_if_refused(evaluation.folder, RESULT):
        indexed = None
        if options.documents is not None:
            indexed = open_documents(options.documents, evaluation.folder)
        # Before the data, which an adapted model without --documents may lack.
        encoder = evaluation.open("query-document", "vector", "query-index")
        if indexed is not None:
            check_encoder(encoder, indexed.meta, indexed.dim, str(options.documents))
        elif isinstance(encoder, IndexEncoder):
            raise DualencError(
                f"{model}: encodes queries for the vectors of an index; name it by --documents INDEX"
            )
        needs_texts = options.bm25 or ranking.hybrid is not None
        collections = _open_collections(data, options, columns, needs_texts, indexed)
    results: list[Result] = []
    for name, collection in collections.items():
        folder = name if len(data) > 1 else ""
        dense = _rank_by_model(evaluation, folder, encoder, collection, indexed, split, options)
        if not distributed.is_main():
            continue
        own = short_name(model)
        runs = {f"{own} (model)" if own in FOLDERS else own: dense} | _other_runs(
            dense, collection, options, ranking
        )
        for system, run in runs.items():
            result = Result(system, name, run, collection.qrels, len(collection.corpus))
            result.write(evaluation.folder / folder / FOLDERS.get(system, ""))
            results.append(result)
            if run is dense and isinstance(encoder, IndexEncoder) and encoder.trained_ids:
                results += split_by_training(result, encoder.trained_ids)
    if distributed.is_main():
        evaluation.conclude(
            "Retrieval",
            ", ".join(collections),
            _facts(model, split, options, ranking),
            {"systems": metrics_document(results)},
            [Table("Retrieval", summary_rows(results)), Table("All metrics", cutoff_rows(results))],
            printed=1,
            files="metrics, run files and report.html",
        )
    distributed.barrier()


def _check_columns(data: Sequence[str], columns: ColumnOptions) -> None:
    """Refuse names of columns where none of the data has pairs in columns."""
    given = [name for name, is_given in given_options(columns).items() if is_given]
    if given and all(detect(source) == "beir" or is_collection(source) for source in data):
        problem = f"{given[0]} is for tables of pairs, and {data[0]} is not one"
        raise DualencError(f"{problem}; leave it out")


def _facts(
    model: str, split: str, options: RetrievalOptions, ranking: RankingOptions
) -> dict[str, object]:
    facts: dict[str, object] = {"model": model, "split": split, "depth": DEPTH}
    facts["keep_self_matches"] = options.keep_self_matches
    if options.documents is not None:
        facts["documents"] = options.documents
    if ranking.hybrid is not None:
        facts |= {"hybrid": ranking.hybrid, "weight": ranking.weight}
    return facts


def _rank_by_model(
    evaluation: Evaluation,
    folder: str,
    encoder: DualEncoder,
    collection: RetrievalSet,
    indexed: Embeddings | None,
    split: str,
    options: RetrievalOptions,
) -> Run:
    """Embed a collection, below a folder of the output, and search it exactly."""
    place = Path(folder) / "embeddings"
    batch_size = options.batch_size
    queries = evaluation.embed(
        place / f"queries-{split}", encoder, "left", collection.queries, batch_size
    )
    if indexed is None:
        documents = evaluation.embed(
            place / "documents", encoder, "right", collection.corpus, batch_size
        )
    else:
        documents = indexed
        queries = queries.first(documents.dim)
    return retrieve(
        queries.ids,
        queries.vectors,
        documents.ids,
        documents.vectors,
        depth=DEPTH,
        qrels=None if options.keep_self_matches else collection.qrels,
        device=evaluation.device,
    )


def _other_runs(
    dense: Run, collection: RetrievalSet, options: RetrievalOptions, ranking: RankingOptions
) -> dict[str, Run]:
    """The runs of BM25, and of the model's run and BM25's fused."""
    if not options.bm25 and ranking.hybrid is None:
        return {}
    words = bm25_run(collection, DEPTH + 1)
    words = first_documents(words, DEPTH, None if options.keep_self_matches else collection.qrels)
    if ranking.hybrid is None:
        return {BM25: words}
    fused = {}
    for query in dense:
        rankings = [
            [(name, run[query][name]) for name in ranked(run[query])] for run in (dense, words)
        ]
        weights = [ranking.weight, 1 - ranking.weight]
        fused[query] = dict(fuse(rankings, ranking.hybrid, weights=weights)[:DEPTH])
    return {BM25: words, HYBRID: fused}


def _open_collections(
    data: Sequence[str],
    options: RetrievalOptions,
    columns: ColumnOptions,
    needs_texts: bool,
    indexed: Embeddings | None,
) -> dict[str, RetrievalSet]:
    collections: dict[str, RetrievalSet] = {}
    for source in data:
        name, collection = _open_collection(source, options, columns, needs_texts, indexed)
        if name in collections:
            raise DualencError(
                f"two folders are named {name}; rename one, or evaluate them one by one"
            )
        report_self_matches(name, collection, options.keep_self_matches)
        collections[name] = collection
    return collections


def _open_collection(
    source: str,
    options: RetrievalOptions,
    columns: ColumnOptions,
    needs_texts: bool,
    indexed: Embeddings | None,
) -> tuple[str, RetrievalSet]:
    """A collection, and the name of its folder or file."""
    split = options.split or default_split(source)
    if detect(source) == "beir" or is_collection(source):
        name = Path(source).resolve().name
        if indexed is None:
            collection = read_beir(source, split)
        else:
            collection = _over_index(indexed, source, split, str(options.documents), needs_texts)
    elif indexed is not None:
        raise DualencError(
            f"{source}: names no documents of the index; --documents needs a BEIR folder"
        )
    else:
        name = Path(source).stem
        collection = _open_pairs(source, split, columns)
    if collection.corpus.modality != "text" and needs_texts:
        raise DualencError(f"{source}: --bm25 needs texts, and it holds vectors; leave it out")
    check_trec_names(collection.queries.ids, f"{source}: query id")
    check_trec_names(collection.corpus.ids, f"{source}: document id")
    return name, collection


def _over_index(
    indexed: Embeddings, source: str, split: str, index: str, needs_texts: bool
) -> RetrievalSet:
    """The judged queries of a BEIR folder, and the documents of an index in its order.

    The documents' texts are read from the folder where they are needed; else they are what the
    index shows.
    """
    bad_rows = BadRows(source)
    queries, qrels = read_judged_queries(Path(source), split, indexed.ids, bad_rows)
    check_judged(source, qrels, indexed.ids, index)
    if needs_texts:
        texts = read_corpus(source, bad_rows=bad_rows)
        rows = rows_of(texts.ids, indexed.ids)
        if (rows < 0).any():
            missing = indexed.ids[int(np.argmin(rows))][:80]
            problem = f"its corpus lacks {missing!r}, which is in {index}"
            raise DualencError(f"{source}: {problem}; leave --bm25 out")
        corpus = texts.take(rows)
    elif indexed.snippets is not None:
        corpus = Corpus(indexed.ids, indexed.snippets)
    else:
        corpus = Corpus(indexed.ids, VectorItems(indexed.vectors), "vector")
    bad_rows.report()
    return RetrievalSet(queries, corpus, qrels)


def _open_pairs(source: str, split: str, columns: ColumnOptions) -> RetrievalSet:
    """Pairs as a test: left items are the queries, all right items the corpus, at most 100,000 of
    them."""
    try:
        pairs = open_pairs(source, **vars(columns), split=split)
    except DualencError as error:
        if Path(source).is_file():
            raise
        forms = "a BEIR folder (corpus.jsonl, queries.jsonl, qrels/) nor pairs (csv, jsonl, parquet, hub name)"
        reason = str(error).removeprefix(f"{source}: ")
        raise DualencError(f"{source}: neither {forms}: {reason}") from error
    if "image" in (pairs.left_modality, pairs.right_modality):
        raise DualencError(f"{source}: holds images; use `dualenc evaluate image-text`")
    return held_out(pairs)
