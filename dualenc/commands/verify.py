"""`dualenc verify`: compare every file of an index or of embeddings with its checksum."""

from __future__ import annotations

from dualenc.commands.output import print_line


def verify(folder: str) -> None:
    """Read every file of FOLDER, and compare it with its checksum.

    Args:
        folder: an index, with its BM25 and texts, or embeddings.
    """
    # Imported here, as it brings faiss.
    from dualenc.workflows import verify_folder

    done = verify_folder.verify(folder)
    size = f"{done.num_vectors:,} vectors, {done.num_bytes / 2**20:,.1f} MiB"
    print_line(f"{folder}: {size}, all files verified")
