"""Small models and data on disk, for the evaluation commands: random weights, seconds to run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import ImageTextEncoder, TextEncoder, train_tokenizer
from tests.helpers.image_models import HUES, picture

WORDS = (
    "wing",
    "flow",
    "shock",
    "heat",
    "plate",
    "layer",
    "slip",
    "stream",
    "cone",
    "drag",
    "lift",
    "jet",
)
ANIMALS = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen")


def write_beir(
    folder: Path, documents: int = 40, queries: int = 8, split: str = "test", seed: int = 0
) -> Path:
    """A collection in which a query is a part of its relevant document; ids of queries and
    documents overlap."""
    generator = np.random.default_rng(seed)
    texts = [" ".join(generator.choice(WORDS, 6)) for _ in range(documents)]
    (folder / "qrels").mkdir(parents=True)
    rows = [{"_id": f"d{i}", "title": f"title {i}", "text": text} for i, text in enumerate(texts)]
    _write_lines(folder / "corpus.jsonl", rows)
    # Not the documents with the ids of queries: unjudged, they are removed as copies of the
    # queries.
    chosen = (queries + generator.choice(documents - queries, queries, replace=False)).tolist()
    parts = [" ".join(texts[document].split()[:5]) for document in chosen]
    _write_lines(
        folder / "queries.jsonl", [{"_id": f"d{i}", "text": part} for i, part in enumerate(parts)]
    )
    lines = [f"d{i}\td{document}\t1" for i, document in enumerate(chosen)]
    (folder / "qrels" / f"{split}.tsv").write_text(
        "\n".join(["query-id\tcorpus-id\tscore", *lines]) + "\n"
    )
    return folder


def texts(count: int) -> list[str]:
    """Lines of 3 to 12 animals."""
    random = np.random.default_rng(0)
    return [" ".join(random.choice(ANIMALS, size=random.integers(3, 13))) for _ in range(count)]


def filterable_documents() -> list[dict[str, Any]]:
    """60 texts with years, languages, weights and truth values."""
    rows = []
    for i, text in enumerate(texts(60)):
        row = {
            "_id": f"d{i}",
            "text": text,
            "year": 2000 + i % 7,
            "lang": ("en", "de", None)[i % 3],
            "weight": i / 4,
        }
        rows.append(row | {"open": i % 5 == 0})
    return rows


def save_documents(path: Path, count: int) -> list[str]:
    """A jsonl table with columns _id and text."""
    _write_lines(path, [{"_id": f"d{i}", "text": text} for i, text in enumerate(texts(count))])
    return texts(count)


def save_images(folder: Path, count: int) -> list[Image.Image]:
    """A folder of noise."""
    folder.mkdir()
    images = []
    for i in range(count):
        pixels = np.random.default_rng(i).integers(0, 255, (40, 40, 3), np.uint8)
        images.append(Image.fromarray(pixels))
        images[-1].save(folder / f"{i:02d}.png")
    return images


def write_captioned(folder: Path, images: int = 6) -> Path:
    """Pictures of one colour, two captions each; the first caption of every other picture is the
    same."""
    (folder / "pictures").mkdir(parents=True)
    names = list(HUES)
    rows = []
    for number in range(images):
        colour = names[number % len(names)]
        picture(HUES[colour], number).save(folder / "pictures" / f"{number}.png")
        captions = [
            "a plain picture" if number % 2 else f"picture {number}",
            f"{colour} number {number}",
        ]
        rows.append({"image": f"pictures/{number}.png", "captions": captions})
    _write_lines(folder / "test.jsonl", rows)
    return folder


def text_model(folder: Path, seed: int = 0, dim: int = 32) -> Path:
    """A query-document model with random weights, as a model folder; queries and documents differ
    by their prompts."""
    torch.manual_seed(seed)
    sizes = {
        "hidden_size": dim,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = {"model_type": "bert", "max_position_embeddings": 64, **sizes}
    prompts = {"query_prompt": "query: ", "document_prompt": "passage: "}
    TextEncoder(config=config, tokenizer=_tokenizer(), max_length=64, **prompts).save(folder)
    return folder


def image_text_model(folder: Path, seed: int = 0) -> Path:
    """An image-text model with random weights, as a model folder."""
    torch.manual_seed(seed)
    tokenizer = _tokenizer()
    config = {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 32,
            "layers": 1,
            "width": 32,
            "head_width": 16,
            "patch_size": 16,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": len(tokenizer),
            "width": 32,
            "heads": 2,
            "layers": 1,
        },
    }
    ImageTextEncoder(config=config, tokenizer=tokenizer).save(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerBase:
    animals = [" ".join(ANIMALS), "query: passage: "] * 5
    words = [
        " ".join(WORDS),
        "title picture plain number a of the photo",
        " ".join(HUES),
        "0 1 2 3 4 5 6 7 8 9",
    ]
    return train_tokenizer([*words, *animals], 400, max_length=64, min_frequency=1)


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
