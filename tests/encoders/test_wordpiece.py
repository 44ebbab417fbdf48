"""The pieces are those that `tokenizers` would learn, but the same ones every time."""

from __future__ import annotations

import random

import pytest
from tokenizers import BertWordPieceTokenizer

from dualenc.encoders.tokenizer import learn_pieces

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """Sentences of made-up words, frequent and rare, some with accents and capitals."""
    draw = random.Random(0)
    syllables = ["ba", "ne", "Tor", "mi", "lü", "ska", "pen", "dro", "é"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(60)]
    return [" ".join(draw.choices(words, weights=range(1, 61), k=12)) + "." for _ in range(200)]


def test_same_texts_give_the_same_numbers(corpus: list[str]) -> None:
    assert learn_pieces(iter(corpus), 90, SPECIAL, 2) == learn_pieces(iter(corpus), 90, SPECIAL, 2)


def test_splits_as_well_as_what_the_trainer_of_tokenizers_learns(corpus: list[str]) -> None:
    # Not the same pieces: ties are broken differently, by the reference itself from run to run.
    reference = BertWordPieceTokenizer(lowercase=True)
    reference.train_from_iterator(corpus, vocab_size=90, min_frequency=2, show_progress=False)
    pieces = learn_pieces(corpus, 90, SPECIAL, 2)
    assert len(pieces) == 90
    ours = BertWordPieceTokenizer(vocab=pieces, lowercase=True)
    expected, found = (sum(len(t.encode(text, add_special_tokens=False)) for text in corpus) for t in (reference, ours))
    assert found <= 1.02 * expected


def test_inner_pieces_are_marked_and_numbers_are_dense(corpus: list[str]) -> None:
    pieces = learn_pieces(corpus, 90, SPECIAL, 2)
    assert sorted(pieces.values()) == list(range(len(pieces)))
    assert [pieces[token] for token in SPECIAL] == list(range(5))
    assert {"b", "##a", "t"} <= set(pieces)
    assert not any(ord(character) >= 0xF0000 for piece in pieces for character in piece)
