"""`dualenc embed`: a corpus with one side of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from dualenc.commands.options import EmbedOptions, SourceOptions
from dualenc.errors import DualencError
from dualenc.io.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.data.store.vector_shards import Embeddings
    from dualenc.encoders import Tower


def embed(
    model: str,
    data: str,
    *,
    out: str,
    side: Literal["left", "right"] | None = None,
    source: SourceOptions,
    options: EmbedOptions,
    device: str | None = None,
) -> None:
    """Embed a corpus with one side of a model, into a folder of Arrow files.

    The same command resumes an interrupted run. Started several times, on machines that share the
    folder (`sbatch --array=1-8`, `accelerate launch -m dualenc embed …`), it shares the work: each
    process locks one shard after the other.

    Args:
        model: model folder or name.
        data: BEIR folder, folder of images, csv / tsv / jsonl / parquet file, tars, or data set by
            hub name; for adapters a folder of embeddings, .npy file, or table with a column of
            vectors.
        out: folder to write: data-*.arrow, order.npy, meta.json.
        side: left (queries, images) or right (documents, texts); by default documents, or whatever
            the data holds.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc.search.embed.encode import embed as embed_corpus
    from dualenc.search.embed.writer import check_embeddings_target

    check_embeddings_target(Path(out))
    work = open_work(model, data, side, source, options, device)
    describe(
        embed_corpus(work.tower, work.corpus, out, identity={"side": work.side}, **work.settings),
        out,
    )


class Work(NamedTuple):
    """What a command embeds: a corpus, with the tower of one side, and `settings` of
    `dualenc.search.embed.encode.embed`."""

    tower: Tower
    corpus: Corpus
    side: Literal["left", "right"]
    settings: dict[str, Any]


def open_work(
    model: str,
    data: str,
    side: Literal["left", "right"] | None,
    source: SourceOptions,
    options: EmbedOptions,
    device: str | None,
) -> Work:
    """Open model and data, whose kinds say which side it is where `side` does not."""
    from dualenc.data.readers.sources import open_corpus
    from dualenc.encoders import load_model
    from dualenc.encoders.index_encoder import IndexEncoder
    from dualenc.workflows.session import recorded_name, start_processes

    encoder = load_model(model, device=str(start_processes(device)))
    if isinstance(encoder, IndexEncoder) and side != "left":
        made_by = encoder.documents["model"] or "the model of the index"
        problem = "documents are the vectors of the index"
        raise DualencError(
            f"{model}: {problem}; embed new ones with {made_by}, queries with --side left"
        )
    modality = None
    if side is not None:
        modality = encoder.tower(side).modality
    elif source.text_column is None and encoder.kind != "image-text":
        modality = encoder.right.modality
    takes_queries = side == "left" and encoder.kind in ("query-document", "vector", "query-index")
    columns = dict(vars(source), columns=source.columns or ())
    part = "queries" if takes_queries else "corpus"
    corpus = open_corpus(data, part=part, modality=modality, on_error=options.on_error, **columns)
    if side is None:
        side = (
            "left"
            if encoder.left.modality == corpus.modality != encoder.right.modality
            else "right"
        )
    notes: dict[str, Any] = {"model": recorded_name(model), "kind": encoder.kind}
    notes |= {"data": recorded_name(data), "read": source.given()}
    return Work(encoder.tower(side), corpus, side, {**vars(options), "notes": notes})


def describe(embeddings: Embeddings, folder: str | Path) -> None:
    """Print what was embedded, and what was left out."""
    from dualenc import distributed
    from dualenc.workflows.session import report_skipped

    report_skipped(embeddings)
    if distributed.is_main():
        made = f"{len(embeddings):,} embeddings of dimension {embeddings.dim} ({embeddings.meta['side']} side)"
        print(printable(f"{made} → {folder}"))
