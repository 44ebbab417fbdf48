"""Sentence-transformers folders: the other tool reads ours, and we read its, with equal vectors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Normalize
from torch import nn

from dualenc.encoders import DualEncoder, TextEncoder, load_model
from dualenc.errors import DualencError

TRANSFORMER = "sentence_transformers.models.Transformer"


@torch.no_grad()
def encode(model: DualEncoder, side: str, texts: list[str]) -> torch.Tensor:
    return model(side, model.tower(side).prepare(texts))  # type: ignore[arg-type]


def reference(folder: Path, side: str, texts: list[str]) -> torch.Tensor:
    """The vectors that sentence-transformers computes."""
    model = SentenceTransformer(str(folder), device="cpu")
    call = model.encode_query if side == "left" else model.encode_document
    return torch.tensor(call(texts, show_progress_bar=False))


def assert_equal_there_and_here(model: DualEncoder, texts: list[str], folder: Path) -> None:
    model.save(folder)
    reloaded = load_model(folder)
    for side in ("left", "right"):
        expected = encode(model, side, texts)
        assert torch.equal(encode(reloaded, side, texts), expected)
        assert (reference(folder, side, texts) - expected).abs().max() < 1e-5


@pytest.fixture
def saved(text_encoder: Any, tmp_path: Path) -> Path:
    text_encoder(query_prompt="ask: ").save(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.slow
def test_minilm_gives_its_published_vectors(minilm: Path, texts: list[str]) -> None:
    model = load_model(minilm)
    longer = [*texts, "long text " * 500, "  spaces  "]
    assert (encode(model, "right", longer) - reference(minilm, "right", longer)).abs().max() < 1e-5
    assert model.right.prepare.max_length == 256  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_saved_model_gives_the_same_vectors_there_and_here(
    text_encoder: Any, texts: list[str], tmp_path: Path, pooling: Any
) -> None:
    prompts = {"query_prompt": "query: ", "document_prompt": "a document, "}
    model = text_encoder(pooling=pooling, max_length=16, **prompts)
    assert_equal_there_and_here(model, texts, tmp_path / "model")
    assert SentenceTransformer(str(tmp_path / "model"), device="cpu").similarity_fn_name == "cosine"


def test_base_model_keeps_what_it_says_and_yields_to_arguments(saved: Path) -> None:
    kept = TextEncoder(str(saved))
    assert (kept.left.prepare.prompt, kept.right.prepare.prompt) == ("ask: ", "")
    changed = TextEncoder(str(saved), query_prompt="", pooling="cls", max_length=8, shared=False)
    assert changed.left.prepare.prompt == ""
    assert (changed.left.head[0].pooling_mode, changed.left.prepare.max_length) == ("cls", 8)
    first, second = changed.left.backbone.state_dict(), changed.right.backbone.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not changed.shares_weights


def test_upper_case_is_folded_when_the_folder_says_so(saved: Path) -> None:
    settings = json.loads((saved / "sentence_bert_config.json").read_text())
    (saved / "sentence_bert_config.json").write_text(
        json.dumps({**settings, "do_lower_case": True})
    )
    assert (
        encode(load_model(saved), "left", ["A DOG"]) - reference(saved, "left", ["A DOG"])
    ).abs().max() < 1e-5


@pytest.mark.parametrize("model_type", ["roberta", "bert"])
def test_a_length_above_the_positions_is_cut(
    text_encoder: Any, bert: dict[str, Any], tmp_path: Path, model_type: str
) -> None:
    folder = tmp_path / "model"
    text_encoder(config={**bert, "model_type": model_type, "pad_token_id": 1}, max_length=38).save(
        folder
    )
    positions = 38 if model_type == "roberta" else 40  # RoBERTa's first two are none of a text
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": positions + 2}))
    with pytest.warns(
        UserWarning,
        match=f"texts are truncated to {positions} tokens, the number of the model's positions",
    ):
        model = TextEncoder(str(folder))
    assert model.left.prepare.max_length == positions
    assert model.encode(["a dog runs " * 50, "a dog"]).shape == (2, 32)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "modules.json",
            [{"path": "", "type": "sentence_transformers.models.CLIPModel"}],
            "CLIPModel is not supp",
        ),
        (
            "modules.json",
            [{"idx": 0, "name": "0", "path": "", "type": TRANSFORMER}],
            "the text encoder fails",
        ),
        ("modules.json", {"0": {}}, "is not a list of modules"),
        ("modules.json", [], "empty modules list"),
        (
            "1_Pooling/config.json",
            {"embedding_dimension": 32, "pooling_mode": "sum"},
            "Invalid pooling mode",
        ),
    ],
)
def test_what_is_no_text_encoder(saved: Path, file: str, change: Any, message: str) -> None:
    (saved / file).write_text(json.dumps(change))
    with pytest.raises(DualencError, match=message):
        load_model(saved)


def with_modules(saved: Path, folder: Path, *modules: Any) -> Path:
    """The saved model with modules of sentence-transformers behind its pooling, written by it."""
    base = SentenceTransformer(str(saved), device="cpu")
    SentenceTransformer(
        modules=[base[0], base[1], *modules], prompts=base.prompts, device="cpu"
    ).save(str(folder))
    return folder


HEADS: dict[str, Callable[[], list[Any]]] = {
    "tanh": lambda: [Dense(32, 24)],
    "normalised first": lambda: [
        Normalize(),
        Dense(32, 24, activation_function=nn.Identity()),
        Normalize(),
    ],
    "two layers": lambda: [
        Dense(32, 48, bias=False, activation_function=nn.GELU()),
        Dense(48, 20),
        Normalize(),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("head", list(HEADS))
def test_dense_modules_give_their_vectors_and_are_saved(
    saved: Path, texts: list[str], tmp_path: Path, head: str
) -> None:
    torch.manual_seed(1)
    folder = with_modules(saved, tmp_path / "dense", *HEADS[head]())
    model = load_model(folder)
    model.save(tmp_path / "again")
    again = load_model(tmp_path / "again")
    for side in ("left", "right"):
        expected = nn.functional.normalize(reference(folder, side, texts))
        assert expected.shape[1] == model.dim
        assert (encode(model, side, texts) - expected).abs().max() < 1e-5
        assert torch.equal(encode(again, side, texts), encode(model, side, texts))
        assert (reference(tmp_path / "again", side, texts) - expected).abs().max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (
            "config.json",
            {"activation_function": "os.system"},
            "'os.system' is not an activation of torch.nn",
        ),
        (
            "config.json",
            {"activation_function": "torch.nn.modules.module.Module"},
            "is not an activation of torch.nn",
        ),
        ("config.json", {"in_features": 31}, "does not load"),
        ("config.json", {"in_features": "32"}, "does not load"),
        ("model.safetensors", None, "convert its weights to safetensors"),
    ],
)
def test_damaged_dense_modules(
    saved: Path, tmp_path: Path, file: str, change: Any, message: str
) -> None:
    path = with_modules(saved, tmp_path / "dense", Dense(32, 24)) / "2_Dense" / file
    if change is None:
        path.unlink()
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DualencError, match=message):
        load_model(tmp_path / "dense")


@pytest.mark.slow
def test_vectors_are_truncated_as_the_folder_says_and_the_argument_wins(
    saved: Path, texts: list[str], tmp_path: Path
) -> None:
    SentenceTransformer(str(saved), truncate_dim=12, device="cpu").save(str(tmp_path / "short"))
    model = load_model(tmp_path / "short")
    assert model.dim == 12
    model.save(tmp_path / "again")
    for folder in (tmp_path / "short", tmp_path / "again"):
        expected = nn.functional.normalize(reference(folder, "left", texts))
        assert (encode(model, "left", texts) - expected).abs().max() < 1e-5
    assert SentenceTransformer(str(tmp_path / "again"), device="cpu").truncate_dim == 12
    assert TextEncoder(str(tmp_path / "short"), truncate_dim=32).dim == 32
    with pytest.raises(DualencError, match="truncate_dim is 33; give 1 to 32, the model's size"):
        TextEncoder(str(saved), truncate_dim=33)


@pytest.mark.slow
def test_prompts_by_name_and_the_default_one(saved: Path, texts: list[str], tmp_path: Path) -> None:
    prompts = {"sts": "same meaning? ", "query": "ask: ", "passage": "told: "}
    path = saved / "config_sentence_transformers.json"
    path.write_text(json.dumps({"prompts": prompts, "default_prompt_name": "sts"}))
    model = TextEncoder(str(saved), document_prompt=TextEncoder(str(saved)).prompts["sts"])
    assert (model.left.prepare.prompt, model.right.prepare.prompt) == ("ask: ", "same meaning? ")
    theirs = SentenceTransformer(str(saved), device="cpu").encode(texts, prompt_name="sts")
    assert (encode(model, "right", texts) - torch.tensor(theirs)).abs().max() < 1e-5
    model.save(tmp_path / "again")
    kept = SentenceTransformer(str(tmp_path / "again"), device="cpu").prompts
    assert kept == {**prompts, "document": "same meaning? "}

    path.write_text(
        json.dumps({"prompts": {"sts": "same meaning? "}, "default_prompt_name": "sts"})
    )
    plain = torch.tensor(SentenceTransformer(str(saved), device="cpu").encode(texts))
    for side in ("left", "right"):  # a prompt for everything is that of both sides
        assert (encode(load_model(saved), side, texts) - plain).abs().max() < 1e-5
