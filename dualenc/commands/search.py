"""`dualenc search`: search an index or an engine with a text, an image or a vector."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.types import PositiveInt

from dualenc.commands.options import RankingOptions, SearchOptions
from dualenc.commands.output import print_line
from dualenc.errors import DualencError
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.search.searcher import Searcher
    from dualenc.types import Modality

logger = logging.getLogger("dualenc.search")


def search(
    index: str,
    query: str,
    *,
    k: Annotated[PositiveInt, Parameter(alias="-k")] = 10,
    where: Sequence[str] | None = None,
    filter: str = "",
    ranking: RankingOptions,
    json: bool = False,
    options: SearchOptions,
) -> None:
    """Search an index or an engine with a text, or with an image or a vector given by its path.

    The model that built the index encodes the query: with the query side of a query-document model
    and its prompt, or the text or image side of an image-text model. --hybrid needs an index with
    BM25.

    Args:
        index: folder that `dualenc index` or `dualenc push` wrote.
        query: text; or the path of an image if the model encodes images, of a .npy file with one
            vector if it adapts vectors.
        k: number of results.
        where: condition on a column that was kept (`--columns`): year>=2020, lang=en,de (any of
            them), lang!=en, author="Doe, Jane"; may be repeated, and all must hold.
        filter: condition of an engine. PostgreSQL takes SQL: "year >= 2020 AND lang = 'en'"; Qdrant
            takes JSON: {"must": [{"key": "year", "range": {"gte": 2020}}]}.
        json: print JSON, in ASCII, instead of a table.
    """
    # Before the model is loaded, which takes most of the time of a search.
    ranking.check()
    searcher = _open(index, query, ranking, options)
    item = _item(query, _modality(query, searcher.takes))
    hits = searcher.search(item, k, where=where or (), filter=filter, **vars(ranking))
    searcher.close()
    columns = searcher.index.column_kinds
    results = [
        {"rank": rank, "id": hit.id, "score": round(hit.score, 6), "snippet": hit.snippet}
        | {name: hit.columns.get(name) for name in columns}
        for rank, hit in enumerate(hits, 1)
    ]
    if json:
        print(dumps({"query": query, "index": index, "results": results}, indent=2))
    elif not results:
        # Without conditions there is nothing to widen.
        restricted = ""
        if where or filter:
            restricted = " that meets all conditions; give fewer or wider ones"
        print_line(f"nothing was found for {query!r}{restricted}")
    else:
        _print_results(query, results, list(columns), searcher.index.has_snippets)


def _open(index: str, query: str, ranking: RankingOptions, options: SearchOptions) -> Searcher:
    """Open an index with the model and the texts that the query needs."""
    from dualenc.search.searcher import Searcher
    from dualenc.workflows.session import start_processes

    if not query.strip():
        raise DualencError("the query is empty", fix="give a text, or the path of an image")
    # BM25 is only opened if it is asked for: it may be as large as the vectors.
    device = start_processes(options.device)
    more = {"device": device, "hybrid": ranking.hybrid is not None}
    return Searcher.open(index, **vars(options) | more)


def _modality(query: str, takes: Sequence[Modality]) -> Modality:
    """Return the modality of a query; warn if a path is searched as a text.

    A query is an image if it is the path of an image file, by its content, or looks like one.
    """
    from dualenc.data.readers.images import is_image
    from dualenc.io.decoding import has_image

    # `Path.is_file` raises for a text that is longer than a file name can be.
    is_file = os.path.isfile(query)
    is_picture = has_image(query) if is_file else is_image(Path(query))
    if "image" in takes and is_picture:
        return "image"
    if "text" not in takes:
        return takes[0]
    if is_file and (is_picture or "image" in takes):
        reason = "is not an image"
        if is_picture:
            reason = "is an image, and the model of this index takes texts"
        logger.warning("%s: the file %s; its path is searched as a text", printable(query), reason)
    elif "image" in takes and _looks_like_path(query):
        logger.warning("%s: no such file; the path is searched as a text", printable(query))
    return "text"


def _looks_like_path(query: str) -> bool:
    """Return True if a query without white space begins with an existing folder."""
    has_folder = os.sep in query and os.path.isdir(os.path.dirname(query))
    return has_folder and not re.search(r"\s", query)


def _item(query: str, modality: Modality) -> Any:
    """Return the query text, or open the image or .npy vector, (D,) or (1, D), that it names."""
    from dualenc.data import open_image
    from dualenc.data.readers.vectors import load_npy

    if modality == "image":
        return open_image(query)
    if modality == "text":
        return query
    if Path(query).suffix != ".npy":
        raise DualencError(
            "the model adapts vectors",
            fix="give a .npy file with that of the query",
            where=repr(query),
        )
    vectors = load_npy(Path(query))
    if len(vectors) != 1:
        raise DualencError(
            f"holds {len(vectors)} vectors", fix="give the one to search with", where=query
        )
    return vectors[0].astype("float32")


def _print_results(
    query: str, results: list[dict[str, Any]], columns: list[str], has_snippets: bool
) -> None:
    """Print results as a table, with the columns that were kept."""
    from dualenc.evaluation.report_page import Table, print_table

    names = ["rank", "id", "score", *columns]
    if has_snippets:
        names.append("snippet")
    for result in results:
        # As text: tables separate thousands, which is wrong for a year.
        result.update({name: str(result[name]) for name in columns if result[name] is not None})
    table = Table(query, [{name: result[name] for name in names} for result in results])
    print_table(table, beginnings="snippet")
