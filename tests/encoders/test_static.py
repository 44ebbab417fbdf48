"""Static encoders: sentence-transformers' vectors, before and after saving, from words and at
random."""

from __future__ import annotations

from pathlib import Path
from string import ascii_lowercase
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import Whitespace

from dualenc.cli import main
from dualenc.data import PairDataset
from dualenc.encoders import StaticEncoder, TextEncoder, load_model
from dualenc.encoders.token_table import TokenTable
from dualenc.errors import BadSample, DualencError
from dualenc.objectives import InfoNCE
from dualenc.training import Trainer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

pytestmark = pytest.mark.slow


@pytest.fixture
def words(text_encoder: Any, tmp_path: Path) -> str:
    """The folder of a transformer with 32 numbers for each word."""
    text_encoder().save(tmp_path / "words")
    return str(tmp_path / "words")


def word_vectors(words: str) -> np.ndarray:
    """The words of the transformer in a folder."""
    model: Any = SentenceTransformer(words, device="cpu")[0].model  # type: ignore[union-attr]
    return model.embeddings.word_embeddings.weight.detach().numpy()


def test_vectors_are_sentence_transformers_before_and_after_saving(
    words: str, tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    """A text with more tokens than the transformer has positions, too."""
    texts = [*texts, "green grass " * 60]
    ours = StaticEncoder(words, query_prompt="query: ")
    theirs = SentenceTransformer(
        modules=[StaticEmbedding(tokenizer, embedding_weights=word_vectors(words))]
    )
    expected = theirs.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(ours.encode_document(texts), expected, atol=1e-6)
    ours.save(tmp_path / "saved")
    saved = SentenceTransformer(str(tmp_path / "saved"))
    np.testing.assert_allclose(saved.encode_document(texts), expected, atol=1e-6)
    asked = theirs.encode(["query: " + text for text in texts], normalize_embeddings=True)
    np.testing.assert_allclose(saved.encode_query(texts), asked, atol=1e-6)
    again = load_model(tmp_path / "saved")
    np.testing.assert_allclose(again.encode_query(texts), asked, atol=1e-6)
    assert isinstance(again.left.backbone.embedding, TokenTable)


def test_a_random_table_and_a_length(tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(0)
    model = StaticEncoder(tokenizer=tokenizer, max_length=3)
    assert (model.dim, model.num_parameters) == (256, 256 * len(tokenizer))
    long, short = model.encode(["a b c d e f", "a b c"])
    np.testing.assert_allclose(long, short, atol=1e-6)
    torch.manual_seed(0)
    assert torch.equal(
        StaticEncoder(tokenizer=tokenizer).left.backbone.embedding.weight, next(model.parameters())
    )


@pytest.mark.parametrize("texts", [["", ""], ["", "a dog"]])
def test_texts_without_tokens_get_zeros_and_no_gradient(
    tokenizer: PreTrainedTokenizerBase, texts: list[str]
) -> None:
    model = StaticEncoder(tokenizer=tokenizer, dim=4).train()
    vectors = model("left", model.left.prepare(texts))
    assert not vectors[0].any()
    vectors.square().sum().backward()
    gradient = model.left.backbone.embedding.weight.grad
    assert gradient.is_sparse
    assert torch.isfinite(gradient.to_dense()).all()


def test_what_a_user_gets_wrong(
    words: str, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    for arguments, message in (
        ({}, "needs either words or a tokenizer"),
        ({"words": words, "tokenizer": tokenizer}, "needs either words or a tokenizer"),
        ({"words": words, "dim": 33}, "tokenizer and dim for a random table"),
        ({"tokenizer": tokenizer, "dim": 0}, "dim is 0"),
    ):
        with pytest.raises(DualencError, match=message):
            StaticEncoder(**arguments)
    StaticEncoder(words).save(tmp_path / "static")
    with pytest.raises(
        DualencError, match="does not contain a transformer; open it as a TextEncoder"
    ):
        StaticEncoder(str(tmp_path / "static"))


@pytest.fixture
def latin(tmp_path: Path) -> str:
    """A table of Latin letters, whose tokenizer leaves out all others."""
    inner = Tokenizer(BPE({letter: number for number, letter in enumerate(ascii_lowercase)}, []))
    inner.pre_tokenizer = Whitespace()
    model = SentenceTransformer(modules=[StaticEmbedding(inner, embedding_dim=8)], device="cpu")
    model.save(str(tmp_path / "latin"), create_model_card=False)
    return str(tmp_path / "latin")


def test_texts_of_unknown_tokens_are_told(
    latin: str, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    """By encoding, by an index and by a search in it."""
    model = load_model(latin)
    assert not model.encode(["a cat", "東京"])[1].any()
    assert "1 of 2 vectors are zero: the model knows none of the text's tokens" in caplog.text
    (tmp_path / "d.jsonl").write_text(
        '{"id": "1", "text": "a cat"}\n{"id": "2", "text": "東京"}\n', encoding="utf-8"
    )
    index = str(tmp_path / "index")
    assert (
        main(["index", latin, str(tmp_path / "d.jsonl"), "--out", index, "--factory", "Flat"]) == 0
    )
    assert (
        "left out 1 of 2 items; the first, 2: its vector is zero: the model knows none"
        in capsys.readouterr().err
    )
    assert main(["search", index, "東京"]) == 2
    assert (
        "the query has a zero vector: the model knows none of the text's tokens"
        in capsys.readouterr().err
    )
    assert main(["search", index, "cat"]) == 0


def test_training_leaves_out_pairs_of_unknown_tokens(latin: str, tmp_path: Path) -> None:
    pairs = PairDataset(["a cat", "東京", "dog", "map"], ["cat", "dog", "東京", "a map"])
    settings: dict[str, Any] = {
        "output": tmp_path / "run",
        "batch_size": 4,
        "epochs": 1,
        "progress": False,
    }
    result = Trainer(**settings).fit(TextEncoder(latin), pairs, InfoNCE())
    assert result.skipped == 2
    with pytest.raises(
        BadSample,
        match=r"pair [12]: (left|right) is '東京': the model knows none of the text's tokens",
    ):
        Trainer(**settings, on_error="raise", overwrite=True).fit(
            TextEncoder(latin), pairs, InfoNCE()
        )


def test_a_tokenizer_that_fails_on_a_text_is_reported_in_one_line(tmp_path: Path) -> None:
    inner = Tokenizer(WordLevel({"a": 0, "cat": 1}, unk_token="[UNK]"))
    model = SentenceTransformer(modules=[StaticEmbedding(inner, embedding_dim=8)], device="cpu")
    model.save(str(tmp_path / "words"), create_model_card=False)
    with pytest.raises(
        DualencError, match=r"the tokenizer fails on a text \(WordLevel error: Missing \[UNK\]"
    ):
        load_model(tmp_path / "words").encode(["a", "dog"])
