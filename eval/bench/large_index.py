"""An index of millions of vectors under a limit on memory: built, refined by a file, opened,
searched.

    python eval/bench/large_index.py --vectors 10000000 --dim 128 --limit 2GiB --folder /tmp/large

The vectors are synthetic, around as many centres as there are lists, and made in blocks. The limit
is RLIMIT_DATA: the kernel refuses more private memory (heap, stacks, private writable maps) to the
process; pages of mapped files do not count, since the kernel takes them back when it wants to. A
folder of embeddings that is there already is used again.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jsonargparse import auto_cli

from dualenc.search import Embeddings, Index
from dualenc.search.embed.writer import EmbeddingWriter
from dualenc.search.index.kinds import parse_bytes


class Numbered(Sequence[str]):
    """The ids d0, d1, …, which are never all in memory."""

    def __init__(self, count: int) -> None:
        self.rows = range(count)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: Any) -> Any:
        return [f"d{i}" for i in self.rows[row]] if isinstance(row, slice) else f"d{self.rows[row]}"


def block(rows: range, dim: int, centres: np.ndarray, seed: int) -> np.ndarray:
    """(n, D) unit vectors around the centres."""
    random = np.random.default_rng([seed, rows.start])
    vectors = centres[random.integers(0, len(centres), len(rows))]
    vectors = vectors + 0.9 * random.standard_normal((len(rows), dim), dtype=np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def private_mebibytes() -> tuple[int, int]:
    """Private memory of this process (RssAnon) now, and the most that was resident at once, mapped
    files included."""
    status = dict(
        line.split(":", 1)
        for line in Path("/proc/self/status").read_text().splitlines()
        if ":" in line
    )
    return int(status["RssAnon"].split()[0]) // 1024, int(status["VmHWM"].split()[0]) // 1024


def told(what: str, work: Callable[[], Any]) -> Any:
    """Do something; a line with its seconds, those of the processor, and the memory."""
    started, used = time.perf_counter(), time.process_time()
    result = work()
    seconds, used, (private, highest) = (
        time.perf_counter() - started,
        time.process_time() - used,
        private_mebibytes(),
    )
    print(
        f"{what:<34} {seconds:9.2f} s, of the processor {used:9.2f} s; private {private:5d} MiB, "
        f"most resident with mapped files {highest:5d} MiB",
        flush=True,
    )
    return result


def main(
    vectors: int = 10_000_000,
    dim: int = 128,
    centres: int = 20_000,
    limit: str = "2GiB",
    memory: str = "1GiB",
    factory: str = "auto",
    target_recall: float = 0.95,
    folder: str = "large",
) -> None:
    """Write embeddings, build an index of them, open it and search, under a limit.

    Args:
        vectors: N.
        dim: D.
        centres: that the vectors are around.
        limit: of RLIMIT_DATA.
        memory: that the build is told of.
        factory: FAISS factory string.
        target_recall: recall@10 to aim at.
        folder: for embeddings and index.
    """
    resource.setrlimit(resource.RLIMIT_DATA, (parse_bytes(limit), parse_bytes(limit)))
    around = np.random.default_rng(0).standard_normal((centres, dim), dtype=np.float32)
    place = Path(folder)
    print(
        f"{vectors:,} × {dim}, RLIMIT_DATA {limit}, memory {memory}; "
        f"before: {private_mebibytes()[0]} MiB private"
    )

    def write() -> None:
        writer = EmbeddingWriter(
            place / "emb", Numbered(vectors), dim, "float16", {"normalized": True}
        )
        for number in writer.unwritten():
            writer.write(number, block(writer.ranges[number], dim, around, 1))
        writer.finish()

    if not (place / "emb").exists():
        told("embeddings written", write)
    embeddings = told("embeddings opened", lambda: Embeddings.open(place / "emb"))
    queries = block(range(1000), dim, around, 2)
    how: dict[str, Any] = {"target_recall": target_recall, "recall_queries": 400}
    how |= {"queries": queries, "folder": place / "index", "memory": parse_bytes(memory)}
    told("index built and measured", lambda: Index.build(embeddings, None, factory, **how))
    index = told("index opened", lambda: Index.open(place / "index"))
    told("first search", lambda: index.search_rows(queries[:1]))
    told("1,000 searches in one call", lambda: index.search_rows(queries))
    told("row of an id", lambda: index.ids.rows([f"d{vectors - 1}"]))  # type: ignore[attr-defined]
    told("all files verified", lambda: Index.open(place / "index", verify=True))
    sizes = {path.name: path.stat().st_size for path in sorted((place / "index").iterdir())}
    print(
        "bytes per vector on disk:",
        {name: round(size / vectors, 2) for name, size in sizes.items()},
    )
    print(json.dumps(index.provenance.without(["files", "sizes"]).entries()))


if __name__ == "__main__":
    auto_cli(main)
