"""Query-document encoders: towers, prompts, padding, precision; pooling; what fits a backbone and
what is refused."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import TextEncoder
from dualenc.errors import DualencError


@pytest.fixture
def model(text_encoder: Any) -> TextEncoder:
    torch.manual_seed(0)
    return text_encoder(query_prompt="ask: ", document_prompt="say: ")


def test_prompt_is_put_before_each_text_in_workers_too(
    model: TextEncoder, tokenizer: PreTrainedTokenizerBase
) -> None:
    for side, prompt in (("left", "ask: "), ("right", "say: ")):
        ids = pickle.loads(pickle.dumps(model.tower(side).prepare))(["a dog"])["input_ids"]  # type: ignore[arg-type]
        assert ids.tolist() == tokenizer([prompt + "a dog"]).input_ids


def test_checkpointed_activations_give_the_same_gradient(
    text_encoder: Any, texts: list[str], recwarn: pytest.WarningsRecorder
) -> None:
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = text_encoder(gradient_checkpointing=checkpointing).train()
        torch.manual_seed(1)  # of dropout
        model("left", model.left.prepare(texts))[:, 0].sum().backward()
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)
    assert not [warning for warning in recwarn if warning.category is FutureWarning]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give the name of a model, or config and tokenizer"),
        (
            {"config": {"model_type": "bert"}},
            "give the name of a model, or config and tokenizer",
        ),
        ({"name": "x", "config": {}}, "give the name of a model, or config and tokenizer"),
        ({"name": "./no-such-folder"}, "no such folder"),
        ({"dtype": "int8"}, "dtype is 'int8'; choose float32, or bfloat16"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        TextEncoder(**arguments)


@pytest.fixture
def folder(model: TextEncoder, tmp_path: Path) -> Path:
    model.save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no-such-model"}, "the text encoder fails .*no-such-model"),
        ({"num_attention_heads": 5}, "the text encoder fails .*attention heads"),
        ({"vocab_size": 7}, "vocab_size is smaller than the tokenizer's, 300"),
        ({"model_type": "vit"}, "the text encoder fails"),
    ],
)
def test_unfit_configurations(
    text_encoder: Any, bert: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DualencError, match=message):
        text_encoder(config={**bert, **change})


def test_every_weight_is_held_once_and_gets_a_gradient_but_the_pooler(
    model: TextEncoder, texts: list[str]
) -> None:
    (model("left", model.left.prepare(texts))[:, 0]).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert model.num_parameters - model.num_trainable_parameters == 32 * 32 + 32
    assert all(name.startswith("left.") for name in model.state_dict())
    assert model.train().right.training


def test_length_is_what_all_agree_on(text_encoder: Any, bert: dict[str, Any]) -> None:
    assert text_encoder().left.prepare.max_length == 40
    assert text_encoder(max_length=12).left.prepare.max_length == 12
    assert text_encoder(max_length=12).left.prepare(["a dog runs " * 50])["input_ids"].shape == (
        1,
        12,
    )
    with pytest.warns(
        UserWarning, match="texts are truncated to 40 tokens, the number of the model's positions"
    ):
        assert text_encoder(max_length=41).left.prepare.max_length == 40
    # RoBERTa counts positions behind its padding index.
    roberta = {**bert, "model_type": "roberta", "pad_token_id": 1}
    with pytest.warns(UserWarning, match="texts are truncated to 38 tokens"):
        assert text_encoder(config=roberta).left.prepare.max_length == 38
    with pytest.raises(DualencError, match="at least 3"):
        text_encoder(max_length=2)


def test_weights_in_half_precision_load_in_float32(folder: Path) -> None:
    # Copies: weights may be views of the file, which is written over.
    first = {name: value.clone() for name, value in TextEncoder(str(folder)).state_dict().items()}
    weights = load_file(folder / "model.safetensors")
    save_file(
        {k: v.half() for k, v in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for name, value in TextEncoder(str(folder)).state_dict().items():
        assert value.dtype == torch.float32
        torch.testing.assert_close(value, first[name], atol=1e-3, rtol=1e-3)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        DualencError, match=r"embeddings\.word_embeddings\.weight is missing; restore"
    ):
        TextEncoder(str(folder))
