"""`dualenc index`: build a FAISS index, change it, verify it, or add texts to it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.commands.embed import Work, describe, open_work
from dualenc.commands.options import (
    BatchSize,
    BuildOptions,
    EmbedOptions,
    SourceOptions,
    given_options,
    refuse_together,
)
from dualenc.errors import DualencError
from dualenc.io.files import remove as remove_path
from dualenc.io.files import was_replaced_by_killed
from dualenc.io.reading import read_json_object
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.search import Embeddings, Index

MADE_BY = "dualenc index"
"""Recorded with the embeddings beside an index, by which they are known from a user's own."""
RECALL_TOLERANCE = 0.01  # below the target: recall is measured with a few hundred queries


def index(
    source: str,
    data: str | None = None,
    *,
    out: str | None = None,
    build: BuildOptions,
    append: bool = False,
    remove: str | None = None,
    verify: bool = False,
    bm25: bool = False,
    texts: bool = False,
    side: Literal["left", "right"] | None = None,
    items: SourceOptions,
    batch_size: BatchSize = 32,
    device: str | None = None,
) -> None:
    """Build a FAISS index from EMBEDDINGS, or from MODEL and DATA; append to one, remove from one,
    or verify one.

    The index is measured: recall@10 against exact search, and the time of a query. Of a refined
    index that half of the memory does not hold the codes that refine are a file of their own.

    --bm25 also indexes the words of the texts, for `search --hybrid`, and --texts keeps the texts,
    by which BM25 follows --append and --remove; `dualenc index INDEX [DATA] --bm25 --texts` adds
    them to an index.

    Args:
        source: folder of embeddings, model folder or name; for --remove, --verify, --bm25 and
            --texts also that of an index.
        data: what to embed, with a model: BEIR folder, folder of images, table, tars, or hub name.
        out: folder to write: index.faiss, items.arrow, order.npy, meta.json.
        append: add the vectors to the index that is in out; with a model and data they are cut as
            it is.
        remove: file with ids, one a line, to take out of the index.
        verify: compare every file of an index or of embeddings with its checksum.
        bm25: index the words of the texts beside the vectors.
        texts: keep the whole texts beside the vectors, for --append, --remove and `dualenc
            migrate`.
        side: with a model: left or right; by default documents, or whatever the data holds.
        batch_size: items per forward pass.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.search import Index
    from dualenc.search.migration.migration_folder import check_unmigrated
    from dualenc.workflows.session import start_processes, writing

    _check_together(data, out, build, append, remove, verify, bm25, texts, side, items)
    if verify:
        return _verify(source)
    if remove is not None:
        return _remove(source, remove)
    if out is None:
        return _add_texts(source, data, items, bm25=bm25, texts=texts)
    _check_build(source, data, out, build, append)
    needs_texts = _check_texts_of(out, bm25=bm25, texts=texts) if append else bm25 or texts
    # Opened before the work: data that cannot be reached leaves no index without its texts.
    corpus = _open_texts(source, data, items) if needs_texts else None
    folder = Path(source)
    grown = Index.open(out) if append else None
    is_done = False
    with ExitStack() as lock:
        if data is not None:
            start_processes(device)
            was_killed = was_replaced_by_killed(out)
            lock.enter_context(writing(out, wait=append))
            check_unmigrated(out)
            options = EmbedOptions(batch_size=batch_size, dim=build.dim)
            if grown is not None:
                items, options = _as_grown(grown, items, options)
            work = open_work(source, data, side, items, options, device)
            folder, is_done = _embed_beside(out, work, grown, was_killed)
        if not distributed.is_main():
            return None
        if is_done:
            print(printable(f"these vectors were appended before a process was killed → {out}"))
        elif grown is not None:
            _append(folder, grown, out, build.dim, corpus)
        else:
            _build(folder, out, build, corpus, bm25=bm25, texts=texts)
        if data is not None:
            remove_path(folder)
    return None


def _check_together(
    data: str | None,
    out: str | None,
    build: BuildOptions,
    append: bool,
    remove: str | None,
    verify: bool,
    bm25: bool,
    texts: bool,
    side: str | None,
    items: SourceOptions,
) -> None:
    """Refuse options that would be ignored."""
    building = given_options(build)
    adding = {"--bm25": bm25, "--texts": texts}
    words = {"--side": side, "--append": append, **building}
    if verify:
        refuse_together("--verify", {"--remove": remove})
    alone = {"DATA": data, "--out": out, **adding, **words, **given_options(items)}
    for name, is_given in (("--verify", verify), ("--remove", remove is not None)):
        if is_given:
            refuse_together(name, alone)
    if out is None:
        refuse_together("an index without --out", words)
    if append:
        del building["--dim"]
        refuse_together("--append", building)
    if data is None:
        read = given_options(items) if not (bm25 or texts or append) else {}
        refuse_together("EMBEDDINGS without DATA", {"--side": side, **read})


def _embed_beside(out: str, work: Work, grown: Index | None, was_killed: bool) -> tuple[Path, bool]:
    """Embed into a folder beside an index; returns it, and whether a killed process has appended
    all.

    The folder stays after a failed build: a factory string that FAISS refuses does not cost the
    embedding. `was_killed` says that a process was killed after it had replaced the index.
    """
    from dualenc.data.store.items import rows_of
    from dualenc.search.embed.writer import check_embeddings_target
    from dualenc.workflows.session import embed_into

    target = Path(os.path.abspath(out))
    folder = target.with_name(f".{target.name}.embeddings")
    left = read_json_object(folder / "meta.json") if check_embeddings_target(folder) else {}
    if left and left.get("made_by") != MADE_BY:
        problem = "holds embeddings that no build of the index has left"
        raise DualencError(f"{folder}: {problem}; move the folder away, or remove it")
    if was_killed and grown is not None:
        present = rows_of(grown.ids, work.corpus.ids)
        present = present[present >= 0]
        if len(present) and present.tolist() == list(range(len(grown) - len(present), len(grown))):
            return folder, True
    # Of items that were embedded some may have been left out.
    count = sum(left.get("shard_rows", ()))
    last = [] if grown is None else grown.ids[max(0, len(grown) - count) :]
    has_grown = bool(left) and bool(last) and set(last) <= set(work.corpus.ids)
    if grown is not None and not has_grown:
        _check_growth(grown, work, out)
    work.settings["notes"]["made_by"] = MADE_BY
    # Nobody else writes this folder: what other embeddings are in it were left by a failed build.
    embedded = embed_into(folder, work.tower, work.corpus, side=work.side, **work.settings)
    describe(embedded, folder)
    return folder, has_grown and embedded.meta["files"] == left.get("files")


def _add_texts(
    source: str, data: str | None, items: SourceOptions, *, bm25: bool, texts: bool
) -> None:
    """Add BM25 or texts to an index that is already there."""
    from dualenc.search import is_index

    if not (bm25 or texts) or not is_index(source):
        raise DualencError("dualenc index needs --out; name the folder of the index")
    _write_texts(source, _open_texts(source, data, items), bm25=bm25, texts=texts)


def _check_build(
    source: str, data: str | None, out: str, build: BuildOptions, append: bool
) -> None:
    """Refuse what would fail after the embedding, which may take hours."""
    from dualenc.data.store.vector_shards import is_embeddings
    from dualenc.search import is_index
    from dualenc.search.index.build import check_factory
    from dualenc.search.index.kinds import parse_bytes
    from dualenc.search.index.open import check_target

    if build.memory is not None:
        parse_bytes(build.memory)
    check_factory(build.factory)
    check_target(out)
    if append and not is_index(out):
        raise DualencError(f"{out}: holds no index to append to; leave out --append to build one")
    if data is None and not is_embeddings(source):
        raise DualencError(
            f"{source}: holds no embeddings; if it is a model, name the data too: index MODEL DATA"
        )


def _column_names(source: Embeddings | Index) -> list[str]:
    return [] if source.columns is None else source.columns.column_names


def _as_grown(
    grown: Index, items: SourceOptions, options: EmbedOptions
) -> tuple[SourceOptions, EmbedOptions]:
    """How to read and embed what an index grows by: with its columns, and cut as it is."""
    # Larger vectors may be of another model, where the index does not name its own.
    dim = options.dim or (grown.dim if "model_checksum" in grown.meta else None)
    columns = dict.fromkeys([*_column_names(grown), *(items.columns or ())])
    return replace(items, columns=list(columns)), replace(options, dim=dim)


def _check_growth(grown: Index, work: Work, out: str) -> None:
    """Refuse what the index would refuse after the embedding."""
    from dualenc.search.embed.encode import tower_checksum
    from dualenc.search.index.change import check_addition

    about = {
        "dimension": work.settings["dim"] or work.tower.dim,
        "model_checksum": tower_checksum(work.tower),
    }
    check_addition(
        grown, {**about, "side": work.side, "output": work.settings["output"]}, work.corpus.ids, out
    )


def _append(folder: Path, grown: Index, out: str, dim: int | None, corpus: Corpus | None) -> None:
    from dualenc.search import Embeddings
    from dualenc.search.index import change

    added = _first(Embeddings.open(folder, verify=True), dim)
    missing = ",".join(sorted(set(_column_names(grown)) - set(_column_names(added))))
    if missing:
        problem = (
            f"has no column {missing}, which the index filters by; embed with --columns {missing}"
        )
        raise DualencError(f"{folder}: {problem}")
    appended = change.append(out, added, corpus)
    print(printable(f"{len(added):,} vectors appended, now {len(appended):,} → {out}"))


def _build(
    folder: Path, out: str, build: BuildOptions, corpus: Corpus | None, *, bm25: bool, texts: bool
) -> None:
    from dualenc.search import Embeddings, Index
    from dualenc.search.index.kinds import parse_bytes
    from dualenc.search.index.open import rows_in

    vectors = _first(Embeddings.open(folder, verify=True), build.dim)
    if corpus is not None:
        rows_in(corpus, vectors, folder)
    options: dict[str, Any] = {name: value for name, value in vars(build).items() if name != "dim"}
    if build.queries is not None:
        options["queries"] = _first(Embeddings.open(build.queries), build.dim).vectors[
            : build.recall_queries
        ]
    options["memory"] = None if build.memory is None else parse_bytes(build.memory)
    _describe(Index.build(vectors, None, folder=out, progress=True, **options), out)
    if corpus is not None:
        _write_texts(out, corpus, bm25=bm25, texts=texts)


def _first(embeddings: Embeddings, dim: int | None) -> Embeddings:
    """The first components of the vectors, if they have more."""
    return embeddings if dim is None or embeddings.dim == dim else embeddings.first(dim)


def _describe(built: Index, out: str) -> None:
    """Print kind, recall and speed of an index."""
    meta = built.meta
    settings = "".join(f", {name}={value}" for name, value in meta["search_parameters"].items())
    kind = f"{meta['factory']}{settings}, {meta['metric']}"
    print(printable(f"{len(built):,} vectors of dimension {built.dim} ({kind}) → {out}"))
    if "recall_at_10" not in meta:
        return
    print(
        f"recall@10 against exact search: {meta['recall_at_10']:.4f} ({meta['recall_queries']} queries)"
    )
    if meta["recall_at_10"] < meta.get("target_recall", 0) - RECALL_TOLERANCE:
        print(
            f"this misses the target of {meta['target_recall']:g}; give a --factory of finer codes or Refine(SQfp16)"
        )
    times = ", ".join(f"{name} {value:.2f} ms" for name, value in meta["latency_ms"].items())
    print(f"a query alone: {times}; {meta['bytes_per_vector']:,} bytes per vector")


def _check_texts_of(index: str, *, bm25: bool, texts: bool) -> bool:
    """Whether an index has BM25 or texts, which appended ones then join; refuse to append to what
    it does not have."""
    from dualenc.search.lexical import has_lexical
    from dualenc.search.texts import has_texts

    if (bm25 and not has_lexical(index)) or (texts and not has_texts(index)):
        raise DualencError(
            f"{index}: has no BM25 or no texts to append to; run dualenc index {index} --bm25 --texts"
        )
    return has_lexical(index) or has_texts(index)


def _open_texts(folder: str, data: str | None, items: SourceOptions) -> Corpus:
    """Open the texts that an index or embeddings were made of."""
    from dualenc.data.readers.sources import open_corpus

    path = Path(folder) / "meta.json"
    meta = {} if data is not None and not path.is_file() else read_json_object(path)
    recorded = data or meta.get("data")
    if not isinstance(recorded, str):
        raise DualencError(
            f"{folder}: does not say what it was made of; name it: index INDEX DATA --texts"
        )
    reading: dict[str, Any] = {**SourceOptions.recorded(meta, folder), **items.given()}
    return open_corpus(recorded, modality="text", **reading)


def _write_texts(folder: str, corpus: Corpus, *, bm25: bool, texts: bool) -> None:
    """Put BM25, the texts or both into the folder of an index."""
    from dualenc.search.texts import add_texts

    count = add_texts(folder, corpus, bm25=bm25, whole=texts)
    if bm25:
        print(printable(f"BM25 over {count:,} texts → {folder}"))
    if texts:
        print(printable(f"{count:,} texts kept → {folder}"))


def _verify(folder: str) -> None:
    """Open an index or embeddings with every file read and compared."""
    from dualenc.data.store.vector_shards import is_embeddings
    from dualenc.search import Embeddings, Index
    from dualenc.search.lexical import Lexical, has_lexical
    from dualenc.search.texts import TextStore, has_texts

    kind: type[Index] | type[Embeddings] = Embeddings if is_embeddings(folder) else Index
    opened = kind.open(folder, verify=True)
    if isinstance(opened, Index) and has_texts(folder):
        TextStore(folder, opened.items_checksum, verify=True)
    if isinstance(opened, Index) and has_lexical(folder):
        Lexical.open(folder, opened.items_checksum, verify=True)
    size = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    print(
        printable(
            f"{folder}: {len(opened):,} vectors, {size / 2**20:,.1f} MiB, every file as it was written"
        )
    )


def _remove(folder: str, path: str) -> None:
    """Remove the ids of a file from an index."""
    from dualenc.search.index import change

    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DualencError(
            f"{path}: cannot be read ({error}); give a text file with one id a line"
        ) from None
    # Not `splitlines`: an id may hold other separators than a line break.
    ids = [line for line in text.split("\n") if line]
    changed = change.remove(folder, ids)
    print(printable(f"{len(set(ids)):,} removed, now {len(changed):,} vectors → {folder}"))
