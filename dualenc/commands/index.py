"""`dualenc index`: embeddings, or a model and data, to a FAISS index."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dualenc.errors import DualencError

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
    threads: int | None = None,
    embeddings: str | None = None,
    side: Literal["left", "right"] | None = None,
    split: str = "train",
    text_column: str | None = None,
    title_column: str | None = None,
    image_column: str | None = None,
    id_column: str | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    autocast: Literal["bfloat16", "float16"] | None = None,
    num_workers: int | None = None,
    on_error: Literal["skip", "raise"] = "skip",
    device: str | None = None,
) -> None:
    """Build a FAISS index and measure its recall@10 against an exact search.

    `dualenc index EMBEDDINGS --out INDEX` indexes what `dualenc embed` wrote; `dualenc index MODEL DATA --out INDEX`
    embeds first. Plain faiss opens INDEX/index.faiss; row i of it is line i of INDEX/ids.txt.

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
        threads: FAISS's threads.
        embeddings: with a model: folder to keep the embeddings in; by default they are removed when done.
        side: with a model: left or right; by default documents, or whatever the data holds.
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        title_column: column joined in front of the text.
        image_column: column with the images, where it has no usual name.
        id_column: column with the ids; by default _id or id, or else row numbers.
        limit: only the first rows of a table.
        batch_size: items per forward pass.
        autocast: run the model in this precision.
        num_workers: processes that decode images.
        on_error: skip (and count) bad samples, or raise at the first one.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.commands.embed import embed
    from dualenc.embeddings import Embeddings, is_embeddings
    from dualenc.files import remove
    from dualenc.index import Index
    from dualenc.index.index import check_target

    check_target(out)
    folder = Path(source)
    if data is not None:
        # Hidden, but complete and resumable: a factory string that FAISS refuses does not cost the embedding.
        folder = Path(embeddings) if embeddings else Path(out).with_name(f".{Path(out).name}.embeddings")
        embed(
            source,
            data,
            out=str(folder),
            side=side,
            split=split,
            text_column=text_column,
            title_column=title_column,
            image_column=image_column,
            id_column=id_column,
            limit=limit,
            batch_size=batch_size,
            autocast=autocast,
            num_workers=num_workers,
            on_error=on_error,
            device=device,
        )
    elif not is_embeddings(folder):
        raise DualencError(f"{source}: holds no embeddings; if it is a model, name the data too: index MODEL DATA")
    if not distributed.is_main():
        return
    built = Index.build(
        Embeddings.open(folder),
        factory=factory,
        metric=metric,
        queries=None if queries is None else Embeddings.open(queries).vectors[:recall_queries],
        recall_queries=recall_queries,
        target_recall=target_recall,
        nprobe=nprobe,
        ef_search=ef_search,
        threads=threads,
        progress=True,
    )
    built.save(out)
    if data is not None and embeddings is None:
        remove(folder)
    print(describe(built, out))


def describe(index: Index, folder: str) -> str:
    """One line about an index: size, kind, recall."""
    meta = index.meta
    settings = "".join(f", {name}={value}" for name, value in meta["search_parameters"].items())
    line = f"{len(index):,} vectors of dimension {index.dim} ({meta['factory']}{settings}, {meta['metric']}) → {folder}"
    if "recall_at_10" in meta:
        line += f"\nrecall@10 against exact search: {meta['recall_at_10']:.4f} ({meta['recall_queries']} queries)"
    return line
