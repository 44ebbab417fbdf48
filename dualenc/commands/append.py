"""`dualenc append`: append documents to an index."""

from __future__ import annotations

from typing import Literal

from cyclopts.types import PositiveInt

from dualenc.commands.options import BatchSize, SourceOptions, refuse_together
from dualenc.commands.output import print_line


def append(
    index: str,
    source: str,
    data: str | None = None,
    *,
    dim: PositiveInt | None = None,
    bm25: bool = False,
    texts: bool = False,
    side: Literal["left", "right"] | None = None,
    items: SourceOptions,
    batch_size: BatchSize = 32,
    device: str | None = None,
) -> None:
    """Append vectors with new ids to INDEX, from EMBEDDINGS or from MODEL and DATA.

    With MODEL and DATA the vectors are cut to the dimension of the index, and the columns that it
    filters by are read too. BM25 and whole texts of the index follow.

    Args:
        index: folder of the index.
        source: folder of embeddings, model folder or name.
        data: data to embed with a model: BEIR folder, folder of images, table, tars, or hub name.
        dim: number of components of the vectors to take; by default those of the index.
        bm25: fail unless the index has BM25.
        texts: fail unless the index has whole texts.
        side: side of the model, left or right; by default documents, or the side that encodes what
            the data holds.
        batch_size: items per forward pass.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    # Before the imports below: this mistake is reported at once.
    if data is None:
        refuse_together("EMBEDDINGS without DATA", {"--side": side})
    from dualenc import distributed
    from dualenc.workflows import change_index

    done = change_index.append(
        index,
        source,
        data,
        dim=dim,
        bm25=bm25,
        texts=texts,
        side=side,
        batch_size=batch_size,
        device=device,
        **vars(items),
    )
    if not distributed.is_main():
        return
    # Repeating the command after a kill is right, and must not look like a second append.
    if done.was_done:
        print_line(f"these vectors were appended before a process was killed → {index}")
    else:
        change = f"{done.num_changed:,} vectors appended, now {done.num_vectors:,}"
        print_line(f"{change} → {index}")
