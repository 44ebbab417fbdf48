"""Query-document encoders without a transformer: the mean of a text's token vectors."""

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
    """Train static embeddings: a table of token vectors, sentence-transformers' `StaticEmbedding`.

    The table starts from the word embeddings of a transformer, or at random. A saved table, or one
    of model2vec, opens as `TextEncoder(path)`.

        model = StaticEncoder("sentence-transformers/all-MiniLM-L6-v2")
        model = StaticEncoder(tokenizer="google-bert/bert-base-uncased", dim=256)

    Args:
        words: transformer whose word embeddings and tokenizer to use, a folder or hub name; None
            for a random table.
        tokenizer: fast tokenizer for a random table: folder, hub name or object.
        dim: size of the vectors of a random table; None for 256.
        max_length: longest input in tokens; None for no limit.
        query_prompt: text to put before every query.
        document_prompt: text to put before every document.
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
        # Imported here because it takes seconds.
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Normalize, StaticEmbedding

        if dim is not None and dim < 1:
            raise DualencError(f"dim is {dim}", fix="give at least 1")
        if words is not None and tokenizer is None and dim is None:
            own, table = _read_words(words)
        elif tokenizer is not None and words is None:
            own = load_tokenizer(tokenizer)
            table = torch.randn(len(own), dim or 256)
        else:
            raise DualencError(
                "a static encoder needs either words or a tokenizer",
                fix="give words alone, or tokenizer and dim for a random table",
            )
        with explain("the tokenizer does not fit a static encoder", "use a fast one"):
            static = StaticEmbedding(cast(Any, own), embedding_weights=table)
        # The tokenizer truncates to the transformer's positions, which a table does not have.
        static.tokenizer.no_truncation()
        model = SentenceTransformer(modules=[static, Normalize()], device="cpu")
        super().__init__(
            model, max_length=max_length, query_prompt=query_prompt, document_prompt=document_prompt
        )
        if words is not None:
            self.base = base_metadata(words)


def _read_words(name: str) -> tuple[PreTrainedTokenizerBase, Tensor]:
    """Return the tokenizer of a transformer, and its word embeddings (V, D)."""
    from dualenc.encoders.sentence_model import open_model, side_modules

    module = side_modules(open_model(model_folder(name), torch.float32), "query")[0]
    if not hasattr(module, "model"):
        raise DualencError(
            f"words is {name}, which does not contain a transformer",
            fix="open it as a TextEncoder",
        )
    embeddings: Any = module.model.get_input_embeddings()
    tokenizer = load_tokenizer(module.tokenizer)
    if len(tokenizer) > len(embeddings.weight):
        raise DualencError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model has "
            f"{len(embeddings.weight)} vectors",
            fix="choose another model",
            where=name,
        )
    return tokenizer, embeddings.weight.detach().float()
