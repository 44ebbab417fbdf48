"""`dualenc embed`, `index` and `search`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.errors import DualencError
from dualenc.files import open_regular
from dualenc.files import remove as remove_path
from dualenc.terminal import printable, printable_json

if TYPE_CHECKING:
    import numpy as np

    from dualenc.types import Modality


MISSED_BY = 0.01
"""How far below its target a recall is told to miss it: it is measured with a few hundred queries."""


def embed(
    model: str,
    data: str,
    *,
    out: str,
    side: Literal["left", "right"] | None = None,
    split: str = "train",
    text_column: str | None = None,
    image_column: str | None = None,
    vector_column: str | None = None,
    id_column: str | None = None,
    columns: list[str] | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    dtype: Literal["float16", "float32"] = "float32",
    output: Literal["embedding", "features"] = "embedding",
    dim: int | None = None,
    autocast: Literal["bfloat16", "float16"] | None = None,
    num_workers: int | None = None,
    on_error: Literal["skip", "raise"] = "skip",
    take_over_minutes: float = 10.0,
    device: str | None = None,
) -> None:
    """Embed a corpus with one side of a model, into a folder that numpy reads.

    The same command again resumes an interrupted run. Started several times, on any machines that share the folder, at
    any moment (`sbatch --array=1-8`, spot machines, `accelerate launch -m dualenc embed …`), it shares the work: each
    claims one shard after the other, and one that dies loses no more than its shard.

    Args:
        model: model folder or name.
        data: BEIR folder, folder of images, csv / tsv / jsonl / parquet file, tars, data set by hub name, or the URL of
            a table or of tars (https, s3, hf); for adapters a folder of embeddings, .npy file, or table with a
            column of vectors.
        out: folder to write: shard-*.npy, ids.txt, snippets.jsonl, columns.parquet, meta.json.
        side: left (queries, images) or right (documents, texts); by default documents, or whatever the data holds.
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        image_column: column with the images, where it has no usual name.
        vector_column: column with the vectors, where it has no usual name.
        id_column: column with the ids; by default _id or id, or else row numbers.
        columns: further columns of a table, separated by commas, kept in columns.parquet to filter results by.
        limit: only the first rows of a table.
        batch_size: items per forward pass.
        dtype: precision of the stored vectors.
        output: embedding for unit vectors, features for what probes use.
        dim: keep only so many of the first components, as models trained with `dims` allow; by default all.
        autocast: run the model in this precision.
        num_workers: processes that decode images.
        on_error: skip (and count) bad samples, or raise at the first one.
        take_over_minutes: without a sign of life for that long, another machine's shard is taken over.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.commands.evaluation import MOST_ITEMS, MOST_WORKERS, check_range, start_processes
    from dualenc.data.remote import shown
    from dualenc.data.sources import open_corpus
    from dualenc.encoders import load_model
    from dualenc.search.embed import embed as embed_corpus

    check_range(1, MOST_ITEMS, batch_size=batch_size)
    check_range(1, sys.maxsize, limit=limit, dim=dim)
    check_range(0, MOST_WORKERS, num_workers=num_workers)
    check_range(0.1, 60 * 24 * 365, take_over_minutes=take_over_minutes)
    encoder = load_model(model, device=str(start_processes(device)))
    modality = None
    if side is not None:
        modality = encoder.tower(side).modality
    elif text_column is None and encoder.kind != "image-text":
        modality = encoder.right.modality
    corpus = open_corpus(
        data,
        part="queries" if side == "left" and encoder.kind in ("query-document", "vector") else "corpus",
        modality=modality,
        text_column=text_column,
        image_column=image_column,
        vector_column=vector_column,
        id_column=id_column,
        columns=columns or (),
        split=split,
        limit=limit,
        on_error=on_error,
    )
    if side is None:
        side = "left" if encoder.left.modality == corpus.modality != encoder.right.modality else "right"
    # A folder is found again by its absolute path, from wherever the index is searched.
    path = Path(model).expanduser()
    notes = {"model": str(path.resolve()) if path.is_dir() else model, "kind": encoder.kind, "data": shown(data)}
    how: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "output": output, "dim": dim, "autocast": autocast}
    how |= {"num_workers": num_workers, "on_error": on_error, "take_over": 60 * take_over_minutes}
    embeddings = embed_corpus(encoder.tower(side), corpus, out, **how, identity={"side": side}, notes=notes)
    if distributed.is_main():
        meta = embeddings.meta
        if meta["skipped"]:
            total, first = meta["skipped"] + len(embeddings), meta["first_skipped"][0]
            told = f"left out {meta['skipped']:,} of {total:,} items; the first, {first['id']}: {first['reason']}"
            print(printable(told), file=sys.stderr)
        print(printable(f"{len(embeddings):,} embeddings of dimension {embeddings.dim} ({side} side) → {out}"))


def index(
    source: str,
    data: str | None = None,
    *,
    out: str | None = None,
    factory: str = "auto",
    metric: Literal["cosine", "ip"] = "cosine",
    dim: int | None = None,
    memory: str | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    target_recall: float = 0.95,
    recall_queries: int = 500,
    queries: str | None = None,
    append: bool = False,
    remove: str | None = None,
    verify: bool = False,
    embeddings: str | None = None,
    bm25: bool = False,
    texts: bool = False,
    side: Literal["left", "right"] | None = None,
    split: str = "train",
    text_column: str | None = None,
    image_column: str | None = None,
    vector_column: str | None = None,
    id_column: str | None = None,
    columns: list[str] | None = None,
    batch_size: int = 32,
    device: str | None = None,
) -> None:
    """Build a FAISS index from EMBEDDINGS, or from MODEL and DATA; append to one, remove from one, or verify one.

    What was built is measured: recall@10 against exact search, and how long a query takes. An IVF index that half of
    the memory does not hold is filled in parts and merged on disk: the same command resumes an interrupted build, and
    several of them at once share the parts.

    With --bm25 the words of the texts are indexed, too, for `search --hybrid`, and with --texts the texts are kept for
    `search --rerank`: from DATA, or from where the embeddings were made of. `dualenc index INDEX [DATA] --bm25 --texts`
    does so for an index that is there.

    Args:
        source: folder of embeddings, model folder or name; for --remove, --verify, --bm25 and --texts also that of an
            index; for --texts also what `dualenc push` wrote.
        data: what to embed, with a model: BEIR folder, folder of images, table, tars, or hub name.
        out: folder to write: index.faiss, ids.txt, snippets.jsonl, columns.parquet, meta.json.
        factory: auto, or any FAISS factory string such as Flat, HNSW32, IVF1024,Flat or OPQ32,IVF4096,PQ32.
        metric: cosine, or ip for the inner product.
        dim: index only so many of the first components of the vectors; queries are cut likewise; by default all.
        memory: what the index may take while it is built and searched, such as 2GiB; by default what the machine has.
        nprobe: lists that an IVF index visits; by default as many as target_recall needs.
        ef_search: candidates that an HNSW index keeps; by default as many as target_recall needs.
        target_recall: recall@10 that auto and the search parameters are chosen for.
        recall_queries: how many queries to measure recall@10 with; 0 measures nothing.
        queries: embeddings of real queries to measure with; by default a sample of the database.
        append: add the vectors to the index that is in out.
        remove: file with ids, one a line, to take out of the index.
        verify: compare every file of an index or of embeddings with its checksum.
        embeddings: with a model: folder to keep the embeddings in; by default they are removed when done.
        bm25: index the words of the texts beside the vectors.
        texts: keep the whole texts beside the vectors, for a cross-encoder to read.
        side: with a model: left or right; by default documents, or whatever the data holds.
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        image_column: column with the images, where it has no usual name.
        vector_column: column with the vectors, where it has no usual name.
        id_column: column with the ids; by default _id or id, or else row numbers.
        columns: with a model: further columns of a table, separated by commas, to filter results by; embeddings bring
            those that they were made with.
        batch_size: items per forward pass.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.commands.evaluation import MOST_ITEMS, check_range
    from dualenc.search import Index, change, is_index
    from dualenc.search.build import LARGEST_PARAMETER, check_factory
    from dualenc.search.embeddings import Embeddings, is_embeddings
    from dualenc.search.engines import is_engine
    from dualenc.search.index import check_target
    from dualenc.search.kinds import parse_bytes, remedies

    if verify or remove is not None:
        return _verify(source) if verify else _remove(source, remove or "")
    beside: dict[str, Any] = {"bm25": bm25, "texts": texts}
    beside |= {"split": split, "text_column": text_column, "id_column": id_column}
    if out is None and ((bm25 and is_index(source)) or (texts and (is_index(source) or is_engine(source)))):
        return _add_beside(source, data, **beside)
    if out is None:
        raise DualencError("dualenc index needs --out; name the folder of the index")
    budget = None if memory is None else parse_bytes(memory)
    check_factory(factory)
    check_range(1, LARGEST_PARAMETER, nprobe=nprobe, ef_search=ef_search)
    check_range(0, 1, target_recall=target_recall)
    check_range(1, sys.maxsize, dim=dim)
    check_range(0, MOST_ITEMS, recall_queries=recall_queries)
    check_target(out)
    if append and not is_index(out):
        raise DualencError(f"{out}: holds no index to append to; leave out --append to build one")
    if data is None and not is_embeddings(source):
        raise DualencError(f"{source}: holds no embeddings; if it is a model, name the data too: index MODEL DATA")
    if columns and data is None:
        raise DualencError(f"{source}: holds embeddings; `dualenc embed … --columns` keeps columns, not index")
    folder = Path(source)
    if data is not None:
        # Hidden beside the index unless the user wants to keep them. The hidden folder outlives a failed build: a
        # factory string that FAISS refuses does not cost the embedding.
        folder = Path(embeddings or Path(out).with_name(f".{Path(out).name}.embeddings"))
        named: dict[str, Any] = {"text_column": text_column, "image_column": image_column, "id_column": id_column}
        named |= {"vector_column": vector_column, "columns": columns}
        how: dict[str, Any] = {"side": side, "split": split, "batch_size": batch_size, "device": device}
        embed(source, data, out=str(folder), dim=None if embeddings else dim, **how, **named)
    if not distributed.is_main():
        return None
    added = Embeddings.open(folder, verify=True)
    if dim is not None:
        added = added.first(dim)
    if append:
        built = change.append(out, added)
        print(printable(f"{len(added):,} vectors appended, now {len(built):,} → {out}"))
    else:
        asked = None if queries is None else Embeddings.open(queries)
        if asked is not None and dim is not None and asked.dim != dim:
            asked = asked.first(dim)
        real = None if asked is None else asked.vectors[:recall_queries]
        how = {"queries": real, "recall_queries": recall_queries, "target_recall": target_recall}
        how |= {"metric": metric, "nprobe": nprobe, "ef_search": ef_search, "progress": True}
        built = Index.build(added, None, factory, memory=budget, folder=out, **how)
        meta = built.meta
        settings = "".join(f", {name}={value}" for name, value in meta["search_parameters"].items())
        kind = f"{meta['factory']}{settings}, {meta['metric']}"
        print(printable(f"{len(built):,} vectors of dimension {built.dim} ({kind}) → {out}"))
        if "recall_at_10" in meta:
            print(f"recall@10 against exact search: {meta['recall_at_10']:.4f} ({meta['recall_queries']} queries)")
            if meta["recall_at_10"] < meta.get("target_recall", 0) - MISSED_BY:
                options = "; or ".join(remedies(meta["factory"], len(built), built.dim, budget)) or "--factory Flat"
                print(printable(f"this misses the target of {meta['target_recall']:g}; to come nearer: {options}"))
            times = ", ".join(f"{name} {value:.2f} ms" for name, value in meta["latency_ms"].items())
            print(f"a query alone: {times}; {meta['bytes_per_vector']:,} bytes per vector")
    if data is not None and embeddings is None:
        remove_path(folder)
    if bm25 or texts:
        _add_beside(out, None if append else data, **beside)
    return None


def _add_beside(folder: str, data: str | None, *, bm25: bool, texts: bool, **how: Any) -> None:
    """Put BM25, the texts or both into the folder of an index, from the texts that it was made of."""
    from dualenc.data.sources import open_corpus
    from dualenc.files import read_json_object
    from dualenc.search.engines import is_engine
    from dualenc.search.lexical import add_lexical
    from dualenc.search.texts import add_texts

    recorded = data or read_json_object(Path(folder) / "meta.json").get("data")
    if not isinstance(recorded, str):
        raise DualencError(
            f"{folder}: does not say what it was made of; name its texts: dualenc index INDEX DATA --bm25 --texts"
        )
    if bm25 and is_engine(folder):
        raise DualencError(f"{folder}: an engine is searched by vectors alone; leave --bm25 out")
    corpus = open_corpus(recorded, modality="text", **how)
    if bm25:
        lexical = add_lexical(folder, corpus)
        print(printable(f"BM25 over {lexical.count:,} texts → {folder}"))
    if texts:
        print(printable(f"{add_texts(folder, corpus):,} texts kept for cross-encoders → {folder}"))


def _verify(folder: str) -> None:
    """Open an index or embeddings with every file read and compared."""
    from dualenc.search import Embeddings, Index
    from dualenc.search.embeddings import is_embeddings

    opened: Index | Embeddings
    opened = Embeddings.open(folder, verify=True) if is_embeddings(folder) else Index.open(folder, verify=True)
    size = sum(path.stat().st_size for path in Path(folder).iterdir())
    print(printable(f"{folder}: {len(opened):,} vectors, {size / 2**20:,.1f} MiB, every file as it was written"))


def _remove(folder: str, path: str) -> None:
    """Remove the ids of a file from an index."""
    from dualenc.search import change

    try:
        with open_regular(path) as stream:  # other separators than a line break may be in an id
            ids = [line for line in stream.read().decode("utf-8").replace("\r\n", "\n").split("\n") if line]
    except (OSError, UnicodeDecodeError) as error:
        raise DualencError(f"{path}: cannot be read ({error}); give a text file with one id a line") from None
    index = change.remove(folder, ids)
    print(printable(f"{len(set(ids)):,} removed, now {len(index):,} vectors → {folder}"))


def search(
    index: str,
    query: str,
    *,
    k: int = 10,
    where: list[str] | None = None,
    filter: str = "",
    hybrid: Literal["rrf", "weighted"] | None = None,
    weight: float = 0.5,
    rerank: str | None = None,
    rerank_top: int = 100,
    json: bool = False,
    model: str | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    qdrant_path: str | None = None,
    device: str = "cpu",
) -> None:
    """Search an index or an engine with a text, or with an image or a vector given by its path.

    The model that made the index encodes the query: with the query side of a query-document model and its prompt,
    with the text or the image side of an image-text model.

    Args:
        index: folder that `dualenc index` or `dualenc push` wrote.
        query: text; path of an image if the model encodes images; of a .npy file with one vector if it adapts vectors.
        k: how many results.
        where: only what meets this, by columns that were kept (`--columns`): year>=2020, lang=en,de (any of them),
            lang!=en; may be repeated.
        filter: in an engine, only what matches this, in its own language: SQL for LanceDB (year >= 2020 AND
            lang = 'en'), JSON for Qdrant ({"must": [{"key": "year", "range": {"gte": 2020}}]}).
        hybrid: fuse with BM25 (`dualenc index --bm25`): by reciprocal ranks (rrf) or scores (weighted).
        weight: with hybrid, of the vectors, from 0 to 1; BM25 has the rest.
        rerank: folder or name of a sentence-transformers CrossEncoder that scores the best again, by their texts
            (`dualenc index --texts`); the scores shown are then its.
        rerank_top: how many of the best it scores.
        json: print JSON, in ASCII, instead of a table.
        model: model folder or name, if the one that made the index has moved.
        nprobe: lists that an IVF index visits; by default what the build or the engine chose.
        ef_search: candidates that an HNSW index keeps; by default what the build or the engine chose.
        qdrant_path: the folder of Qdrant's embedded mode, if INDEX was pushed there; its files can run code, so name
            only one that you trust.
        device: such as cpu or cuda:0.
    """
    from dualenc.commands.evaluation import check_range, start_processes
    from dualenc.data import open_image
    from dualenc.evaluation.report import Table, print_table
    from dualenc.search.build import LARGEST_PARAMETER
    from dualenc.search.engines import EngineIndex
    from dualenc.search.rerank import open_cross_encoder
    from dualenc.search.searcher import Query, Searcher

    check_range(1, sys.maxsize, k=k, rerank_top=rerank_top)
    if rerank is not None and k > rerank_top:
        raise DualencError(
            f"-k is {k} and --rerank-top {rerank_top}: what is not reranked is not shown; raise the second"
        )
    check_range(1, LARGEST_PARAMETER, nprobe=nprobe, ef_search=ef_search)
    check_range(0, 1, weight=weight)
    if not query.strip():
        raise DualencError("the query is empty; give a text, or the path of an image")
    how: dict[str, Any] = {"nprobe": nprobe, "ef_search": ef_search, "hybrid": hybrid is not None}
    chosen = start_processes(device)
    if rerank is not None:
        how["judge"] = open_cross_encoder(rerank, device=str(chosen))[0]
    searcher = Searcher.open(index, model, device=chosen, qdrant_path=qdrant_path, **how)
    conditions = searcher.conditions(where or ())
    if filter and not searcher.filter_language:
        raise DualencError(f"{index}: only an engine takes --filter; give --where to filter an index")
    side = searcher.query_side(_modality(query, searcher.takes))
    item: Any = query
    if searcher.encoder.tower(side).modality == "image":
        item = open_image(query)
    elif searcher.encoder.tower(side).modality == "vector":
        item = _open_vector(query)
    fused: dict[str, Any] = {"hybrid": hybrid, "weight": weight, "rerank": 0 if rerank is None else rerank_top}
    hits = searcher.search([Query(side, item, k=k, where=conditions, filter=filter, **fused)])[0]
    if isinstance(searcher.index, EngineIndex):
        searcher.index.engine.close()
    kept = searcher.columns
    names = ("rank", "id", "score", *kept, *(["snippet"] if searcher.has_snippets else []))
    results: list[dict[str, Any]] = [
        {"rank": rank, "id": hit.id, "score": round(hit.score, 6), "snippet": hit.snippet}
        | {name: hit.columns.get(name) for name in kept}
        for rank, hit in enumerate(hits, 1)
    ]
    if json:
        print(printable_json({"query": query, "index": index, "results": results}))
    else:
        # A year is no quantity: tables write those with separators.
        shown = [{n: str(r[n]) if n in kept and r[n] is not None else r[n] for n in names} for r in results]
        print_table(Table(query, shown))


def _modality(query: str, takes: Sequence[Modality]) -> Modality:
    """What a query on the command line is: with images and texts, an image if it is or looks like a file."""
    if len(takes) == 1:
        return takes[0]
    from dualenc.data.images import IMAGE_SUFFIXES

    return "image" if Path(query).suffix.lower() in IMAGE_SUFFIXES or Path(query).is_file() else "text"


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
