"""Tokenizers of open_clip models: open_clip's own, or a transformers one that the configuration is fitted to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dualenc.encoders.hub import first_line, no_foreign_code
from dualenc.encoders.open_clip_folder import CONFIG_FILE, check_config
from dualenc.encoders.tokenizer import save_tokenizer
from dualenc.errors import DualencError
from dualenc.files import read_json_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenize = Callable[[list[str]], Tensor]
"""Texts to token ids (B, context length)."""

CONTEXT_LENGTH = 77
VOCAB_SIZE = 49408
"""open_clip's defaults, of the original CLIP."""


def get_tokenizer(source: str, config: dict[str, Any], context_length: int | None = None) -> Tokenize:
    """The tokenizer that open_clip uses for a model name or `local-dir:FOLDER`.

    Args:
        source: the name or folder.
        config: its `model_cfg`.
        context_length: longest text in tokens; None: as the configuration says.

    Raises:
        DualencError: its files are missing or cannot be fetched.
    """
    import open_clip

    # A tokenizer of open_clip's own takes no such argument.
    trust: dict[str, Any] = {"trust_remote_code": False} if config["text_cfg"].get("hf_tokenizer_name") else {}
    try:
        with no_foreign_code():
            return open_clip.get_tokenizer(source, context_length=context_length, **trust)
    except Exception as error:
        raise DualencError(
            f"{source}: its tokenizer does not load ({first_line(error)}); restore the tokenizer's files"
        ) from error


def folder_tokenizer(folder: Path, config: dict[str, Any], context_length: int | None = None) -> Tokenize:
    """The tokenizer of an open_clip folder.

    Args:
        folder: where its files are.
        config: the folder's `model_cfg`.
        context_length: longest text in tokens; None: as the folder says.

    Raises:
        DualencError: its files are missing, or it could only be made by running code from the folder.
    """
    settings = folder / "tokenizer_config.json"
    check_config(config, str(folder / CONFIG_FILE))
    if settings.is_file() and "auto_map" in read_json_object(settings):
        raise DualencError(f"{folder}: its tokenizer is code of its own, which is not run; save it with a plain one")
    return get_tokenizer(f"local-dir:{folder}", config, context_length)


def config_tokenizer(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Tokenize:
    """The tokenizer of a model made from a configuration.

    Args:
        config: an open_clip configuration; with a tokenizer of one's own, its `text_cfg` is fitted to it in place:
            vocabulary size, and reading the output at the token that ends every text.
        tokenizer: a transformers tokenizer, or None for open_clip's own.

    Raises:
        DualencError: the vocabulary is larger than the configuration's, or nothing marks the end of a text.
    """
    text = config["text_cfg"]
    if tokenizer is None:
        if not text.get("hf_tokenizer_name") and text.get("vocab_size", VOCAB_SIZE) < VOCAB_SIZE:
            raise DualencError(
                f"text_cfg.vocab_size is {text['vocab_size']}: open_clip's tokenizer needs {VOCAB_SIZE}; "
                "leave it out or give a tokenizer"
            )
    else:
        _fit(text, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG_FILE).write_text(json.dumps({"model_cfg": config}))
        if tokenizer is not None:
            save_tokenizer(tokenizer, Path(folder), text.get("context_length", CONTEXT_LENGTH))
        return get_tokenizer(f"local-dir:{folder}", config)


def _fit(text: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    text["hf_tokenizer_name"] = "."  # in a folder, open_clip takes the tokenizer beside its configuration
    if text.setdefault("vocab_size", len(tokenizer)) < len(tokenizer):
        raise DualencError(
            f"text_cfg.vocab_size is {text['vocab_size']}, the tokenizer has {len(tokenizer)} tokens: leave it out"
        )
    if "hf_model_name" in text:
        return
    end = tokenizer("a").input_ids[-1]
    if end not in tokenizer.all_special_ids:
        raise DualencError("the tokenizer ends texts without a special token, where the output could be read")
    text.setdefault("pad_id", tokenizer.pad_token_id)
    text.setdefault("pool_type", "eos")
    text.setdefault("eos_id", end)
