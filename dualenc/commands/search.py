"""`dualenc embed`, `index` and `search`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.errors import DualencError
from dualenc.files import open_regular
from dualenc.files import remove as remove_path
from dualenc.terminal import printable, printable_json

if TYPE_CHECKING:
    import numpy as np

    from dualenc.encoders import DualEncoder
    from dualenc.search import Index
    from dualenc.search.engines import EngineIndex
    from dualenc.types import Side


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
    side: Literal["left", "right"] | None = None,
    split: str = "train",
    text_column: str | None = None,
    image_column: str | None = None,
    vector_column: str | None = None,
    id_column: str | None = None,
    batch_size: int = 32,
    device: str | None = None,
) -> None:
    """Build a FAISS index from EMBEDDINGS, or from MODEL and DATA; append to one, remove from one, or verify one.

    What was built is measured: recall@10 against exact search, and how long a query takes. An IVF index that half of
    the memory does not hold is filled in parts and merged on disk: the same command resumes an interrupted build, and
    several of them at once share the parts.

    Args:
        source: folder of embeddings, or a model folder or name; for --remove and --verify the folder of an index.
        data: what to embed, with a model: BEIR folder, folder of images, table, tars, or hub name.
        out: folder to write: index.faiss, ids.txt, snippets.jsonl, meta.json.
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
        side: with a model: left or right; by default documents, or whatever the data holds.
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        image_column: column with the images, where it has no usual name.
        vector_column: column with the vectors, where it has no usual name.
        id_column: column with the ids; by default _id or id, or else row numbers.
        batch_size: items per forward pass.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.commands.evaluation import MOST_ITEMS, check_range
    from dualenc.search import Index, change, is_index
    from dualenc.search.build import LARGEST_PARAMETER, check_factory
    from dualenc.search.embeddings import Embeddings, is_embeddings
    from dualenc.search.index import check_target
    from dualenc.search.kinds import parse_bytes

    if verify or remove is not None:
        return _verify(source) if verify else _remove(source, remove or "")
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
    folder = Path(source)
    if data is not None:
        # Hidden beside the index unless the user wants to keep them. The hidden folder outlives a failed build: a
        # factory string that FAISS refuses does not cost the embedding.
        folder = Path(embeddings or Path(out).with_name(f".{Path(out).name}.embeddings"))
        columns: dict[str, Any] = {"text_column": text_column, "image_column": image_column, "id_column": id_column}
        columns["vector_column"] = vector_column
        how: dict[str, Any] = {"side": side, "split": split, "batch_size": batch_size, "device": device}
        embed(source, data, out=str(folder), dim=None if embeddings else dim, **how, **columns)
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
            times = ", ".join(f"{name} {value:.2f} ms" for name, value in meta["latency_ms"].items())
            print(f"a query alone: {times}; {meta['bytes_per_vector']:,} bytes per vector")
    if data is not None and embeddings is None:
        remove_path(folder)
    return None


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
    json: bool = False,
    model: str | None = None,
    nprobe: int | None = None,
    ef_search: int | None = None,
    device: str = "cpu",
) -> None:
    """Search an index or an engine with a text, or with an image or a vector given by its path.

    The model that made the index encodes the query: with the query side of a query-document model and its prompt,
    with the text or the image side of an image-text model.

    Args:
        index: folder that `dualenc index` or `dualenc push` wrote.
        query: text; path of an image if the model encodes images; of a .npy file with one vector if it adapts vectors.
        k: how many results.
        where: of an engine, only what meets this: year>=2020, lang=en,de (any of them), lang!=en; may be repeated.
        json: print JSON, in ASCII, instead of a table.
        model: model folder or name, if the one that made the index has moved.
        nprobe: lists that an IVF index visits; by default what the build or the engine chose.
        ef_search: candidates that an HNSW index keeps; by default what the build or the engine chose.
        device: such as cpu or cuda:0.
    """
    from dualenc.commands.evaluation import check_range, start_processes
    from dualenc.data import Corpus, open_image
    from dualenc.encoders import load_model
    from dualenc.evaluation.report import Table, print_table
    from dualenc.search import Index
    from dualenc.search.build import LARGEST_PARAMETER
    from dualenc.search.embed import embed, tower_checksum
    from dualenc.search.engines import EngineIndex, is_engine, parse_conditions

    check_range(1, sys.maxsize, k=k)
    check_range(1, LARGEST_PARAMETER, nprobe=nprobe, ef_search=ef_search)
    if not query.strip():
        raise DualencError("the query is empty; give a text, or the path of an image")
    opened: Index | EngineIndex = EngineIndex.open(index) if is_engine(index) else Index.open(index)
    conditions = []
    if isinstance(opened, EngineIndex):
        conditions = parse_conditions(where or (), opened.about.columns)
    elif where:
        raise DualencError(
            f"{index}: a FAISS index keeps no columns for --where; `dualenc push` the embeddings instead"
        )
    encoder = load_model(model or _recorded_model(opened, Path(index)), device=str(start_processes(device)))
    recorded, side = opened.meta.get("model_checksum"), opened.meta.get("side", "right")
    if recorded is not None and tower_checksum(encoder.tower(side)) != recorded:
        raise DualencError(f"{index}: was built with other weights than the model has now; build the index again")
    tower = encoder.tower(_query_side(encoder, query, side))
    item: Any = query
    if tower.modality == "image":
        item = open_image(query)
    elif tower.modality == "vector":
        item = _open_vector(query)
    corpus = Corpus(["query"], [item], tower.modality)
    output = opened.meta.get("output", "embedding")
    kept = opened.about.dim if isinstance(opened, EngineIndex) else opened.dim
    dim = kept if output == "embedding" and kept < tower.dim else None
    vector = embed(tower, corpus, output=output, dim=dim, on_error="raise", progress=False).vectors
    results: list[dict[str, Any]]
    if isinstance(opened, EngineIndex):
        names = ("rank", "id", "score", *opened.about.columns, *(["snippet"] if opened.about.has_snippets else []))
        hits = opened.search(vector, min(k, len(opened)), conditions, nprobe=nprobe, ef_search=ef_search)[0]
        results = [
            {"rank": rank, "id": hit.id, "score": round(hit.score, 6), "snippet": hit.snippet}
            | {name: hit.columns.get(name) for name in opened.about.columns}
            for rank, hit in enumerate(hits, 1)
        ]
        opened.engine.close()
    else:
        names = ("rank", "id", "score") if opened.snippets is None else ("rank", "id", "score", "snippet")
        scores, rows = opened.search_rows(vector, min(k, len(opened)), nprobe=nprobe, ef_search=ef_search)
        results = [
            {"rank": rank, "id": opened.ids[row], "score": round(float(score), 6), "snippet": opened.snippet(int(row))}
            for rank, (score, row) in enumerate(zip(scores[0], rows[0]), 1)
            if row >= 0
        ]
    if json:
        print(printable_json({"query": query, "index": index, "results": results}))
    else:
        # A year is no quantity: tables write those with separators.
        columns = opened.about.columns if isinstance(opened, EngineIndex) else {}
        shown = [{n: str(r[n]) if n in columns and r[n] is not None else r[n] for n in names} for r in results]
        print_table(Table(query, shown))


def _query_side(encoder: DualEncoder, query: str, index_side: Side) -> Side:
    """The side that encodes a query for an index of the other one, or, with images and texts, whatever it is."""
    if encoder.kind in ("query-document", "vector"):
        return "left" if index_side == "right" else "right"
    if encoder.kind == "image":
        return "left"
    from dualenc.data.images import IMAGE_SUFFIXES

    is_image = Path(query).suffix.lower() in IMAGE_SUFFIXES or Path(query).is_file()
    wanted = "image" if is_image else "text"
    return "left" if encoder.left.modality == wanted else "right"


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


def _recorded_model(index: Index | EngineIndex, folder: Path) -> str:
    """The model's recorded place, or beside the index if both were moved together."""
    recorded = index.meta.get("model")
    if not recorded:
        raise DualencError(f"{folder}: does not say which model made it; name one with --model")
    path = Path(recorded)
    sibling = folder.resolve().parent / path.name
    if path.is_absolute() and not path.exists() and not sibling.is_dir():
        raise DualencError(f"{folder}: its model {path} is gone; name its new place with --model")
    return str(sibling) if not path.exists() and sibling.is_dir() else recorded
