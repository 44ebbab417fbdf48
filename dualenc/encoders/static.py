"""Query-document encoders without a transformer: the vector of a text is the mean of the vectors of
its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from dualenc.encoders.card import base_metadata
from dualenc.encoders.hub import model_folder
from dualenc.encoders.text import TextEncoder
from dualenc.encoders.tokenizer import load_tokenizer
from dualenc.errors import DualencError, explain

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StaticEncoder(TextEncoder):
    """Queries and documents by a table of token vectors: sentence-transformers' `StaticEmbedding`,
    trained from here.

    It begins as the word embeddings of a transformer, or at random. A table that is saved already,
    and those of model2vec, open as `TextEncoder(path)`.

        StaticEncoder("sentence-transformers/all-MiniLM-L6-v2")
        StaticEncoder(tokenizer="google-bert/bert-base-uncased", dim=256)

    Args:
        words: the transformer with its tokenizer, a folder or hub name; None: at random.
        tokenizer: of a random table: folder, hub name or tokenizer object, of the fast kind.
        dim: size of the vectors of a random table; None: 256.
        max_length: longest input in tokens; None: no limit.
        query_prompt, document_prompt: put before every query, and before every document.
    """

    def __init__(
        self,
        words: str | None = None,
        *,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        dim: int | None = None,
        max_length: int | None = None,
        query_prompt: str = "",
        document_prompt: str = "",
    ) -> None:
        # Takes seconds to import.
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

        if dim is not None and dim < 1:
            raise DualencError(f"dim is {dim}; give at least 1")
        if words is not None and tokenizer is None and dim is None:
            own, table = _read_words(words)
        elif tokenizer is not None and words is None:
            own = load_tokenizer(tokenizer)
            table = torch.randn(len(own), dim or 256)
        else:
            raise DualencError(
                "give either words, or the tokenizer of a random table, whose size is dim"
            )
        with explain("the tokenizer cannot make a static encoder", "take a fast one"):
            static = StaticEmbedding(cast(Any, own), embedding_weights=table)
        # Of the transformer, whose positions are limited.
        static.tokenizer.no_truncation()
        model = SentenceTransformer(modules=[static, Normalize()], device="cpu")
        super().__init__(
            model, max_length=max_length, query_prompt=query_prompt, document_prompt=document_prompt
        )
        if words is not None:
            self.base = base_metadata(words)


def _read_words(name: str) -> tuple[PreTrainedTokenizerBase, Tensor]:
    """The tokenizer of a transformer, and its word embeddings (V, D)."""
    from dualenc.encoders.sentence_model import open_model, side_modules

    module = side_modules(open_model(model_folder(name), torch.float32), "query")[0]
    if not hasattr(module, "model"):
        raise DualencError(f"words is {name}, which has no transformer; open it as a TextEncoder")
    embeddings: Any = module.model.get_input_embeddings()
    tokenizer = load_tokenizer(module.tokenizer)
    if len(tokenizer) > len(embeddings.weight):
        raise DualencError(
            f"{name}: has {len(tokenizer)} tokens, but {len(embeddings.weight)} vectors"
        )
    return tokenizer, embeddings.weight.detach().float()
