"""Whichever side the padding is stored on, vectors are those that the model's own library gives each text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from dualenc.encoders import DualEncoder, load_model
from dualenc.encoders.dual import chunk_rows, take
from dualenc.encoders.text import new_transformer
from tests.encoders.test_vision_text import make

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
STORED: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {"tokenizer_config.json": "left"},
    "on the right": {"tokenizer.json": "Right", "tokenizer_config.json": "right"},
}


def store_padding(folder: Path, stored: str) -> None:
    """Write the side of the padding into the files of a tokenizer, as `STORED` says."""
    sides = STORED[stored]
    files = {name: json.loads((folder / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json")}
    files["tokenizer_config.json"].pop("padding_side", None)
    if side := sides.get("tokenizer_config.json"):
        files["tokenizer_config.json"]["padding_side"] = side
    if side := sides.get("tokenizer.json"):
        pads = {token["content"]: token["id"] for token in files["tokenizer.json"]["added_tokens"]}
        files["tokenizer.json"]["padding"] = {
            "strategy": "BatchLongest",
            "direction": side,
            "pad_to_multiple_of": None,
            "pad_id": pads["[PAD]"],
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


def move(module: torch.nn.Module) -> None:
    """Weights that tell: as they begin, biases are 0."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


@torch.no_grad()
def in_batches(model: DualEncoder, texts: list[str], size: int) -> torch.Tensor:
    """The right tower's vectors of texts that are encoded `size` at once, of one prepared batch."""
    inputs = model.right.prepare(texts)
    vectors = torch.empty(len(texts), model.dim)
    for rows in chunk_rows(inputs, size):
        vectors[rows] = model("right", take(inputs, rows))
    return vectors


def alike(model: DualEncoder, texts: list[str], expected: torch.Tensor) -> bool:
    together = model("right", model.right.prepare(texts)).detach()
    found = [together, *(in_batches(model, texts, size) for size in (1, 2, len(texts)))]
    return all(bool((one - expected).abs().max() < 1e-5) for one in found)


ARCHITECTURES: dict[str, tuple[dict[str, Any], bool]] = {
    "bert": (SMALL, True),
    "gpt2": ({"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}, True),
    "distilbert": ({"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, True),
    "roberta": (SMALL, False),
    "llama": (SMALL, False),
}
"""Sizes, and whether padding on the left moves positions."""


@pytest.mark.slow
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_text_vectors_are_those_of_sentence_transformers_for_each_text_alone(
    architecture: str, stored: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    sizes, moves = ARCHITECTURES[architecture]
    torch.manual_seed(0)
    transformer = new_transformer({"model_type": architecture, **sizes}, tokenizer)
    move(transformer)
    transformer.save_pretrained(tmp_path / "theirs")
    tokenizer.save_pretrained(tmp_path / "theirs")
    store_padding(tmp_path / "theirs", stored)
    theirs = SentenceTransformer(str(tmp_path / "theirs"), device="cpu")
    alone, together = (
        torch.from_numpy(theirs.encode(texts, batch_size=size, normalize_embeddings=True)) for size in (1, len(texts))
    )
    moved = float((alone - together).abs().max())
    assert moved > 0.01 if moves and stored != "on the right" else moved < 1e-5  # what theirs makes of a batch
    model = load_model(tmp_path / "theirs")
    assert alike(model, texts, alone)
    model.save(tmp_path / "saved")
    assert alike(load_model(tmp_path / "saved"), texts, alone)
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    assert (torch.from_numpy(again) - alone).abs().max() < 1e-5  # in one batch


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("stored", STORED)
def test_clip_s_vectors_are_those_of_transformers_for_each_text_alone(
    stored: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    folder = make("CLIP", tokenizer, tmp_path / "theirs")
    store_padding(folder, stored)
    theirs, tokenize = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)

    def vectors(given: list[str]) -> torch.Tensor:
        tokens = tokenize(given, padding=True, truncation=True, max_length=20, return_tensors="pt")
        found = theirs.get_text_features(tokens["input_ids"], tokens["attention_mask"]).pooler_output
        return torch.nn.functional.normalize(found)

    alone = torch.cat([vectors([text]) for text in texts])
    moved = float((vectors(texts) - alone).abs().max())
    assert moved < 1e-5 if stored == "on the right" else moved > 0.01
    model = load_model(folder)
    assert alike(model, texts, alone)
    model.save(tmp_path / "saved")
    assert alike(load_model(tmp_path / "saved"), texts, alone)
    theirs = AutoModel.from_pretrained(tmp_path / "saved").eval()
    tokenize = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (vectors(texts) - alone).abs().max() < 1e-5


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", ["Siglip", "Siglip2"])
def test_siglip_s_texts_all_have_its_full_length_and_keep_their_side(
    family: str, stored: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    folder = make(family, tokenizer, tmp_path / "theirs")
    store_padding(folder, stored)
    model = load_model(folder)
    model.save(tmp_path / "saved")
    expected = {}
    for place in (folder, tmp_path / "saved"):
        theirs, tokenize = AutoModel.from_pretrained(place).eval(), AutoTokenizer.from_pretrained(place)
        for side in (None, "left", "right"):
            how: dict[str, Any] = {"padding": "max_length", "padding_side": side, "truncation": True, "max_length": 20}
            tokens = tokenize(texts, return_tensors="pt", **how)
            names = [name for name in ("input_ids", "attention_mask") if name in tokenize.model_input_names]
            found = theirs.get_text_features(**{name: tokens[name] for name in names}).pooler_output
            expected[side] = torch.nn.functional.normalize(found)
        assert (expected["left"] - expected["right"]).abs().max() > 0.01
        for own in (model, load_model(tmp_path / "saved")):
            assert alike(own, texts, expected[None])
