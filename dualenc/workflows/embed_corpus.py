"""Embed a corpus with one side of a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

from dualenc.data import Corpus
from dualenc.data.readers.sources import open_corpus
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, Tower, load_model
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.errors import DualencError
from dualenc.io.cpus import usable_workers
from dualenc.search.embed.encode import embed as encode_corpus
from dualenc.search.embed.writer import check_embeddings_target
from dualenc.types import Modality, OnError, Output, Side, StrPath
from dualenc.workflows.recorded_options import ReadOptions, to_record
from dualenc.workflows.session import recorded_name, report_skipped, start_processes

QUERY_KINDS = ("query-document", "vector", "query-index")
"""Kinds of models whose left side encodes queries."""


def embed(
    model: str,
    data: str,
    *,
    out: StrPath,
    side: Side | None = None,
    batch_size: int = 32,
    dtype: Literal["float16", "float32"] = "float32",
    output: Output = "embedding",
    dim: int | None = None,
    autocast: Literal["bfloat16", "float16"] | None = None,
    num_workers: int | None = None,
    on_error: OnError = "skip",
    device: str | None = None,
    progress: bool = True,
    **reading: Unpack[ReadOptions],
) -> Embeddings:
    """Embed a corpus with one side of a model, into a folder of Arrow files.

    The same call resumes an interrupted run. Several processes that see `out` share the work.

        from dualenc import embed

        embeddings = embed("runs/mine/model", "papers.csv", out="embeddings")
        print(len(embeddings), embeddings.dim)

    Args:
        model: model folder or name.
        data: BEIR folder, folder of images, csv / tsv / jsonl / parquet file, tars, or name of a
            data set on the hub; for adapters a folder of embeddings, an .npy file, or a table with
            a column of vectors.
        out: folder to write.
        side: "left" (queries, images) or "right" (documents, texts); None takes documents, or the
            side that encodes what the data holds.
        batch_size: number of items per forward pass.
        dtype: precision of the stored vectors.
        output: "embedding" for unit vectors, "features" for those that probes use.
        dim: number of components to keep, for models trained with `Matryoshka`; None keeps all.
        autocast: precision of the forward passes; None is that of the weights.
        num_workers: number of processes that decode images; None chooses.
        on_error: "skip" leaves out and counts bad samples, "raise" stops at the first.
        device: name of the device, such as "cpu" or "cuda:0"; None takes a GPU if there is one.
        progress: show a progress bar.
        reading: how the data is read, see `dualenc.workflows.recorded_options.ReadOptions`.

    Returns:
        The embeddings of the N usable items, mapped from `out`; `provenance.skipped` counts the
        rest.

    Raises:
        DualencError: model, data or options do not fit together, or `out` holds other embeddings.
    """
    # Before the model is loaded, which takes longer.
    check_embeddings_target(Path(out))
    job = open_job(
        model,
        data,
        side,
        device,
        reading,
        batch_size=batch_size,
        dtype=dtype,
        output=output,
        dim=dim,
        autocast=autocast,
        num_workers=num_workers if num_workers is None else usable_workers(num_workers),
        on_error=on_error,
    )
    # Part of the identity: a run with the other side must not resume this one.
    identity = {"side": job.side}
    embeddings = encode_corpus(
        job.tower, job.corpus, out, identity=identity, progress=progress, **job.settings
    )
    report_skipped(embeddings)
    return embeddings


class EmbeddingJob(NamedTuple):
    """A corpus to embed and the tower of one side.

    `settings` are further arguments of `dualenc.search.embed.encode.embed`.
    """

    tower: Tower
    corpus: Corpus
    side: Side
    settings: dict[str, Any]


def open_job(
    model: str,
    data: str,
    side: Side | None,
    device: str | None,
    reading: ReadOptions,
    **settings: Any,
) -> EmbeddingJob:
    """Open the model and the data, and choose the side to embed with if `side` is None.

    Args:
        model: model folder or name.
        data: source of the items.
        side: side of the model, or None.
        device: name of the device, or None.
        reading: how the data is read.
        settings: further arguments of `dualenc.search.embed.encode.embed`.
    """
    encoder = load_model(model, device=str(start_processes(device)))
    if isinstance(encoder, IndexEncoder) and side != "left":
        made_by = encoder.documents.model or "the model of the index"
        raise DualencError(
            "documents are the vectors of the index",
            fix=f"embed new ones with {made_by}, queries with --side left",
            where=model,
        )
    options: dict[str, Any] = {**reading, "columns": reading.get("columns") or ()}
    takes_queries = side == "left" and encoder.kind in QUERY_KINDS
    corpus = open_corpus(
        data,
        part="queries" if takes_queries else "corpus",
        modality=_expected_modality(encoder, side, reading),
        on_error=settings.get("on_error", "skip"),
        **options,
    )
    # Only a model whose sides differ in modality can take the left one by the data.
    if side is None:
        is_left = encoder.left.modality == corpus.modality != encoder.right.modality
        side = "left" if is_left else "right"
    notes = {
        "model": recorded_name(model),
        "kind": encoder.kind,
        "data": recorded_name(os.fspath(data)),
        "read": to_record(reading),
    }
    return EmbeddingJob(encoder.tower(side), corpus, side, {**settings, "notes": notes})


def _expected_modality(
    encoder: DualEncoder, side: Side | None, reading: ReadOptions
) -> Modality | None:
    """Return what the data must hold; None if images and texts both fit the model."""
    if side is not None:
        return encoder.tower(side).modality
    # A text column, or a model with a side for images and one for texts, leaves it to the data.
    if reading.get("text_column") is None and encoder.kind != "image-text":
        return encoder.right.modality
    return None
