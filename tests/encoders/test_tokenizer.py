"""A trained tokenizer is an ordinary one to every tool, and mistakes are told in one line."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from dualenc.encoders import load_tokenizer, train_tokenizer
from dualenc.encoders.tokenizer import lower_casing, save_tokenizer
from dualenc.errors import DualencError


def test_trained_tokenizer_reloads_in_transformers(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    tokenizer.save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    assert reloaded(texts).input_ids == tokenizer(texts).input_ids
    assert reloaded.pad_token_id == tokenizer.pad_token_id
    assert reloaded.model_max_length == 512


def test_texts_begin_with_cls_end_with_sep_and_lose_their_case(tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("A Dog").input_ids)
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert tokenizer("A DOG").input_ids == tokenizer("a dog").input_ids


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """Sentences of made-up words, frequent and rare, some with accents and capitals."""
    draw = random.Random(0)
    syllables = ["ba", "ne", "Tor", "mi", "lü", "ska", "pen", "dro", "é"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(60)]
    return [" ".join(draw.choices(words, weights=range(1, 61), k=12)) + "." for _ in range(200)]


def test_equal_texts_give_an_equal_tokenizer(corpus: list[str]) -> None:
    first, second = (train_tokenizer(iter(corpus), vocab_size=300) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    assert len(first) == 300


@pytest.mark.slow
def test_another_process_with_other_threads_trains_the_same_tokenizer(corpus: list[str]) -> None:
    code = (
        "import json, sys; from dualenc.encoders import train_tokenizer\n"
        "sys.stdout.write(train_tokenizer(json.load(sys.stdin), vocab_size=300).backend_tokenizer.to_str())"
    )
    other = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(corpus),
        env={**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert other.stdout == train_tokenizer(corpus, vocab_size=300).backend_tokenizer.to_str()


def test_a_word_has_the_same_tokens_wherever_it_stands_and_none_is_unknown(tokenizer: PreTrainedTokenizerBase) -> None:
    def tokens(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False).input_ids

    assert tokens("path") == tokens(" path") == tokens("os.path")[-len(tokens("path")) :]
    assert tokens("été") == tokens("ete")
    for text in ("你好 😀", "\u1e9e ß", "x" * 300):
        assert tokenizer.unk_token_id not in tokens(text)
        assert tokenizer.decode(tokens(text)).replace(" ", "") == text.lower().replace(" ", "")


@pytest.mark.parametrize(("given", "size", "message"), [(["a"], 260, "vocab_size is 260"), (["", " "], 300, "empty")])
def test_mistakes_are_one_line(given: list[str], size: int, message: str) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        train_tokenizer(given, vocab_size=size)
    assert "\n" not in str(caught.value)


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=r"no tokenizer loads from there.*tokenizer\.json") as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_without_padding_pads_with_its_end(tokenizer: PreTrainedTokenizerBase) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="[SEP]")
    assert load_tokenizer(bare).pad_token == "[SEP]"
    assert bare.pad_token is None  # a copy was made
    neither = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DualencError, match="no padding token"):
        load_tokenizer(neither)


def test_lower_casing_comes_before_everything_else() -> None:
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    inner = Tokenizer(WordLevel({"[UNK]": 0, "dog": 1}, unk_token="[UNK]"))
    inner.pre_tokenizer = Whitespace()
    cased = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[UNK]")
    assert cased("DOG").input_ids == [0]
    lower_casing(cased)
    assert cased("DOG").input_ids == [1]


def test_saved_file_forgets_the_last_call(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    tokenizer(["a dog", "a"], padding=True, truncation=True, max_length=3)
    save_tokenizer(tokenizer, tmp_path, max_length=17)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert plain.padding is None
    assert plain.truncation is None
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 17
