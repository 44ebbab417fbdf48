"""Sentence-transformers folders: the other tool reads ours, and we read its, with equal vectors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import DualEncoder, TextEncoder, load_model
from dualenc.encoders.sentence_folder import read_sentence_folder
from dualenc.errors import DualencError


@torch.no_grad()
def encode(model: DualEncoder, side: str, texts: list[str]) -> torch.Tensor:
    return model.encode(side, model.tower(side).prepare(texts))  # type: ignore[arg-type]


def reference(folder: Path, side: str, texts: list[str]) -> torch.Tensor:
    """The vectors that sentence-transformers computes."""
    model = SentenceTransformer(str(folder), device="cpu")
    call = model.encode_query if side == "left" else model.encode_document
    return torch.tensor(call(texts, show_progress_bar=False))


@pytest.fixture
def saved(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Path:
    TextEncoder(config=bert, tokenizer=tokenizer, query_prompt="ask: ").save(tmp_path / "model")
    return tmp_path / "model"


def test_minilm_gives_its_published_vectors(minilm: Path, texts: list[str]) -> None:
    model = load_model(minilm)
    longer = [*texts, "long text " * 500, "  spaces  "]
    assert (encode(model, "right", longer) - reference(minilm, "right", longer)).abs().max() < 1e-5
    assert model.right.prepare.max_length == 256  # type: ignore[attr-defined]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_saved_model_gives_the_same_vectors_there_and_here(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path, pooling: Any
) -> None:
    model = TextEncoder(
        config=bert,
        tokenizer=tokenizer,
        pooling=pooling,
        query_prompt="query: ",
        document_prompt="a document, ",
        max_length=16,
    )
    model.save(tmp_path / "model")
    reloaded = load_model(tmp_path / "model")
    for side in ("left", "right"):
        expected = encode(model, side, texts)
        assert torch.equal(encode(reloaded, side, texts), expected)
        assert (reference(tmp_path / "model", side, texts) - expected).abs().max() < 1e-5
    assert SentenceTransformer(str(tmp_path / "model"), device="cpu").similarity_fn_name == "cosine"


SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"model_type": "distilbert", "dim": 32, "n_layers": 1, "n_heads": 2, "hidden_dim": 64}, "mean"),
        ({"model_type": "t5", "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}, "mean"),
        ({"model_type": "modernbert", **SMALL}, "cls"),
        ({"model_type": "llama", "num_key_value_heads": 2, **SMALL}, "last"),
    ],
    ids=["no token types", "encoder half", "rotary positions", "decoder"],
)
def test_other_architectures(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path, config: dict[str, Any], pooling: Any
) -> None:
    model = TextEncoder(config=config, tokenizer=tokenizer, pooling=pooling)
    model.save(tmp_path / "model")
    expected = encode(model, "left", texts)
    assert torch.equal(encode(load_model(tmp_path / "model"), "left", texts), expected)
    assert (reference(tmp_path / "model", "left", texts) - expected).abs().max() < 1e-5


def test_separate_towers_are_two_models(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    model = TextEncoder(config=bert, tokenizer=tokenizer, shared=False, query_prompt="q ", document_prompt="d ")
    model.save(tmp_path / "model")
    reloaded = load_model(tmp_path / "model")
    assert not reloaded.shares_weights
    for side, role in (("left", "query"), ("right", "document")):
        expected = encode(model, side, texts)
        assert torch.equal(encode(reloaded, side, texts), expected)
        assert (reference(tmp_path / "model" / role, side, texts) - expected).abs().max() < 1e-5
        plain = SentenceTransformer(str(tmp_path / "model" / role), device="cpu").encode(texts)
        assert (torch.tensor(plain) - expected).abs().max() < 1e-5  # its only prompt is the default one


def test_base_model_keeps_what_it_says_and_yields_to_arguments(saved: Path) -> None:
    kept = TextEncoder(str(saved))
    assert (kept.left.prepare.prompt, kept.right.prepare.prompt) == ("ask: ", "")
    changed = TextEncoder(str(saved), query_prompt="", pooling="cls", max_length=8, shared=False)
    assert changed.left.prepare.prompt == ""
    assert (changed.left.pooling, changed.left.prepare.max_length) == ("cls", 8)
    first, second = changed.left.backbone.state_dict(), changed.right.backbone.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not changed.shares_weights


def test_what_sentence_transformers_saves_itself(saved: Path, texts: list[str], tmp_path: Path) -> None:
    SentenceTransformer(str(saved), device="cpu").save(str(tmp_path / "theirs"))
    theirs = load_model(tmp_path / "theirs")
    for side in ("left", "right"):
        assert (encode(theirs, side, texts) - reference(saved, side, texts)).abs().max() < 1e-5


def test_plain_transformers_folder(bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    model = TextEncoder(config=bert, tokenizer=tokenizer)
    model.left.backbone.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.left.pooling == "mean"  # type: ignore[attr-defined]
    assert torch.equal(encode(loaded, "left", ["a dog"]), encode(model, "left", ["a dog"]))


def test_upper_case_is_folded_when_the_folder_says_so(saved: Path) -> None:
    settings = json.loads((saved / "sentence_bert_config.json").read_text())
    (saved / "sentence_bert_config.json").write_text(json.dumps({**settings, "do_lower_case": True}))
    assert read_sentence_folder(saved).lower_case
    assert (encode(load_model(saved), "left", ["A DOG"]) - reference(saved, "left", ["A DOG"])).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("modules.json", [{"path": "", "type": "sentence_transformers.models.CLIPModel"}], "CLIPModel is not supp"),
        ("modules.json", [{"path": "", "type": "sentence_transformers.models.Transformer"}], "lists no Pooling"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": ["cls", "mean"]}, r"cls \+ mean is not supported"),
        ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt is false"),
        ("sentence_bert_config.json", {"transformer_task": "fill-mask"}, "transformer_task is 'fill-mask'"),
    ],
)
def test_what_towers_cannot_express(saved: Path, file: str, change: Any, message: str) -> None:
    (saved / file).write_text(json.dumps(change))
    with pytest.raises(DualencError, match=message) as caught:
        load_model(saved)
    assert "\n" not in str(caught.value)


def test_dense_module_is_refused(saved: Path) -> None:
    modules = json.loads((saved / "modules.json").read_text())
    dense = {"idx": 3, "name": "3", "path": "3_Dense", "type": "sentence_transformers.models.Dense"}
    (saved / "modules.json").write_text(json.dumps([*modules, dense]))
    with pytest.raises(DualencError, match="Dense is not supported"):
        load_model(saved)


def test_missing_tokenizer(saved: Path) -> None:
    for path in saved.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(DualencError, match="no tokenizer loads from there") as caught:
        load_model(saved)
    assert "\n" not in str(caught.value)


def test_tokenizer_of_another_vocabulary(saved: Path, minilm: Path) -> None:
    with pytest.raises(DualencError, match="tokenizer has 30522 tokens"):
        TextEncoder(str(saved), tokenizer=str(minilm))


def test_separate_towers_cannot_be_made_one(
    bert: dict[str, Any], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    TextEncoder(config=bert, tokenizer=tokenizer, shared=False).save(tmp_path / "two")
    with pytest.raises(DualencError, match="towers are separate"):
        TextEncoder(str(tmp_path / "two"), shared=True)
