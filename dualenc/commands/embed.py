"""`dualenc embed`: a corpus with one side of a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from dualenc.commands.checks import MAX_ITEMS, MAX_WORKERS, check_options
from dualenc.commands.options import SOURCE, EmbedOptions, SourceOptions
from dualenc.errors import DualencError
from dualenc.terminal import printable


def embed(
    model: str,
    data: str,
    *,
    out: str,
    side: Literal["left", "right"] | None = None,
    source: SourceOptions = SOURCE,
    options: EmbedOptions,
    device: str | None = None,
    replace: Annotated[bool, Parameter(parse=False)] = False,
) -> None:
    """Embed a corpus with one side of a model, into a folder of Arrow files.

    The same command resumes an interrupted run. Started several times, on machines that share the folder
    (`sbatch --array=1-8`, `accelerate launch -m dualenc embed …`), it shares the work: each process locks one shard
    after the other.

    Args:
        model: model folder or name.
        data: BEIR folder, folder of images, csv / tsv / jsonl / parquet file, tars, or data set by hub name; for
            adapters a folder of embeddings, .npy file, or table with a column of vectors.
        out: folder to write: data-*.arrow, order.npy, meta.json.
        side: left (queries, images) or right (documents, texts); by default documents, or whatever the data holds.
        device: such as cpu or cuda:0; by default a GPU if there is one.
        replace: other embeddings in `out`; only for a folder that no other process writes.
    """
    from dualenc import distributed
    from dualenc.commands.output import embed_into, recorded_name, start_processes
    from dualenc.data.sources import open_corpus
    from dualenc.encoders import load_model
    from dualenc.encoders.frozen import IndexEncoder
    from dualenc.search.embed import embed as embed_corpus
    from dualenc.search.embeddings import check_embeddings_target

    check_options(1, MAX_ITEMS, batch_size=options.batch_size)
    check_options(1, sys.maxsize, dim=options.dim)
    check_options(0, MAX_WORKERS, num_workers=options.num_workers)
    check_embeddings_target(Path(out))
    encoder = load_model(model, device=str(start_processes(device)))
    if isinstance(encoder, IndexEncoder) and side != "left":
        made_by = encoder.documents["model"] or "the model of the index"
        problem = "documents are the vectors of the index"
        raise DualencError(f"{model}: {problem}; embed new ones with {made_by}, queries with --side left")
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
        side = "left" if encoder.left.modality == corpus.modality != encoder.right.modality else "right"
    notes: dict[str, Any] = {"model": recorded_name(model), "kind": encoder.kind}
    notes |= {"data": recorded_name(data), "read": source.given()}
    tower, settings = encoder.tower(side), {**vars(options), "notes": notes}
    if replace:
        embeddings = embed_into(Path(out), tower, corpus, side=side, **settings)
    else:
        embeddings = embed_corpus(tower, corpus, out, identity={"side": side}, **settings)
    if distributed.is_main():
        skipped = embeddings.meta["skipped"]
        if skipped:
            first = embeddings.meta["first_skipped"][0]
            summary = f"left out {skipped:,} of {skipped + len(embeddings):,} items"
            print(printable(f"{summary}; the first, {first['id']}: {first['reason']}"), file=sys.stderr)
        made = f"{len(embeddings):,} embeddings of dimension {embeddings.dim} ({side} side)"
        print(printable(f"{made} → {out}"))
