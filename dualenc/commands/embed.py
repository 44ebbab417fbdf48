"""`dualenc embed`: embed a corpus with one side of a model."""

from __future__ import annotations

from typing import Literal

from dualenc.commands.options import EmbedOptions, SourceOptions
from dualenc.commands.output import print_line


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

    The same command resumes an interrupted run. Several processes on machines that share the folder
    (`sbatch --array=1-8`, `accelerate launch -m dualenc embed …`) share the work: each locks one
    shard after another.

    Args:
        model: model folder or name.
        data: BEIR folder, folder of images, csv / tsv / jsonl / parquet file, tars, or data set by
            hub name; for adapters a folder of embeddings, .npy file, or table with a column of
            vectors.
        out: folder to write: data-*.arrow, order.npy, meta.json.
        side: left (queries, images) or right (documents, texts); by default documents, or the side
            that encodes what the data holds.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    # Imported here: with torch at the top, `--help` would take seconds.
    from dualenc import distributed
    from dualenc.workflows import embed_corpus
    from dualenc.workflows.session import describe_embeddings

    embeddings = embed_corpus.embed(
        model, data, out=out, side=side, device=device, **vars(source), **vars(options)
    )
    # The processes share the folder, and each has opened all of it.
    if distributed.is_main():
        print_line(describe_embeddings(embeddings, out))
