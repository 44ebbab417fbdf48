"""Memory of embedding a corpus from disk: what grows with the number of texts, for each format.

    python eval/bench/embed_memory.py --texts 400000

Generated texts are written as jsonl, parquet, tar and BEIR folder, and embedded from there into a
folder by a tower that costs nothing, each in a process of its own, whole and a tenth of them. What
a process needs are its anonymous pages: those of mapped files count for nothing, the system drops
them when it needs room. Printed is the highest of all times it was looked at, and the bytes by
which each further text raises it.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import string
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli

FORMATS = ("jsonl", "parquet", "tar", "beir")


def texts(count: int, words: int) -> Iterator[dict[str, str]]:
    """Records of an id and of so many random words."""
    random.seed(0)
    vocabulary = [
        "".join(random.choices(string.ascii_lowercase, k=random.randint(2, 10)))
        for _ in range(5000)
    ]
    for number in range(count):
        yield {
            "_id": f"document-{number:09d}",
            "text": " ".join(random.choices(vocabulary, k=words)),
        }


def write(folder: Path, kind: str, count: int, words: int) -> Path:
    """Write the texts in one of the formats; where they are."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / f"{count}.{kind}"
    if kind == "parquet":
        rows = texts(count, words)
        block = pa.Table.from_pylist([next(rows)])
        with pq.ParquetWriter(path, block.schema) as writer:
            while block.num_rows:
                writer.write_table(block)
                block = pa.Table.from_pylist(
                    [row for _, row in zip(range(5000), rows)], schema=block.schema
                )
    elif kind == "tar":
        with tarfile.open(path, "w") as archive:
            for row in texts(count, words):
                member, data = tarfile.TarInfo(row["_id"] + ".txt"), row["text"].encode()
                member.size, archive.members = len(data), []  # type: ignore[attr-defined]
                archive.addfile(member, io.BytesIO(data))
    else:
        if kind == "beir":
            path.mkdir()
        with open(path / "corpus.jsonl" if kind == "beir" else path, "w") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in texts(count, words))
    return path


def anonymous() -> int:
    """Bytes of this process that are in no file."""
    status = Path("/proc/self/status").read_text()
    return (
        int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])
        << 10
    )


def measure(data: str, out: str, report: Any) -> None:
    """Embed; tell items, seconds and the highest memory."""
    import torch
    from torch import nn

    from dualenc.data import open_corpus
    from dualenc.encoders import Prepare, Tower
    from dualenc.search.embed.encode import embed

    class Lengths(Prepare):
        modality = "text"

        def __call__(self, items: Any, seeds: Any = None) -> dict[str, torch.Tensor]:
            return {"length": torch.tensor([[len(item)] for item in items], dtype=torch.float32)}

    class Trivial(Tower):
        modality, dim, feature_dim = "text", 64, 64

        def __init__(self) -> None:
            super().__init__()
            self.prepare, self.linear = Lengths(), nn.Linear(1, 64)

        def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            return nn.functional.normalize(self.linear(inputs["length"]), dim=-1)

    highest, ended = [anonymous()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            highest[0] = max(highest[0], anonymous())

    threading.Thread(target=watch, daemon=True).start()
    before, started = highest[0], time.monotonic()
    corpus = open_corpus(data, modality="text")
    opened = highest[0]
    embed(Trivial(), corpus, out, batch_size=256, progress=False)
    ended.set()
    report.put((len(corpus), time.monotonic() - started, before, opened, highest[0]))


def main(
    formats: list[str] = list(FORMATS),  # noqa: B006
    texts: int = 400_000,
    words: int = 120,
    folder: str | None = None,
) -> None:
    """Print the memory of each format.

    Args:
        formats: of jsonl, parquet, tar and beir.
        texts: how many; the smaller run has a tenth.
        words: of each text.
        folder: where to write the data; by default a temporary folder.
    """
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=folder) as name:
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        for kind in formats:
            peaks = []
            for count in (texts // 10, texts):
                data = write(Path(name), kind, count, words)
                report = spawn.Queue()
                process = spawn.Process(
                    target=measure, args=(str(data), f"{name}/{kind}-{count}", report)
                )
                process.start()
                items, seconds, before, opened, highest = report.get()
                process.join()
                size = (
                    sum(
                        file.stat().st_size
                        for file in (data.rglob("*") if data.is_dir() else [data])
                    )
                    >> 20
                )
                print(
                    f"{kind:>7}: {items:>9,} texts of {size:5,} MiB in {seconds:6.1f} s: "
                    f"{before / 2**20:6.0f} MiB at the start, {opened / 2**20:6.0f} when opened, "
                    f"{highest / 2**20:6.0f} at most",
                    flush=True,
                )
                peaks.append(highest)
            growth = (peaks[1] - peaks[0]) / (texts - texts // 10)
            print(f"{kind:>7}: {growth:.0f} bytes for each further text")


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
