"""Saved text folders have the layout that all versions of sentence-transformers, and servers, read,
where there is one.

The vectors by the new reader are compared in test_sentence_model.py; 2.7, 3.4 and 5.3 were tried by
hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Dropout

from dualenc.encoders import TextEncoder

FLAGS = (
    "cls_token",
    "mean_tokens",
    "max_tokens",
    "mean_sqrt_len_tokens",
    "weightedmean_tokens",
    "lasttoken",
)
"""Keys of pooling up to version 5.3."""


def written(file: Path) -> Any:
    return json.loads(file.read_text())


def types(folder: Path) -> list[str]:
    return [module["type"] for module in written(folder / "modules.json")]


@pytest.mark.parametrize(
    ("pooling", "flag"),
    [("mean", "mean_tokens"), ("cls", "cls_token"), ("last", "lasttoken"), ("max", "max_tokens")],
)
def test_the_keys_of_the_older_layout(
    text_encoder: Any, pooling: str, flag: str, tmp_path: Path
) -> None:
    text_encoder(pooling=pooling, max_length=40).save(tmp_path / "model")
    kinds = ("Transformer", "Pooling", "Normalize")
    assert types(tmp_path / "model") == [f"sentence_transformers.models.{kind}" for kind in kinds]
    settings = written(tmp_path / "model" / "sentence_bert_config.json")
    assert settings == {"max_seq_length": 40, "do_lower_case": False}
    settings = written(tmp_path / "model" / "1_Pooling" / "config.json")
    assert settings.pop("word_embedding_dimension") == 32
    assert settings.pop("include_prompt") is True
    # Version 2.7 takes the mean, too, where that is not false.
    assert settings == {f"pooling_mode_{name}": name == flag for name in FLAGS}


def test_a_dense_map(text_encoder: Any, tmp_path: Path) -> None:
    text_encoder().save(tmp_path / "base")
    modules = [*SentenceTransformer(str(tmp_path / "base"), device="cpu")][:2]
    for name, dense in (("plain", Dense(32, 8)), ("residual", Dense(32, 8, use_residual=True))):
        SentenceTransformer(modules=[*modules, dense], device="cpu").save(str(tmp_path / "theirs"))
        TextEncoder(str(tmp_path / "theirs")).save(tmp_path / name)
    settings = written(tmp_path / "plain" / "2_Dense" / "config.json")
    activation = "torch.nn.modules.activation.Tanh"
    assert settings == {
        "in_features": 32,
        "out_features": 8,
        "bias": True,
        "activation_function": activation,
    }
    assert "use_residual" in written(tmp_path / "residual" / "2_Dense" / "config.json")


@pytest.mark.parametrize(
    "setting", [{"query_length": 6}, {"processing_kwargs": {"text": {"max_length": 5}}}]
)
def test_lengths_that_it_lacks_stay(
    text_encoder: Any, setting: dict[str, Any], texts: list[str], tmp_path: Path
) -> None:
    text_encoder().save(tmp_path / "base")
    modules = [*SentenceTransformer(str(tmp_path / "base"), device="cpu")]
    for name, value in setting.items():
        setattr(modules[0], name, value)
    SentenceTransformer(modules=modules, device="cpu").save(str(tmp_path / "theirs"))
    model = TextEncoder(str(tmp_path / "theirs"))
    model.save(tmp_path / "model")
    expected = SentenceTransformer(str(tmp_path / "theirs"), device="cpu").encode_query(texts)
    whole = TextEncoder(str(tmp_path / "base")).encode_query(texts)
    assert np.abs(whole - expected).max() > 0.01, "the setting matters"
    for opened in (
        model,
        TextEncoder(str(tmp_path / "model")),
        SentenceTransformer(str(tmp_path / "model")),
    ):
        assert np.abs(opened.encode_query(texts) - expected).max() < 1e-6


@pytest.mark.parametrize("pooling", [["cls", "mean"], "mean"])
def test_what_has_no_older_form_stays_as_it_is(
    text_encoder: Any, pooling: Any, tmp_path: Path
) -> None:
    """Several modes of pooling; other modules."""
    model = text_encoder(pooling=pooling)
    if pooling == "mean":
        model.left.parts.append(Dropout(0.1))
    model.save(tmp_path / "model")
    assert not any(
        kind.startswith("sentence_transformers.models.") for kind in types(tmp_path / "model")
    )
    assert "pooling_mode" in written(tmp_path / "model" / "1_Pooling" / "config.json")
