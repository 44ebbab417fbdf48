"""Query-document encoders on transformers."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.pooling import POOLINGS, Pooling, pool
from dualenc.encoders.tokenizer import load_tokenizer
from dualenc.encoders.tower import Prepare, Tower, unit_norm
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

DEFAULT_MAX_LENGTH = 512


class TextPrepare(Prepare):
    """Add the side's prompt, tokenize, truncate, pad to the longest of the batch.

    Args:
        tokenizer: a transformers tokenizer.
        prompt: put before every text as it is, without a space between.
        max_length: longest input in tokens, special ones and prompt included.
    """

    modality = "text"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str = "", max_length: int = 512) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_length = max_length

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> dict[str, Tensor]:
        if torch.utils.data.get_worker_info() is not None:
            # Workers are parallel already; this also spares tokenizers' warning about forked threads.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        texts = [self.prompt + text for text in items]
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt")
        return dict(batch)

    def lengths(self, items: Sequence[str]) -> list[int]:
        return [len(text) for text in items]


class TextTower(Tower):
    """A transformer's last hidden state, pooled and normalised.

    Args:
        backbone: a transformers model with `last_hidden_state` (B, T, D).
        prepare: the side's tokenizer and prompt.
        pooling: "mean", "cls" or "last".
    """

    modality = "text"

    def __init__(self, backbone: PreTrainedModel, prepare: TextPrepare, pooling: Pooling) -> None:
        super().__init__()
        self.backbone = backbone
        self.prepare: TextPrepare = prepare
        self.pooling = pooling
        self.dim = self.feature_dim = backbone.config.hidden_size

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        hidden = self.backbone(**inputs).last_hidden_state
        return unit_norm(pool(hidden, inputs["attention_mask"], self.pooling))


class TextEncoder(DualEncoder):
    """Queries and documents through a transformer: shared weights, or one set per side.

    Args:
        config: transformers configuration as a dict with `model_type`; the vocabulary follows the tokenizer.
        tokenizer: folder, hub name or tokenizer object.
        pooling: "mean", "cls" or "last".
        query_prompt: put before every query.
        document_prompt: put before every document.
        max_length: longest input in tokens.
        shared: one transformer for both sides, or two.

    Raises:
        DualencError: an argument is missing or does not fit the others.
    """

    def __init__(
        self,
        *,
        config: dict[str, Any],
        tokenizer: str | PreTrainedTokenizerBase,
        pooling: Pooling = "mean",
        query_prompt: str = "",
        document_prompt: str = "",
        max_length: int | None = None,
        shared: bool = True,
    ) -> None:
        if pooling not in POOLINGS:
            raise DualencError(f"pooling is {pooling!r}: choose one of {', '.join(POOLINGS)}")
        own_tokenizer = load_tokenizer(tokenizer)
        left = build_backbone(config, own_tokenizer)
        right = left if shared else build_backbone(config, own_tokenizer)
        length = max_length or min(DEFAULT_MAX_LENGTH, left.config.max_position_embeddings)
        towers = [
            TextTower(backbone, TextPrepare(own_tokenizer, prompt, length), pooling)
            for backbone, prompt in ((left, query_prompt), (right, document_prompt))
        ]
        super().__init__(towers[0], towers[1], kind="query-document")


def build_backbone(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    """A transformer with random weights (torch's generator) that fits the tokenizer."""
    from transformers import AutoConfig, AutoModel

    fields = copy.deepcopy(config)
    fields.setdefault("vocab_size", len(tokenizer))
    fields.setdefault("pad_token_id", tokenizer.pad_token_id)
    return AutoModel.from_config(AutoConfig.for_model(**fields))
