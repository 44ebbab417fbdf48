"""Where padding is stored on the left, vectors are those that the model's own library gives each
text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import DualEncoder, load_model
from dualenc.encoders.sentence_model import new_model

pytestmark = pytest.mark.slow
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ARCHITECTURES: dict[str, tuple[dict[str, Any], bool]] = {
    "bert": (SMALL, True),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, True),
    "roberta": (SMALL, False),
    "llama": (SMALL, False),
}
"""Sizes, and whether padding on the left moves positions."""


def pad_left(folder: Path) -> None:
    """Write the side of the padding into the files of a tokenizer."""
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"padding_side": "left"}))


def assert_alike(model: DualEncoder, texts: list[str], expected: torch.Tensor) -> None:
    """The right tower gives the expected vectors, whatever the batch size."""
    for size in (1, 2, len(texts)):
        found = torch.from_numpy(model.encode_document(texts, batch_size=size))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_texts_alone_in_sentence_transformers(
    architecture: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    sizes, moves = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    transformer = new_model({"model_type": architecture, **sizes}, tokenizer, torch.float32)[
        0
    ].model
    with torch.no_grad():
        for parameter in transformer.parameters():  # as they begin, biases are 0 and tell nothing
            parameter.add_(0.05 * torch.randn_like(parameter))
    transformer.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    pad_left(tmp_path / "theirs")
    theirs = SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    alone = torch.from_numpy(theirs.encode(texts, batch_size=1, normalize_embeddings=True))
    together = torch.from_numpy(
        theirs.encode(texts, batch_size=len(texts), normalize_embeddings=True)
    )
    assert (float((alone - together).abs().max()) > 0.01) == moves
    model = load_model(tmp_path / "theirs")
    assert_alike(model, texts, alone)
    model.save(tmp_path / "saved")
    assert_alike(load_model(tmp_path / "saved"), texts, alone)
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    torch.testing.assert_close(torch.from_numpy(again), alone, atol=1e-5, rtol=0)
