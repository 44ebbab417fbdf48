"""Texts packed into rows: every architecture gives the vectors and gradients that it gives for
padded texts."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sentence_transformers import SentenceTransformer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import TextEncoder, packing
from dualenc.encoders.packing import (
    COUNT_FROM_BEHIND_PADDING,
    COUNT_FROM_ZERO,
    attend,
    fill_rows,
    first_position,
    pack,
)
from dualenc.types import Inputs, Pooling

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "type_vocab_size": 2,
    "max_position_embeddings": 80,
}
TEXTS = ["words " * count for count in (3, 40, 5, 1, 2, 30, 4, 3, 60)]


def small_model(
    model_type: str, tokenizer: PreTrainedTokenizerBase, pooling: Pooling = "mean"
) -> TextEncoder:
    torch.manual_seed(0)
    config = {**SMALL, "model_type": model_type, "pad_token_id": tokenizer.pad_token_id}
    return (
        TextEncoder(config=config, tokenizer=tokenizer, pooling=pooling, max_length=64)
        .double()
        .train()
    )


def vectors_and_gradients(model: TextEncoder, inputs: Inputs) -> list[Tensor]:
    model.zero_grad()
    vectors = model("left", inputs)
    direction = torch.randn(
        vectors.shape, generator=torch.Generator().manual_seed(1), dtype=vectors.dtype
    )
    (vectors * direction).sum().backward()
    return [vectors.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("model_type", [*COUNT_FROM_ZERO, *COUNT_FROM_BEHIND_PADDING])
def test_the_same_vectors_and_gradients_for_less_work(
    model_type: str,
    one_by_one: bool,
    tokenizer: PreTrainedTokenizerBase,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "LONG", 10)
    model = small_model(model_type, tokenizer)
    padded = model.left.prepare(TEXTS)
    packed = model.left.pack(padded, one_by_one)
    assert ("lengths" in packed) == one_by_one
    assert packed["input_ids"].numel() < 0.6 * padded["input_ids"].numel()
    found, expected = (vectors_and_gradients(model, inputs) for inputs in (packed, padded))
    assert len(found) == len(expected) > 20
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [*COUNT_FROM_ZERO, *COUNT_FROM_BEHIND_PADDING])
def test_texts_that_hold_the_padding_token_have_the_vectors_of_the_library(
    model_type: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    pad = str(tokenizer.pad_token)
    texts = [
        f"words {pad} words",
        f"{pad} words",
        "words " * 40,
        f"words words {pad}",
        pad,
        f"{pad} {pad} words {pad}",
    ]
    model = small_model(model_type, tokenizer).eval().float()
    inputs = model.left.prepare(texts)
    held = (inputs["input_ids"] == tokenizer.pad_token_id) & inputs["attention_mask"].bool()
    assert held.sum() == 7
    model.save(tmp_path / "model")
    theirs = torch.from_numpy(
        SentenceTransformer(str(tmp_path / "model"), device="cpu").encode(texts)
    )
    packed = model.left.pack(inputs)
    assert "place" in packed
    for form in (packed, inputs):
        torch.testing.assert_close(model("left", form), theirs, rtol=1e-5, atol=1e-5)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(0, 50), min_size=1, max_size=40), left=st.booleans())
def test_every_token_stands_in_one_place(lengths: list[int], left: bool) -> None:
    width = max(1, *lengths)
    steps = torch.arange(width)
    mask = (
        (steps >= width - torch.tensor(lengths)[:, None])
        if left
        else (steps < torch.tensor(lengths)[:, None])
    )
    ids = (
        torch.arange(mask.numel()).view(mask.shape) + 2
    )  # 1 is the padding token where positions begin at 2
    packed = pack({"input_ids": ids, "attention_mask": mask.long()}, first=2)
    if "place" not in packed:
        assert torch.equal(packed["input_ids"], ids)
        return
    found = packed["input_ids"].flatten()[packed["place"]]
    assert torch.equal(found[mask], ids[mask])
    assert (packed["input_ids"] > 0).sum() == mask.sum() == (packed["texts"] >= 0).sum()
    assert torch.equal(packed["texts"].flatten()[packed["place"]][mask], mask.nonzero()[:, 0])
    for text, length in enumerate(lengths):
        own = packed["texts"] == text
        assert packed["position_ids"][own].tolist() == list(range(2, 2 + length))
    assert packed["input_ids"].numel() <= 0.9 * mask.numel()


@given(lengths=st.lists(st.integers(0, 50), max_size=60), more=st.integers(0, 20))
def test_rows_hold_every_text_once_and_no_two_rows_would_fit_into_one(
    lengths: list[int], more: int
) -> None:
    room = max([0, *lengths]) + more
    rows = fill_rows(lengths, room)
    assert sorted(text for row in rows for text in row) == list(range(len(lengths)))
    filled = [sum(lengths[text] for text in row) for row in rows]
    assert all(tokens <= room for tokens in filled)
    assert all(a + b > room for a, b in pairwise(filled))


def test_only_with_an_attention_that_takes_such_a_mask(tokenizer: PreTrainedTokenizerBase) -> None:
    """Eager attention would add it to the scores; a decoder looks back only; others number
    positions themselves."""
    model = small_model("bert", tokenizer)
    padded = model.left.prepare(TEXTS)
    assert first_position(model.left.backbone.config) == 0
    model.left.backbone.config._attn_implementation = "eager"
    assert first_position(model.left.backbone.config) is None
    assert model.left.pack(padded) is padded
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    other = TextEncoder(config={**sizes, "model_type": "modernbert"}, tokenizer=tokenizer)
    assert first_position(other.left.backbone.config) is None


def test_long_texts_go_through_attention_one_by_one_unless_layers_are_repeated(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    model = small_model("bert", tokenizer)
    padded = model.left.prepare(["words " * 60] * 5)
    assert "lengths" in model.left.pack(padded, one_by_one=True)
    assert model.left.pack(padded) is padded
    assert (
        model.left.pack(model.left.prepare(["words"] * 5), one_by_one=True)["input_ids"].shape[0]
        == 5
    )
    model.left.backbone.gradient_checkpointing_enable({"use_reentrant": False})
    assert model.left.pack(padded, one_by_one=True) is padded


def test_attention_drops_weights_and_only_in_training(tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 60, 8)
    weights = (query @ key.mT * 8**-0.5).softmax(dim=-1)
    torch.testing.assert_close(attend(query, key, value, 0.0, None), weights @ value)
    mean = torch.stack([attend(query, key, value, 0.5, None) for _ in range(2000)]).mean(dim=0)
    torch.testing.assert_close(mean, weights @ value, rtol=0, atol=0.05)
