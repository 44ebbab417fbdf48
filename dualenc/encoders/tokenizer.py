"""Tokenizers: trained from text, or loaded from a folder or the hub."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.encoders.hub import first_line
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
"""One of these is in every folder that has a tokenizer."""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int = 512, min_frequency: int = 2
) -> PreTrainedTokenizerBase:
    """Train a lower-casing WordPiece tokenizer, in the manner of BERT.

    Args:
        texts: what to learn from; read once. Equal texts in equal order give an equal tokenizer.
        vocab_size: largest number of tokens, special ones included.
        max_length: longest input in tokens that the tokenizer recommends.
        min_frequency: how often a piece must occur to become a token.

    Returns:
        A tokenizer whose `save_pretrained(folder)` loads in transformers and sentence-transformers.

    Raises:
        DualencError: there is no text, or `vocab_size` leaves no room beside the special tokens.
    """
    from tokenizers import BertWordPieceTokenizer
    from transformers import PreTrainedTokenizerFast

    special = list(SPECIAL_TOKENS.values())
    if vocab_size <= len(special):
        raise DualencError(f"vocab_size is {vocab_size}: ask for more than the {len(special)} special tokens")
    pieces = learn_pieces(texts, vocab_size, special, min_frequency)
    if len(pieces) <= len(special):
        raise DualencError("the texts to train a tokenizer on are empty: give some text")
    inner = BertWordPieceTokenizer(vocab=pieces, lowercase=True)._tokenizer
    return PreTrainedTokenizerFast(tokenizer_object=inner, model_max_length=max_length, **SPECIAL_TOKENS)


def load_tokenizer(source: str | os.PathLike[str] | PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A tokenizer of our own to configure: loaded from a folder or hub name, or a copy of the one given.

    A tokenizer without padding token pads with its end token, as is usual for decoder-only models.

    Raises:
        DualencError: there is no tokenizer at the source, or it cannot pad.
    """
    tokenizer = copy.deepcopy(source) if not isinstance(source, (str, os.PathLike)) else _from_pretrained(source)
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise DualencError(f"tokenizer {source} has no padding token: set its pad_token and save it again")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def lower_casing(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer lower-case its input first."""
    from tokenizers.normalizers import Lowercase, Sequence

    backend = tokenizer.backend_tokenizer
    backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, max_length: int) -> None:
    """Write a tokenizer without the padding and truncation that its last call left in it."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.model_max_length = max_length
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
    tokenizer.save_pretrained(folder)


def _from_pretrained(source: str | os.PathLike[str]) -> Any:
    from transformers import AutoTokenizer

    if os.path.isdir(source) and not any(any(Path(source).glob(name)) for name in VOCABULARY_FILES):
        # transformers would make an empty one
        raise DualencError(f"{source}: no tokenizer loads from there; give a folder that has tokenizer.json")
    try:
        return AutoTokenizer.from_pretrained(os.fspath(source), trust_remote_code=False)
    except Exception as error:
        raise DualencError(
            f"{source}: no tokenizer loads from there ({first_line(error)}); give a folder that has tokenizer.json"
        ) from error
