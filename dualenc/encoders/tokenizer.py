"""Tokenizers: trained from text, or loaded from a folder or the hub."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import ByteLevelBPETokenizer, Tokenizer
from tokenizers.normalizers import NFC, BertNormalizer
from tokenizers.normalizers import Sequence as Normalizers
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel, Sequence
from tokenizers.processors import BertProcessing

from dualenc.errors import DualencError, explain
from dualenc.types import check_several

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SPECIAL_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}

MIN_VOCABULARY = len(SPECIAL_TOKENS) + 256
"""Size of a vocabulary without merges: the special tokens and all bytes."""

VOCABULARY_FILES = ("tokenizer.json", "vocab.*", "*.model", "*.tiktoken")
"""Every folder with a tokenizer has one of these."""


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, max_length: int = 512, min_frequency: int = 2
) -> PreTrainedTokenizerBase:
    """Train a lower-casing tokenizer by byte-level BPE.

    BPE is by Sennrich et al. 2016 (arXiv:1508.07909), on bytes by Radford et al. 2019. A word has
    the same tokens behind a space and behind punctuation, accents are kept, and no text has unknown
    tokens.

    Args:
        texts: training texts, read once; equal texts in equal order give an equal tokenizer.
        vocab_size: maximum number of tokens, including the special ones and the 256 bytes.
        max_length: longest input in tokens that the tokenizer recommends.
        min_frequency: minimum number of occurrences of a pair of tokens to be merged.
    """
    from transformers import PreTrainedTokenizerFast

    check_several("texts", texts)
    if vocab_size < MIN_VOCABULARY:
        raise DualencError(
            f"vocab_size is {vocab_size}",
            fix=f"give {MIN_VOCABULARY} or more, for all bytes",
        )
    remaining = iter(texts)
    first = next((text for text in remaining if text.strip()), None)
    if first is None:
        raise DualencError("the texts to train a tokenizer on are empty", fix="give some text")
    bpe = ByteLevelBPETokenizer()
    # Keep accents: without its marks, a Thai, Hindi or Japanese word becomes a different word.
    bpe.normalizer = Normalizers([NFC(), BertNormalizer(lowercase=True, strip_accents=False)])
    # ByteLevel puts a space before every word, so the first token of a word differs from others.
    words = [BertPreTokenizer(), ByteLevel(add_prefix_space=True, use_regex=False)]
    bpe.pre_tokenizer = Sequence(words)
    bpe.train_from_iterator(
        itertools.chain([first], remaining),
        vocab_size,
        min_frequency,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS.values()),
    )
    ends = [(token, bpe.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    bpe.post_processor = BertProcessing(*ends)
    inner = Tokenizer.from_str(bpe.to_str())
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, model_max_length=max_length, **SPECIAL_TOKENS
    )


def load_tokenizer(
    source: str | os.PathLike[str] | PreTrainedTokenizerBase,
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the hub, or copy one; it pads on the right.

    Args:
        source: folder, hub name or tokenizer object.
    """
    tokenizer: PreTrainedTokenizerBase
    if isinstance(source, (str, os.PathLike)):
        from transformers import AutoTokenizer

        if os.path.isdir(source):
            check_vocabulary(Path(source))
        with explain(
            f"{source}: does not contain a tokenizer", "give a folder with a tokenizer.json"
        ):
            tokenizer = AutoTokenizer.from_pretrained(os.fspath(source), trust_remote_code=False)
    else:
        tokenizer = copy.deepcopy(source)
    pad_behind(tokenizer)
    return tokenizer


def pad_behind(tokenizer: PreTrainedTokenizerBase) -> None:
    """Make a tokenizer pad on the right, with its end token if it lacks a padding token."""
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise DualencError(
            f"the tokenizer {tokenizer.name_or_path} lacks a padding token",
            fix="set its pad_token",
        )
    # Padding on the right does not move positions. Some classes default to the left unless a
    # saved folder states the side, hence the entry in `init_kwargs`.
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"


def check_vocabulary(folder: Path) -> None:
    """Raise if a folder lacks a vocabulary; transformers would create an empty tokenizer."""
    if not any(any(folder.glob(name)) for name in VOCABULARY_FILES):
        raise DualencError(
            "does not contain a tokenizer",
            fix="give a folder with a tokenizer.json",
            where=folder,
        )


def forget_last_call(tokenizer: PreTrainedTokenizerBase) -> None:
    """Clear padding and truncation that the last call left in a tokenizer, before saving it."""
    if tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
