"""What `dualenc embed` and `dualenc index` share: which side of a model encodes which data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import DualEncoder
    from dualenc.encoders.tower import Side


def open_side(
    encoder: DualEncoder,
    data: str,
    side: Side | None,
    *,
    split: str = "train",
    text_column: str | None = None,
    image_column: str | None = None,
    id_column: str | None = None,
    limit: int | None = None,
    on_error: Literal["skip", "raise"] = "skip",
) -> tuple[Side, Corpus]:
    """Open data and find the side of the model that encodes it.

    Args:
        encoder: the model.
        data: whatever `dualenc.data.sources.open_corpus` opens; the left side of a query-document model takes the
            queries of a BEIR folder.
        side: "left" or "right"; None takes the documents' side of a query-document model, and of an image-text
            model the side of the data's modality, images where there are both.
        split: passed on, as is the rest.

    Raises:
        DualencError: the data cannot be opened, or holds nothing that the side encodes.
    """
    from dualenc.data.sources import open_corpus

    modality = None
    if side is not None:
        modality = encoder.tower(side).modality
    elif text_column is None and encoder.kind != "image-text":
        modality = encoder.right.modality
    queries = side == "left" and encoder.kind == "query-document"
    corpus = open_corpus(
        data,
        part="queries" if queries else "corpus",
        modality=modality,
        text_column=text_column,
        image_column=image_column,
        id_column=id_column,
        split=split,
        limit=limit,
        on_error=on_error,
    )
    if side is None:
        side = "left" if encoder.left.modality == corpus.modality != encoder.right.modality else "right"
    return side, corpus


def recorded_name(model: str) -> str:
    """What to write down about a model so that it is found again: a folder's absolute path, or the name."""
    path = Path(model).expanduser()
    return str(path.resolve()) if path.is_dir() else model
