"""Small random models and data, written to disk as a user has them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dualenc.encoders import DualEncoder, ImageTextEncoder, TextEncoder, train_tokenizer

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]


def texts(count: int) -> list[str]:
    """Lines of 3 to 12 words."""
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, size=random.integers(3, 13))) for _ in range(count)]


def save_text_model(folder: Path) -> DualEncoder:
    """Queries and documents differ by their prompts."""
    torch.manual_seed(0)
    bert = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
    }
    tokenizer = train_tokenizer(texts(50) + ["query: ", "passage: "] * 5, 300)
    model = TextEncoder(config=bert, tokenizer=tokenizer, query_prompt="query: ", document_prompt="passage: ")
    model.save(folder)
    return model


def save_image_text_model(folder: Path) -> DualEncoder:
    """A CLIP for 32 x 32 pixels."""
    torch.manual_seed(0)
    clip = {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": 1, "width": 32, "head_width": 16, "patch_size": 16},
        "text_cfg": {"context_length": 20, "width": 32, "heads": 2, "layers": 1, "vocab_size": 49408},
    }
    model = ImageTextEncoder(config=clip)
    model.save(folder)
    return model


def save_documents(path: Path, count: int) -> list[str]:
    """A jsonl table with columns _id and text."""
    lines = [json.dumps({"_id": f"d{i}", "text": text}) for i, text in enumerate(texts(count))]
    path.write_text("\n".join(lines) + "\n")
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
