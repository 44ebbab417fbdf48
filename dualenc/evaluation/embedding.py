"""Embeddings below an evaluation's output, from which an interrupted evaluation resumes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc import distributed
from dualenc.data.embeddings import Embeddings, is_embeddings
from dualenc.data.identity import digest_of
from dualenc.files import check_folder_target, remove
from dualenc.reading import read_json_object
from dualenc.search.embed import embed, tower_checksum

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Tower
    from dualenc.types import Side


def embed_into(
    folder: Path,
    tower: Tower,
    corpus: Corpus,
    *,
    side: Side | None = None,
    model: str = "",
    **how: Any,
) -> Embeddings:
    """Embed into a folder below an evaluation's output; embeddings of another model or other data are replaced.

    Finished shards of an interrupted run are kept where the checksums of weights and items are the same.

    `side` and `model`, as the user calls it, are for the record; `how` are arguments of `dualenc.search.embed.embed`.
    """
    # Changed items under the same ids are noticed by `embed` itself.
    identity = ({} if side is None else {"side": side}) | {"ids": digest_of(corpus.ids)}
    if distributed.is_main():
        check_folder_target(folder, is_embeddings, "embeddings")
        meta = read_json_object(folder / "meta.json") if (folder / "meta.json").is_file() else {}
        expected = {**identity, "model_checksum": tower_checksum(tower)}
        if any(meta.get(name) != value for name, value in expected.items()):
            remove(folder)
    distributed.barrier()
    how |= {"identity": identity, "notes": {"model": model} if model else None}
    return embed(tower, corpus, folder, progress=distributed.is_main(), **how)
