"""`dualenc index`: embeddings, or a model and data, to a FAISS index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.commands.embed import embed
from dualenc.errors import DualencError
from dualenc.files import remove
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.index import Index


def index(
    source: str,
    data: str | None = None,
    *,
    out: str,
    factory: str = "auto",
    metric: Literal["cosine", "ip"] = "cosine",
    nprobe: int | None = None,
    ef_search: int | None = None,
    target_recall: float = 0.95,
    recall_queries: int = 500,
    queries: str | None = None,
    embeddings: str | None = None,
    side: Literal["left", "right"] | None = None,
    split: str = "train",
    text_column: str | None = None,
    image_column: str | None = None,
    id_column: str | None = None,
    batch_size: int = 32,
    device: str | None = None,
) -> None:
    """Build a FAISS index from EMBEDDINGS, or from MODEL and DATA, and measure its recall@10 against exact search.

    Args:
        source: folder of embeddings, or a model folder or name.
        data: what to embed, with a model: BEIR folder, folder of images, table, tars, or hub name.
        out: folder to write: index.faiss, ids.txt, snippets.jsonl, meta.json.
        factory: auto, or any FAISS factory string such as Flat, HNSW32, IVF1024,Flat or OPQ32,IVF4096,PQ32.
        metric: cosine, or ip for the inner product.
        nprobe: lists that an IVF index visits; by default as many as target_recall needs.
        ef_search: candidates that an HNSW index keeps; by default as many as target_recall needs.
        target_recall: recall@10 that the search parameters are tuned for.
        recall_queries: how many queries to measure recall@10 with; 0 measures nothing.
        queries: embeddings of real queries to measure with; by default a sample of the database.
        embeddings: with a model: folder to keep the embeddings in; by default they are removed when done.
        side: with a model: left or right; by default documents, or whatever the data holds.
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        image_column: column with the images, where it has no usual name.
        id_column: column with the ids; by default _id or id, or else row numbers.
        batch_size: items per forward pass.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.commands.evaluation import MOST_ITEMS, check_range
    from dualenc.embeddings import Embeddings
    from dualenc.index import Index
    from dualenc.index.factory import check_factory
    from dualenc.index.recall import LARGEST_PARAMETER

    check_factory(factory)
    check_range(1, LARGEST_PARAMETER, nprobe=nprobe, ef_search=ef_search)
    check_range(0, 1, target_recall=target_recall)
    check_range(0, MOST_ITEMS, recall_queries=recall_queries)
    folder = _embeddings_folder(source, data, out, embeddings)
    if data is not None:
        columns: dict[str, Any] = {"text_column": text_column, "image_column": image_column, "id_column": id_column}
        embed(source, data, out=str(folder), side=side, split=split, batch_size=batch_size, device=device, **columns)
    if distributed.is_main():
        real = None if queries is None else Embeddings.open(queries).vectors[:recall_queries]
        measure: dict[str, Any] = {"queries": real, "recall_queries": recall_queries, "target_recall": target_recall}
        search: dict[str, Any] = {"nprobe": nprobe, "ef_search": ef_search}
        built = Index.build(Embeddings.open(folder), None, factory, metric=metric, progress=True, **search, **measure)
        built.save(out)
        print(describe(built, out))
        if data is not None and embeddings is None:
            remove(folder)


def _embeddings_folder(source: str, data: str | None, out: str, embeddings: str | None) -> Path:
    """Where the embeddings are, or are to be written: hidden beside the index unless the user wants to keep them.

    The hidden folder outlives a failed build: a factory string that FAISS refuses does not cost the embedding.

    Raises:
        DualencError: there is no data, but the source holds no embeddings; or the target may not be written.
    """
    from dualenc.embeddings import is_embeddings
    from dualenc.index.index import check_target

    check_target(out)
    if data is None and not is_embeddings(source):
        raise DualencError(f"{source}: holds no embeddings; if it is a model, name the data too: index MODEL DATA")
    if data is None:
        return Path(source)
    return Path(embeddings or Path(out).with_name(f".{Path(out).name}.embeddings"))


def describe(index: Index, folder: str) -> str:
    """One line about an index: size, kind, recall."""
    meta = index.meta
    settings = "".join(f", {name}={value}" for name, value in meta["search_parameters"].items())
    line = f"{len(index):,} vectors of dimension {index.dim} ({meta['factory']}{settings}, {meta['metric']}) → {folder}"
    line = printable(line)
    if "recall_at_10" in meta:
        line += f"\nrecall@10 against exact search: {meta['recall_at_10']:.4f} ({meta['recall_queries']} queries)"
    return line
