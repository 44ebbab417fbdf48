"""Toy data for `--check`: small enough for seconds, with an answer that is known beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dualenc.encoders import TextEncoder, train_tokenizer

WORDS = tuple(f"word{number}" for number in range(50))
CLASSES = 4


def beir(folder: Path, documents: int = 60) -> Path:
    """Write a BEIR folder: each query is three words of its document, in train, dev and test."""
    draw = np.random.default_rng(0)
    texts = [draw.choice(WORDS, 12, replace=False).tolist() for _ in range(documents)]
    queries = {f"q{row}": " ".join(own[:3]) for row, own in enumerate(texts)}
    corpus = {f"c{row}": " ".join(own) for row, own in enumerate(texts)}
    pairs = [f"q{row}\tc{row}" for row in range(documents)]
    ends = documents * 6 // 10, documents * 8 // 10
    parts = {"train": pairs[: ends[0]], "dev": pairs[ends[0] : ends[1]], "test": pairs[ends[1] :]}
    write_beir(folder, queries, corpus, parts)
    return folder


def write_beir(
    folder: Path, queries: dict[str, str], corpus: dict[str, str], judged: dict[str, list[str]]
) -> None:
    """Write texts by id, and judgments of each part as "query<tab>document"."""
    (folder / "qrels").mkdir(parents=True, exist_ok=True)
    for name, texts in (("queries", queries), ("corpus", corpus)):
        rows = [json.dumps({"_id": own, "text": text}) + "\n" for own, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(rows), encoding="utf-8")
    for part, pairs in judged.items():
        lines = ["query-id\tcorpus-id\tscore", *(f"{pair}\t1" for pair in pairs), ""]
        (folder / "qrels" / f"{part}.tsv").write_text("\n".join(lines), encoding="utf-8")


def images(folder: Path, train: int = 24, test: int = 12, size: int = 16) -> Path:
    """Write train.parquet and test.parquet of images with labels: a class is a hue, plus noise."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("test", test)):
        labels = np.arange(count) % CLASSES
        rows = []
        for number, label in enumerate(labels.tolist()):
            pixels = draw.integers(0, 60, (size, size, 3)) + 180 * (np.arange(3) == label % 3)
            file = folder / f"{part}-{number}.png"
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file)
            rows.append({"image": {"bytes": file.read_bytes()}, "label": label})
            file.unlink()
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{part}.parquet")
    return folder


def text_model(folder: Path, hidden_size: int = 32) -> Path:
    """Write a one-layer text model with random weights and a tokenizer of the toy words."""
    torch.manual_seed(0)
    config = {
        "model_type": "bert",
        "hidden_size": hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }
    tokenizer = train_tokenizer([" ".join(WORDS)], 300, max_length=64)
    TextEncoder(config=config, tokenizer=tokenizer, max_length=64).save(folder)
    return folder
