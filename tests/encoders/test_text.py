"""Query-document encoders: towers, prompts, padding, precision; pooling; what fits a backbone and what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import TextEncoder
from dualenc.encoders.text import (
    POOLINGS,
    check_length,
    load_transformer,
    max_positions,
    new_transformer,
    pool,
    save_transformer,
)
from dualenc.errors import DualencError


@pytest.fixture
def model(text_encoder: Any) -> TextEncoder:
    torch.manual_seed(0)
    return text_encoder(query_prompt="ask: ", document_prompt="say: ")


def test_prompt_is_put_before_each_text_in_workers_too(model: TextEncoder, tokenizer: PreTrainedTokenizerBase) -> None:
    for side, prompt in (("left", "ask: "), ("right", "say: ")):
        ids = pickle.loads(pickle.dumps(model.tower(side).prepare))(["a dog"])["input_ids"]  # type: ignore[arg-type]
        assert ids.tolist() == tokenizer([prompt + "a dog"]).input_ids


def test_checkpointed_activations_give_the_same_gradient(text_encoder: Any, texts: list[str]) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = text_encoder(gradient_checkpointing=checkpointing).train()
        torch.manual_seed(1)  # of dropout
        model("left", model.left.prepare(texts))[:, 0].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "no base model"),
        ({"config": {"model_type": "bert"}}, "no base model"),
        ({"name": "x", "config": {}}, "both name and config"),
        ({"name": "./no-such-folder"}, "no such folder"),
        ({"pooling": "max"}, "pooling is 'max': choose one of mean, cls, last"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        TextEncoder(**arguments)


def slow_pool(hidden: np.ndarray, mask: np.ndarray, pooling: str) -> np.ndarray:
    """The definition, in float64."""
    rows = []
    for vectors, keep in zip(hidden.astype(np.float64), mask):
        tokens = [vector for vector, kept in zip(vectors, keep) if kept]
        rows.append({"mean": np.mean(tokens, axis=0), "cls": tokens[0], "last": tokens[-1]}[pooling])
    return np.stack(rows)


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    left_padded=st.booleans(),
    pooling=st.sampled_from(POOLINGS),
    seed=st.integers(0, 99),
)
def test_pooling_equals_the_definition(lengths: list[int], left_padded: bool, pooling: str, seed: int) -> None:
    longest = max(lengths)
    mask = np.zeros((len(lengths), longest), dtype=np.int64)
    for row, length in zip(mask, lengths):
        row[longest - length :] = 1 if left_padded else row[longest - length :]
        row[:length] = 1 if not left_padded else row[:length]
    hidden = np.random.default_rng(seed).normal(size=(*mask.shape, 3)).astype(np.float32)
    pooled = pool(torch.from_numpy(hidden), torch.from_numpy(mask), pooling)  # type: ignore[arg-type]
    np.testing.assert_allclose(pooled.numpy(), slow_pool(hidden, mask, pooling), rtol=1e-5, atol=1e-6)


@pytest.fixture
def folder(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    save_transformer(new_transformer(bert, tokenizer), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no-such-model"}, "config of the text tower"),
        ({"num_attention_heads": 5}, "config of the text tower"),
        ({"vocab_size": 7}, "vocab_size 7, the tokenizer"),
        ({"model_type": "bart"}, "a model of type bart is an encoder with a decoder"),
    ],
)
def test_unfit_configurations(text_encoder: Any, bert: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        text_encoder(config={**bert, **change})


def test_every_weight_is_held_once_and_gets_a_gradient_but_the_pooler(model: TextEncoder, texts: list[str]) -> None:
    (model("left", model.left.prepare(texts))[:, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert model.num_parameters - model.num_trainable_parameters == 32 * 32 + 32
    assert all(name.startswith("left.") for name in model.state_dict())
    assert model.train().right.training


def test_length_is_what_all_agree_on(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    model = new_transformer(bert, tokenizer)
    assert max_positions(model) == 40
    # RoBERTa counts positions behind its padding index.
    assert max_positions(new_transformer({**bert, "model_type": "roberta", "pad_token_id": 1}, tokenizer)) == 38
    assert check_length(None, model, tokenizer) == 40
    assert check_length(12, model, tokenizer) == 12
    with pytest.raises(DualencError, match="max_length is 41, but the model has 40 positions"):
        check_length(41, model, tokenizer)
    with pytest.raises(DualencError, match="at least 3"):
        check_length(2, model, tokenizer)


def test_weights_return_exactly_and_in_float32(folder: Path) -> None:
    first = load_transformer(folder)
    assert all(parameter.dtype == torch.float32 for parameter in first.parameters())
    weights = load_file(folder / "model.safetensors")
    save_file({k: v.half() for k, v in weights.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    second = load_transformer(folder)
    assert all(parameter.dtype == torch.float32 for parameter in second.parameters())
    for name, value in second.state_dict().items():
        torch.testing.assert_close(value, first.state_dict()[name], atol=1e-3, rtol=1e-3)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DualencError, match=r"1 weights are missing, embeddings\.word_embeddings\.weight first"):
        load_transformer(folder)
