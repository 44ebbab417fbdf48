"""`dualenc push`: embeddings into a collection of Qdrant."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from dualenc.errors import DualencError
from dualenc.files import check_writable, locked
from dualenc.terminal import printable


def push(
    embeddings: str,
    target: str,
    *,
    out: str | None = None,
    collection: str | None = None,
    metric: Literal["cosine", "ip"] | None = None,
    replace: bool = False,
) -> None:
    """Send embeddings to a collection of Qdrant.

    The same command resumes an interrupted push, and sends only what is missing. OUT remembers where the
    vectors are, for `dualenc search OUT …`. The key of a server comes from the environment variable QDRANT_API_KEY.

    Args:
        embeddings: folder that `dualenc embed` wrote.
        target: the URL of a server, or a folder for Qdrant's embedded mode, whose files can run code: name only a new
            one, or one that you trust.
        out: folder to write, with where the vectors are; by default EMBEDDINGS-engine.
        collection: its name; by default that of the folder of embeddings.
        metric: cosine, or ip for the inner product; by default cosine for embeddings of length one, ip for others.
        replace: first remove a collection that holds other embeddings.
    """
    from dualenc.data.vector_shards import Embeddings
    from dualenc.search.qdrant import check_push_target, is_server, push_embeddings

    folder = Path(out or f"{embeddings.rstrip('/')}-engine")
    if not target or folder.resolve() == Path(target).resolve():
        raise DualencError(f"TARGET is {target!r}; name a folder other than --out, or a URL")
    check_push_target(folder)
    check_writable(folder)
    source = Path(embeddings).resolve()
    name = collection or re.sub(r"[^A-Za-z0-9_-]+", "-", source.name).strip("-_") or "embeddings"
    opened = Embeddings.open(embeddings)
    with locked(folder, wait=False):
        index, sent = push_embeddings(opened, target, name, metric=metric, replace=replace, progress=True)
        index.close()
        index.meta["embeddings"] = str(source)
        index.save(folder)
    vectors = f"{len(index):,} vectors of dimension {index.dim} ({index.meta['metric']})"
    print(printable(f"{vectors} → {index.location}; {sent:,} sent"))
    store = "" if is_server(target) else f" --qdrant-path {target}"
    print(printable(f'next: dualenc search {folder} "…"{store}'))
