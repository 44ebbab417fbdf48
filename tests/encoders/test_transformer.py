"""Text backbones: what fits what, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from dualenc.encoders.text import (
    check_length,
    load_transformer,
    max_positions,
    new_transformer,
    save_transformer,
)
from dualenc.errors import DualencError


@pytest.fixture
def folder(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    save_transformer(new_transformer(bert, tokenizer), tmp_path)
    return tmp_path


def test_vocabulary_and_padding_follow_the_tokenizer(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    model = new_transformer(bert, tokenizer)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id


def test_unused_pooler_is_not_trained(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    frozen = {name for name, p in new_transformer(bert, tokenizer).named_parameters() if not p.requires_grad}
    assert frozen == {"pooler.dense.weight", "pooler.dense.bias"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no-such-model"}, "config of the text tower"),
        ({"num_attention_heads": 5}, "config of the text tower"),
        ({"vocab_size": 7}, "vocab_size 7, the tokenizer"),
    ],
)
def test_unfit_configurations(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        new_transformer({**bert, **change}, tokenizer)
    assert "\n" not in str(caught.value)


def test_roberta_counts_positions_behind_its_padding_index(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    roberta = new_transformer({**bert, "model_type": "roberta", "pad_token_id": 1}, tokenizer)
    assert max_positions(roberta) == bert["max_position_embeddings"] - 2
    tokens = torch.full((1, 38), 5)
    assert roberta(input_ids=tokens).last_hidden_state.shape[1] == 38
    assert max_positions(new_transformer(bert, tokenizer)) == 40


def test_length_is_what_all_agree_on(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    model = new_transformer(bert, tokenizer)
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


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(DualencError, match=r"no \*\.safetensors"):
        load_transformer(folder)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DualencError, match="does not load") as caught:
        load_transformer(folder)
    assert "\n" not in str(caught.value)


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DualencError, match=r"1 weights are missing, embeddings\.word_embeddings\.weight first"):
        load_transformer(folder)


def test_code_in_the_folder_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "made-up", "auto_map": {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
    with pytest.raises(DualencError, match="does not load"):
        load_transformer(folder)
    assert not (folder / "ran").exists()


def test_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=r"no config\.json"):
        load_transformer(tmp_path)
