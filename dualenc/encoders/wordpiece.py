"""Learning the pieces of a WordPiece vocabulary, the same ones every time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

CONTINUED = "##"
"""Marks pieces that do not begin a word."""

FIRST_CODE = 0xF0000
"""Where the private characters begin that stand for those inside words."""


def learn_pieces(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str], min_frequency: int
) -> dict[str, int]:
    """Merge the most frequent neighbours until the vocabulary is full (Sennrich et al. 2016).

    The trainer of `tokenizers` numbers the pieces inside words in the order of a hash table, which differs from run
    to run, and breaks ties by these numbers. So it is given words whose inner letters are other characters already:
    then it has no such pieces to number.

    Args:
        texts: what to learn from, lower-cased and stripped of accents; read once.
        vocab_size: largest number of pieces.
        special_tokens: the first pieces.
        min_frequency: how often a pair must occur to be merged.

    Returns:
        Number by piece.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.trainers import BpeTrainer

    disguise = _Disguise()
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = WhitespaceSplit()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        limit_alphabet=2000,
        show_progress=False,
    )
    learner.train_from_iterator(_disguised(texts, disguise), trainer)
    return {disguise.undo(piece): number for piece, number in learner.get_vocab().items()}


class _Disguise:
    """Replaces every character of a word but the first by a private one."""

    def __init__(self) -> None:
        self.private: dict[str, str] = {}
        self.public: dict[str, str] = {}

    def put_on(self, word: str) -> str:
        return word[0] + "".join(map(self._private, word[1:]))

    def undo(self, piece: str) -> str:
        prefix = CONTINUED if piece[0] in self.public else ""
        return prefix + "".join(self.public.get(character, character) for character in piece)

    def _private(self, character: str) -> str:
        if character not in self.private:
            other = chr(FIRST_CODE + len(self.private))
            self.private[character], self.public[other] = other, character
        return self.private[character]


def _disguised(texts: Iterable[str], disguise: _Disguise) -> Iterator[str]:
    """Each text as its disguised words with spaces between."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import BertPreTokenizer

    normalizer, splitter = BertNormalizer(lowercase=True), BertPreTokenizer()
    seen: dict[str, str] = {}
    for text in texts:
        words = [word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(text))]
        for word in words:
            if word not in seen:
                seen[word] = disguise.put_on(word)
        yield " ".join(seen[word] for word in words)
