"""`dualenc remove`: remove documents from an index."""

from __future__ import annotations

from dualenc.commands.output import print_line


def remove(index: str, ids: str) -> None:
    """Remove vectors from INDEX by id, with their columns, BM25 and whole texts.

    Args:
        index: folder of the index.
        ids: text file with one id per line.
    """
    # Imported here, as it brings faiss.
    from dualenc.workflows import change_index

    done = change_index.remove(index, ids)
    change = f"{done.num_changed:,} removed, now {done.num_vectors:,} vectors"
    print_line(f"{change} → {index}")
