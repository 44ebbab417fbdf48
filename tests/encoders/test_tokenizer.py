"""A trained tokenizer is an ordinary one to every tool, and mistakes are told in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dualenc.encoders import TextEncoder, load_tokenizer, train_tokenizer
from dualenc.encoders.text import TokenCache, Tokens
from dualenc.encoders.tokenizer import forget_last_call
from dualenc.errors import DualencError


def test_trained_tokenizer_reloads_in_transformers(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded(texts).input_ids == tokenizer(texts).input_ids
    assert reloaded.pad_token_id == tokenizer.pad_token_id
    assert reloaded.model_max_length == 512
    assert tokenizer.convert_ids_to_tokens(tokenizer("A").input_ids)[::2] == ["[CLS]", "[SEP]"]
    assert tokenizer("A DOG").input_ids == tokenizer("a dog").input_ids


def test_equal_texts_give_an_equal_tokenizer() -> None:
    corpus = [f"wörter {number * 7919 % 1000:x} Tor{number % 13}" for number in range(300)]
    first, second = (train_tokenizer(iter(corpus), vocab_size=300) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 300


def test_a_word_has_the_same_tokens_wherever_it_stands_and_none_is_unknown(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    assert tokens("path") == tokens(" path") == tokens("os.path")[-len(tokens("path")) :]
    assert tokens("Été") == tokens("e\u0301te\u0301"), "of any composition"
    for text, other in (("für", "fur"), ("má", "mà"), ("ที่", "ท"), ("が", "か"), ("нё", "не")):
        assert tokens(text) != tokens(other)
    for text in ("你好 😀", "\u1e9e ß", "x" * 300):
        assert tokenizer.unk_token_id not in tokens(text)
        assert tokenizer.decode(tokens(text)).replace(" ", "") == text.lower().replace(" ", "")


@pytest.mark.parametrize(
    ("given", "size", "message"), [(["a"], 260, "vocab_size is 260"), (["", " "], 300, "empty")]
)
def test_mistakes_are_one_line(given: list[str], size: int, message: str) -> None:
    with pytest.raises(DualencError, match=message):
        train_tokenizer(given, vocab_size=size)


def test_one_without_padding_pads_with_its_end(tokenizer: PreTrainedTokenizerBase) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="[SEP]")
    assert load_tokenizer(bare).pad_token == "[SEP]"
    assert bare.pad_token is None  # a copy was made
    neither = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DualencError, match="lacks a padding token"):
        load_tokenizer(neither)


def test_saved_file_forgets_the_last_call(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    tokenizer(["a dog", "a"], padding=True, truncation=True, max_length=3)
    forget_last_call(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.padding is None
    assert plain.truncation is None


def test_a_cache_tokenises_each_text_once_and_changes_nothing(bert: dict[str, Any]) -> None:
    texts = ["red fox", "a dog of some words more", "red fox", ""]
    tokenizer = train_tokenizer(texts, 300)
    prepare = TextEncoder(config=bert, tokenizer=tokenizer, query_prompt="query: ").left.prepare
    expected = tokenizer(["query: " + text for text in texts], padding=True, return_tensors="pt")
    tokenized: list[str] = []
    own = prepare._tokenize

    def tokenize(new: list[str]) -> list[Tokens]:
        tokenized.extend(new)
        return own(new)

    prepare._tokenize = tokenize  # type: ignore[method-assign]
    room_for_two = int(expected["attention_mask"][:2].sum())
    prepare.token_cache = TokenCache(room_for_two)
    for _ in range(3):
        inputs = prepare(texts)
        assert set(inputs) == set(expected)
        for name, values in inputs.items():
            assert values.dtype == torch.int64
            assert torch.equal(values, expected[name])
    assert [tokenized.count(text) for text in texts] == [1, 1, 1, 3]
