"""`dualenc search`: an index or an engine, with a text, an image or a vector."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.commands.checks import check_range
from dualenc.commands.options import SEARCH, SearchOptions
from dualenc.errors import DualencError
from dualenc.evaluation.options import RankingOptions
from dualenc.terminal import printable, printable_json

RANKING = RankingOptions()

if TYPE_CHECKING:
    import numpy as np

    from dualenc.search.searcher import Searcher
    from dualenc.types import Modality


def search(
    index: str,
    query: str,
    *,
    k: int = 10,
    where: Sequence[str] | None = None,
    filter: str = "",
    ranking: RankingOptions = RANKING,
    json: bool = False,
    options: SearchOptions = SEARCH,
) -> None:
    """Search an index or an engine with a text, or with an image or a vector given by its path.

    The model that made the index encodes the query: with the query side of a query-document model and its prompt,
    with the text or the image side of an image-text model. --hybrid needs an index made with --bm25, --rerank one made
    with --texts.

    Args:
        index: folder that `dualenc index` or `dualenc push` wrote.
        query: text; path of an image if the model encodes images; of a .npy file with one vector if it adapts vectors.
        k: how many results.
        where: only what meets this, by columns that were kept (`--columns`): year>=2020, lang=en,de (any of them),
            lang!=en, author="Doe, Jane"; may be repeated.
        filter: in Qdrant, only what matches this JSON: {"must": [{"key": "year", "range": {"gte": 2020}}]}.
        json: print JSON, in ASCII, instead of a table.
    """
    from dualenc.evaluation.report import Table, print_table
    from dualenc.search.qdrant import QdrantIndex
    from dualenc.search.searcher import Query

    searcher = _open(index, query, k, ranking, options)
    conditions = searcher.conditions(where or ())
    side = searcher.query_side(_modality(query, searcher.takes))
    item = _item(query, searcher.encoder.tower(side).modality)
    top = 0 if ranking.rerank is None else ranking.rerank_top
    fusion: dict[str, Any] = {"hybrid": ranking.hybrid, "weight": ranking.weight}
    hits = searcher.search([Query(side, item, k=k, where=conditions, filter=filter, rerank=top, **fusion)])[0]
    if isinstance(searcher.index, QdrantIndex):
        searcher.index.close()
    columns = searcher.index.column_kinds
    results: list[dict[str, Any]] = [
        {"rank": rank, "id": hit.id, "score": round(hit.score, 6), "snippet": hit.snippet}
        | {name: hit.columns.get(name) for name in columns}
        for rank, hit in enumerate(hits, 1)
    ]
    if json:
        print(printable_json({"query": query, "index": index, "results": results}))
        return
    if not results:
        print(printable(f"nothing was found for {query!r}{_remedy(len(conditions), filter)}"))
        return
    for row in results:
        # Tables write numbers with separators, and a year is no quantity.
        row.update({name: str(row[name]) for name in columns if row[name] is not None})
    names = ("rank", "id", "score", *columns, *(["snippet"] if searcher.index.has_snippets else []))
    print_table(Table(query, [{name: row[name] for name in names} for row in results]))


def _remedy(num_conditions: int, filter: str) -> str:
    """What to try after a search without results, in the words of the command."""
    if num_conditions > 1:
        return f" that meets all {num_conditions} conditions; give fewer --where"
    if num_conditions:
        return " that meets the condition; search without --where, or with a wider one"
    if filter:
        return " that matches the filter; search without --filter, or with a wider one"
    return "; is the index empty?"


def _open(index: str, query: str, k: int, ranking: RankingOptions, options: SearchOptions) -> Searcher:
    """Open an index with the models that the query needs, after checking the options."""
    from dualenc.evaluation.output import start_processes
    from dualenc.search.build import MAX_PARAMETER
    from dualenc.search.rerank import open_cross_encoder
    from dualenc.search.searcher import Searcher

    check_range(1, sys.maxsize, k=k, rerank_top=ranking.rerank_top)
    check_range(1, MAX_PARAMETER, nprobe=options.nprobe, ef_search=options.ef_search)
    check_range(0, 1, weight=ranking.weight)
    if not query.strip():
        raise DualencError("the query is empty; give a text, or the path of an image")
    device = start_processes(options.device)
    judge = None
    if ranking.rerank is not None:
        judge, _ = open_cross_encoder(ranking.rerank, device=str(device))
    return Searcher.open(
        index,
        options.model,
        device=device,
        qdrant_path=options.qdrant_path,
        nprobe=options.nprobe,
        ef_search=options.ef_search,
        hybrid=ranking.hybrid is not None,
        judge=judge,
    )


def _modality(query: str, takes: Sequence[Modality]) -> Modality:
    """The modality of a query: where the index takes images and texts, an image if it is or looks like a file."""
    from dualenc.data.images import IMAGE_SUFFIXES

    if len(takes) == 1:
        return takes[0]
    return "image" if Path(query).suffix.lower() in IMAGE_SUFFIXES or Path(query).is_file() else "text"


def _item(query: str, modality: Modality) -> Any:
    """The text, image or vector that a query names."""
    from dualenc.data import open_image

    if modality == "image":
        return open_image(query)
    return _open_vector(query) if modality == "vector" else query


def _open_vector(path: str) -> np.ndarray:
    """The one vector of a .npy file of shape (D,) or (1, D)."""
    import numpy as np

    from dualenc.data.vectors import load_npy

    if Path(path).suffix != ".npy":
        raise DualencError(f"{path!r}: the model adapts vectors; give a .npy file with that of the query")
    vectors = load_npy(Path(path))
    if len(vectors) != 1:
        raise DualencError(f"{path}: holds {len(vectors)} vectors; give the one to search with")
    squares = float((vectors.astype(np.float64) ** 2).sum())
    if not 0 < squares < np.inf:
        raise DualencError(f"{path}: its vector is zero or not finite; embed the query again")
    return vectors[0].astype(np.float32)
