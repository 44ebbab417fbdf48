"""`dualenc search`: an index asked with a text or an image, by the model that made it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.errors import DualencError
from dualenc.terminal import printable_json

if TYPE_CHECKING:
    import numpy as np

    from dualenc.encoders import DualEncoder
    from dualenc.encoders.tower import Side
    from dualenc.index import Index


def search(
    index: str,
    query: str,
    *,
    k: int = 10,
    json: bool = False,
    model: str | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    device: str = "cpu",
) -> None:
    """Search an index with a text, or with an image given by its path.

    The model that made the index encodes the query: with the query side of a query-document model and its prompt,
    with the text or the image side of an image-text model.

    Args:
        index: folder that `dualenc index` wrote.
        query: text, or path of an image if the model encodes images.
        k: how many results.
        json: print JSON, in ASCII, instead of a table.
        model: model folder or name, if the one that made the index has moved.
        nprobe: lists that an IVF index visits; by default what the build chose.
        ef_search: candidates that an HNSW index keeps; by default what the build chose.
        device: such as cpu or cuda:0.
    """
    from dualenc.commands.evaluation import check_range, start_processes
    from dualenc.encoders import load_model
    from dualenc.evaluation.tables import Table, print_table
    from dualenc.index import Index
    from dualenc.index.recall import LARGEST_PARAMETER

    check_range(1, sys.maxsize, k=k)
    check_range(1, LARGEST_PARAMETER, nprobe=nprobe, ef_search=ef_search)
    if not query.strip():
        raise DualencError("the query is empty; give a text, or the path of an image")
    opened = Index.open(index)
    encoder = load_model(model or _recorded_model(opened, Path(index)), device=str(start_processes(device)))
    check_model(opened, encoder, index)
    vector = encode_query(encoder, query, opened.meta)
    scores, rows = opened.search_rows(vector, min(k, len(opened)), nprobe=nprobe, ef_search=ef_search)
    results = [
        {"rank": rank, "id": opened.ids[row], "score": round(float(score), 6), "snippet": opened.snippet(int(row))}
        for rank, (score, row) in enumerate(zip(scores[0], rows[0]), 1)
        if row >= 0
    ]
    if json:
        print(printable_json({"query": query, "index": index, "results": results}))
    else:
        columns = ("rank", "id", "score") if opened.snippets is None else ("rank", "id", "score", "snippet")
        print_table(Table(query, [{name: result[name] for name in columns} for result in results]))


def check_model(index: Index, encoder: DualEncoder, folder: str) -> None:
    """Insist that a model is the one that made an index.

    Raises:
        DualencError: its weights or preprocessing have changed since.
    """
    from dualenc.embed import tower_checksum

    recorded = index.meta.get("model_checksum")
    side = index.meta.get("side", "right")
    if recorded is not None and tower_checksum(encoder.tower(side)) != recorded:
        raise DualencError(f"{folder}: was built with other weights than the model has now; build the index again")


def encode_query(encoder: DualEncoder, query: str, meta: dict[str, Any]) -> np.ndarray:
    """Encode one query for an index.

    Args:
        encoder: the model that made the index.
        query: text, or path of an image.
        meta: the index's meta.json.

    Returns:
        (1, D) float32.

    Raises:
        DualencError: the model does not encode this kind of query.
        BadSample: the image is missing or does not decode.
    """
    from dualenc.data import Corpus, open_image
    from dualenc.embed import embed

    side = _query_side(encoder, query, meta.get("side", "right"))
    tower = encoder.tower(side)
    item = open_image(query) if tower.modality == "image" else query
    output = meta.get("output", "embedding")
    corpus = Corpus(["query"], [item], tower.modality)
    return embed(tower, corpus, output=output, on_error="raise", progress=False).vectors


def _query_side(encoder: DualEncoder, query: str, index_side: Side) -> Side:
    if encoder.kind == "query-document":
        return "left" if index_side == "right" else "right"
    if encoder.kind == "image":
        return "left"
    from dualenc.data.images import IMAGE_SUFFIXES

    is_image = Path(query).suffix.lower() in IMAGE_SUFFIXES or Path(query).is_file()
    wanted = "image" if is_image else "text"
    return "left" if encoder.left.modality == wanted else "right"


def _recorded_model(index: Index, folder: Path) -> str:
    """The model's recorded place, or beside the index if both were moved together."""
    recorded = index.meta.get("model")
    if not recorded:
        raise DualencError(f"{folder}: does not say which model made it; name one with --model")
    path = Path(recorded)
    beside = folder.resolve().parent / path.name
    if path.is_absolute() and not path.exists() and not beside.is_dir():
        raise DualencError(f"{folder}: its model {path} is gone; name its new place with --model")
    return str(beside) if not path.exists() and beside.is_dir() else recorded
