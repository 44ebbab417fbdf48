"""Query-document encoders: towers, prompts, padding, precision."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dualenc.encoders import TextEncoder
from dualenc.errors import DualencError


@pytest.fixture
def model(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    torch.manual_seed(0)
    return TextEncoder(config=bert, tokenizer=tokenizer, query_prompt="ask: ", document_prompt="say: ")


def test_vectors_are_unit_norm_float32_also_in_bfloat16(model: TextEncoder, texts: list[str]) -> None:
    inputs = model.left.prepare(texts)
    exact = model.encode("left", inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rough = model.encode("left", inputs)
    for vectors in (exact, rough):
        assert vectors.dtype == torch.float32
        assert vectors.shape == (len(texts), model.dim)
        torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(texts)))
    assert 0 < (exact - rough).abs().max() < 0.05


def test_weights_follow_the_seed(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    def build(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return TextEncoder(config=bert, tokenizer=tokenizer, shared=False, lora_rank=2).state_dict()

    first, again, other = build(1), build(1), build(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_prompt_is_put_before_each_text(model: TextEncoder, tokenizer: PreTrainedTokenizerBase) -> None:
    for side, prompt in (("left", "ask: "), ("right", "say: ")):
        ids = model.tower(side).prepare(["a dog"])["input_ids"]  # type: ignore[arg-type]
        assert ids.tolist() == tokenizer([prompt + "a dog"]).input_ids


def test_a_text_alone_gives_what_it_gives_among_longer_ones(model: TextEncoder, texts: list[str]) -> None:
    together = model.encode("left", model.left.prepare(texts))
    alone = torch.cat([model.encode("left", model.left.prepare([text])) for text in texts])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)


def test_truncates_to_max_length(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    model = TextEncoder(config=bert, tokenizer=tokenizer, max_length=6)
    assert model.left.prepare(["a dog " * 50, "a"])["input_ids"].shape == (2, 6)


def test_last_token_is_found_on_either_side(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> None:
    llama = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    vectors = []
    for padding_side in ("left", "right"):
        padded = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer.backend_tokenizer, pad_token="[PAD]", padding_side=padding_side
        )
        torch.manual_seed(0)
        model = TextEncoder(config=llama, tokenizer=padded, pooling="last")
        vectors.append(model.encode("left", model.left.prepare(texts)))
    torch.testing.assert_close(vectors[0], vectors[1], atol=1e-5, rtol=0)


def test_shared_weights_are_named_once_and_switch_together(model: TextEncoder) -> None:
    assert model.shares_weights
    assert model.left.backbone is model.right.backbone
    assert all(name.startswith("left.") for name in model.state_dict())
    model.train()
    assert model.left.training
    assert model.right.training
    assert not model.eval().right.training


def test_separate_towers_are_independent(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    model = TextEncoder(config=bert, tokenizer=tokenizer, shared=False)
    weights = model.state_dict()
    assert {name.split(".")[0] for name in weights} == {"left", "right"}
    name = "backbone.embeddings.word_embeddings.weight"
    assert not torch.equal(weights[f"left.{name}"], weights[f"right.{name}"])


def test_prepare_travels_to_workers_without_weights(model: TextEncoder, texts: list[str]) -> None:
    sent = pickle.dumps(model.left.prepare)
    assert len(sent) < 100_000
    received = pickle.loads(sent)(texts, seeds=[1, 2, 3, 4])  # text ignores seeds
    assert all(torch.equal(received[name], value) for name, value in model.left.prepare(texts).items())
    assert model.left.prepare.lengths(texts) == [len(text) for text in texts]


def test_checkpointed_activations_give_the_same_gradient(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = TextEncoder(config=bert, tokenizer=tokenizer, gradient_checkpointing=checkpointing).train()
        torch.manual_seed(1)  # of dropout
        model.encode("left", model.left.prepare(texts))[:, 0].sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_everything_but_the_pooler_gets_a_gradient(model: TextEncoder, texts: list[str]) -> None:
    (model.encode("left", model.left.prepare(texts))[:, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert model.num_parameters - model.num_trainable_parameters == 32 * 32 + 32


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
    with pytest.raises(DualencError, match=message) as caught:
        TextEncoder(**arguments)
    assert "\n" not in str(caught.value)
