"""Embedding: is it faster than `SentenceTransformer.encode`, and what does it need beside a model?

python eval/bench/embedding.py throughput
python eval/bench/embedding.py memory --texts 400000    # what grows with the number of texts
python eval/bench/embedding.py corruption PATH_TO_CIFAR10/test.parquet --size 32
python eval/bench/embedding.py corruption PATH_TO_TINY_IMAGENET/val.parquet --size 64
"""

from __future__ import annotations

import io
import json
import os
import random
import sys
import tarfile
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import toys
from frame import command_line
from in_turn import in_new_process, in_turn, memory_of_process, rows_of
from tasks import default_model

from dualenc.data import Corpus, open_corpus
from dualenc.data.readers.detect import default_split
from dualenc.encoders import ImageEncoder, Prepare, VectorEncoder, load_model
from dualenc.evaluation import corrupted
from dualenc.evaluation.corruptions import ALL, CleanImages, GeneratedCorruptions
from dualenc.evaluation.report_page import Table, print_table
from dualenc.search.embed.encode import embed
from dualenc.workflows.labeled_images import random_rows
from dualenc.workflows.run_quickstart import read_docstrings

FORMATS = ("jsonl", "parquet", "tar", "beir")


def throughput(texts: int = 400, model: str | None = None) -> None:
    """Compare times for docstrings of this machine, short and long; vectors must agree to 1e-4."""
    from sentence_transformers import SentenceTransformer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    path = model or default_model()
    tower = load_model(path, device="cpu").tower("right")
    encode = SentenceTransformer(path, device="cpu").encode
    found = read_docstrings(texts)
    kinds = {"summaries": [each.summary for each in found]}
    kinds["documents"] = [f"{each.name}: {each.rest}" for each in found]
    for name, items in kinds.items():
        corpus = Corpus([str(number) for number in range(len(items))], items)
        runs = {
            "dualenc": partial(embed, tower, corpus, batch_size=32, progress=False),
            "encode": partial(encode, items, batch_size=32, show_progress_bar=False),
        }
        times, vectors = in_turn(runs, repeats=3, warm_up=1)
        np.testing.assert_allclose(vectors["dualenc"].vectors, vectors["encode"], atol=1e-4)
        print_table(Table(f"{len(items)} {name}", rows_of(times)))


def memory(texts: int = 400_000) -> None:
    """Embed all texts and a tenth of them from disk, each in a process of its own.

    A process needs its anonymous pages. Those of mapped files count for nothing: the system drops
    them to make room.
    """
    rows = []
    with tempfile.TemporaryDirectory() as name:
        os.environ["HF_DATASETS_CACHE"] = f"{name}/cache"
        for kind in FORMATS:
            peaks = []
            for count in (texts // 10, texts):
                data = write_texts(Path(name), kind, count)
                work = (embed_and_watch, str(data), f"{name}/{kind}-{count}")
                start, highest = in_new_process(*work)
                peaks.append(highest)
            files = data.rglob("*") if data.is_dir() else [data]
            row = {"format": kind, "MiB": sum(file.stat().st_size for file in files) / 2**20}
            growth = 2**20 * (peaks[1] - peaks[0]) / (texts - texts // 10)
            rows.append({**row, "start": start, "at most": highest, "bytes per text": growth})
    print_table(Table(f"MiB with {texts:,} texts, and bytes for each further text", rows))


def write_texts(folder: Path, kind: str, count: int) -> Path:
    """Write random texts of 120 words in one of the formats, and return where they are."""
    draw = random.Random(0)
    vocabulary = [draw.randbytes(draw.randint(1, 5)).hex() for _ in range(5000)]
    rows = [
        {"_id": f"document-{number:09d}", "text": " ".join(draw.choices(vocabulary, k=120))}
        for number in range(count)
    ]
    path = folder / f"{count}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=5000)
    elif kind == "tar":
        with tarfile.open(path, "w") as archive:
            for row in rows:
                member, content = tarfile.TarInfo(row["_id"] + ".txt"), row["text"].encode()
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    else:
        file = path / "corpus.jsonl" if kind == "beir" else path
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Lengths(Prepare):
    """Turn texts into vectors at no cost."""

    modality = "text"

    def __call__(self, items: Any, seeds: Any = None) -> dict[str, torch.Tensor]:
        lengths = torch.tensor([[len(item)] for item in items], dtype=torch.float32)
        return {"vector": lengths.expand(-1, 64)}


def embed_and_watch(data: str, out: str) -> tuple[float, float]:
    """Embed, and return the MiB of this process at the start and at most."""
    tower = VectorEncoder(64, tower="identity").left
    tower.modality, tower.prepare = "text", Lengths()
    seen, ended = [memory_of_process()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            seen.append(memory_of_process())

    threading.Thread(target=watch, daemon=True).start()
    embed(tower, open_corpus(data, modality="text"), out, batch_size=256, progress=False)
    ended.set()
    return seen[0], max(seen)


def corruption(data: str, size: int = 32, images: int = 300, num_workers: int = 2) -> float:
    """Time corrupted-image retrieval without the encoder, on images at random; return top-1.

    As in `dualenc evaluate corrupted`, images are corrupted in 19 ways, and each version is
    augmented twice and searched for among the others. A random projection of the pixels encodes.
    """
    corpus = open_corpus(data, modality="image", split=default_split(data))
    chosen = corpus.take(random_rows(len(corpus), images, seed=0))
    source = GeneratedCorruptions(CleanImages(chosen.items), ALL)
    prepare = corrupted.SimCLRPrepare(ImageEncoder(image_size=size).left.prepare)
    versions = corrupted.ImageVersions(source, [(name, 1) for name in ALL], prepare, views=2)
    projection = np.random.default_rng(0).normal(size=(3 * size * size, 64)).astype(np.float32)
    begun = time.perf_counter()
    found = corrupted.measure_versions(
        versions,
        lambda inputs: inputs["image"].flatten(1).numpy() @ projection,
        lambda _, features: corrupted.nearest_versions(features),
        range(len(source)),
        num_workers=num_workers,
    )
    each = (time.perf_counter() - begun) / len(source)
    top1 = corrupted.summarize_nearest(found, ALL)["top1"]
    print(f"{len(source)} images of {size} pixels, {num_workers} workers; top-1 {top1:.3f}")
    print(f"{1000 * each:.1f} ms per image, {10_000 * each / 60:.1f} minutes for 10,000 images")
    return top1


def check(folder: Path) -> None:
    """Embed docstrings with a toy model, a few texts from disk, and toy images."""
    throughput(texts=8, model=str(toys.text_model(folder / "model")))
    for kind in FORMATS:
        data = write_texts(folder, kind, 50)
        start, highest = embed_and_watch(str(data), str(folder / f"out-{kind}"))
        assert 100 < start <= highest
    images = toys.images(folder / "images", test=1, size=32)
    assert 0 <= corruption(str(images / "test.parquet"), images=1, num_workers=0) <= 1


if __name__ == "__main__":
    command_line(throughput, memory, corruption, check=check)
