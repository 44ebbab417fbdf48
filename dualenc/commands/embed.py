"""`dualenc embed`: a model and data to a folder of embeddings."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

from dualenc.commands.source import open_side, recorded_name
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.embeddings import Embeddings


def embed(
    model: str,
    data: str,
    *,
    out: str,
    side: Literal["left", "right"] | None = None,
    split: str = "train",
    text_column: str | None = None,
    image_column: str | None = None,
    id_column: str | None = None,
    limit: int | None = None,
    batch_size: int = 32,
    dtype: Literal["float16", "float32"] = "float32",
    output: Literal["embedding", "features"] = "embedding",
    autocast: Literal["bfloat16", "float16"] | None = None,
    num_workers: int | None = None,
    on_error: Literal["skip", "raise"] = "skip",
    device: str | None = None,
) -> None:
    """Embed a corpus with one side of a model, into a folder that numpy reads.

    The same command again resumes an interrupted run; processes of `accelerate launch -m dualenc embed …` share it.

    Args:
        model: model folder or name.
        data: BEIR folder, folder of images, csv / tsv / jsonl / parquet file, tars, or data set by hub name.
        out: folder to write: shard-*.npy, ids.txt, snippets.jsonl, meta.json.
        side: left (queries, images) or right (documents, texts); by default documents, or whatever the data holds.
        split: of a data set that has several.
        text_column: column with the texts, where it has no usual name.
        image_column: column with the images, where it has no usual name.
        id_column: column with the ids; by default _id or id, or else row numbers.
        limit: only the first rows of a table.
        batch_size: items per forward pass.
        dtype: precision of the stored vectors.
        output: embedding for unit vectors, features for what probes use.
        autocast: run the model in this precision.
        num_workers: processes that decode images.
        on_error: skip (and count) bad samples, or raise at the first one.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc.commands.evaluation import MOST_ITEMS, MOST_WORKERS, check_range, start_processes
    from dualenc.embed import embed as embed_corpus
    from dualenc.encoders import load_model

    check_range(1, MOST_ITEMS, batch_size=batch_size)
    check_range(1, sys.maxsize, limit=limit)
    check_range(0, MOST_WORKERS, num_workers=num_workers)
    encoder = load_model(model, device=str(start_processes(device)))
    columns = {"text_column": text_column, "image_column": image_column, "id_column": id_column}
    side, corpus = open_side(encoder, data, side, split=split, limit=limit, on_error=on_error, **columns)
    how: dict[str, Any] = {"batch_size": batch_size, "dtype": dtype, "output": output, "autocast": autocast}
    how |= {"num_workers": num_workers, "on_error": on_error}
    notes = {"model": recorded_name(model), "kind": encoder.kind, "data": data}
    embeddings = embed_corpus(encoder.tower(side), corpus, out, **how, identity={"side": side}, notes=notes)
    report(embeddings, out)


def report(embeddings: Embeddings, out: str) -> None:
    """Say what was written, and on stderr how many samples were left out and why the first one was."""
    from dualenc import distributed

    if not distributed.is_main():
        return
    meta = embeddings.meta
    if meta["skipped"]:
        total, first = meta["skipped"] + len(embeddings), meta["first_skipped"][0]
        told = f"left out {meta['skipped']:,} of {total:,} items; the first, {first['id']}: {first['reason']}"
        print(printable(told), file=sys.stderr)
    print(printable(f"{len(embeddings):,} embeddings of dimension {embeddings.dim} ({meta['side']} side) → {out}"))
