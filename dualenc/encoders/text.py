"""Query-document encoders on sentence-transformers: towers, and tokenization."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dualenc.encoders.card import base_metadata
from dualenc.encoders.dropout import convert_dropout
from dualenc.encoders.dual import DualEncoder, Prepare, Tower, unit_norm
from dualenc.encoders.packing import first_position, pack, run_packed
from dualenc.encoders.token_table import TokenTable
from dualenc.errors import DualencError, explain
from dualenc.types import Inputs, Pooling

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerBase

WeightType = Literal["float32", "bfloat16"]
ROLES = ("query", "document")
"""Names of the two sides in folders and prompts, left side first."""
Tokens = dict[str, np.ndarray]
"""The tokens of one text: "input_ids" and others, (T,) int32 each."""
MAX_CACHED_TOKENS = 2**24


class TextEncoder(DualEncoder):
    """Encode queries and documents with a `SentenceTransformer`, with shared or separate weights.

    Saved folders open with `SentenceTransformer(folder)`.

        model = TextEncoder("sentence-transformers/all-MiniLM-L6-v2", query_prompt="query: ")
        scores = model.encode_query(["who?"]) @ model.encode_document(["me", "you"]).T

    Args:
        name: base model: a sentence-transformers or transformers folder, a hub name, or the model
            object. None trains from scratch.
        config: transformers configuration with `model_type`, only to train from scratch.
        tokenizer: folder, hub name or object of a tokenizer, only to train from scratch.
        pooling: "mean", "cls", "last" or another mode of sentence-transformers, or several; None
            for the base model's, else "last" for language models and "mean" for others.
        query_prompt: text to put before every query; None for the base model's prompt, if any.
        document_prompt: text to put before every document; None for the base model's prompt, if
            any.
        truncate_dim: keep only this number of leading components; None for the base model's
            setting.
        max_length: longest input in tokens; None for the base model's limit, else all its
            positions.
        shared: share one transformer between both sides; None for the base model's layout, else
            True.
        lora_rank: rank of the adapters to train; 0 trains the transformer's own weights.
        lora_targets: "all-linear", a list of suffixes of layer names, or a regular expression that
            matches whole names.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        dtype: precision of the frozen weights under adapters, which are always float32. "bfloat16"
            halves the memory of a large language model, and requires adapters: small updates of
            bfloat16 weights would round to nothing.
    """

    left: TextTower
    right: TextTower

    def __init__(
        self,
        name: str | SentenceTransformer | None = None,
        *,
        config: dict[str, Any] | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        pooling: Pooling | list[Pooling] | None = None,
        query_prompt: str | None = None,
        document_prompt: str | None = None,
        truncate_dim: int | None = None,
        max_length: int | None = None,
        shared: bool | None = None,
        lora_rank: int = 0,
        lora_targets: str | list[str] = "all-linear",
        gradient_checkpointing: bool = False,
        dtype: WeightType = "float32",
    ) -> None:
        # Imported here because sentence-transformers takes seconds.
        from dualenc.encoders import sentence_model

        if dtype not in get_args(WeightType) or (dtype != "float32" and not lora_rank):
            raise DualencError(
                f"dtype is {dtype!r}",
                fix="choose float32, or bfloat16 with lora_rank",
            )
        towers = []
        with explain("the text encoder fails", "correct its arguments, or choose another model"):
            models = sentence_model.open_sides(
                name, config, tokenizer, shared, getattr(torch, dtype)
            )
            for model in dict.fromkeys(models):
                where = name if isinstance(name, str) else "the model"
                sentence_model.check_vocabulary_sizes(model, where)
                sentence_model.set_up(model, max_length, pooling, lora_rank, lora_targets)
                if gradient_checkpointing:
                    sentence_model.recompute_activations(model)
            for role, model, prompt in zip(ROLES, models, (query_prompt, document_prompt)):
                dim = model.truncate_dim if truncate_dim is None else truncate_dim
                own_prompt = sentence_model.side_prompt(model, role) if prompt is None else prompt
                parts = sentence_model.side_modules(model, role)
                towers.append(TextTower(parts, TextPrepare(parts, own_prompt, role), dim))
        super().__init__(towers[0], towers[1], kind="query-document")
        if self.shares_weights and self.left.parts != self.right.parts:
            raise DualencError(
                "the sides share all weights but differ in their modules",
                fix="save the model without a Router",
            )
        self.prompts = dict(models[0].prompts)
        self.default_prompt = models[0].default_prompt_name
        if isinstance(name, str):
            self.base = base_metadata(name)

    def name_prompts(self, prompts: Mapping[str, tuple[str, str]]) -> None:
        """Add the prompts of data sources to saved folders, as `NAME_query` and `NAME_document`.

        Args:
            prompts: prompts of queries and documents by name of the source, appended to the model's
                own.
        """
        for name, pair in prompts.items():
            for role, tower, prompt in zip(ROLES, (self.left, self.right), pair):
                self.prompts[f"{name}_{role}"] = tower.prepare.prompt + prompt

    def with_towers(self, left: TextTower, right: TextTower) -> TextEncoder:
        """Return a model of two other towers, with the prompts and card facts of this one."""
        model = copy.copy(self)
        DualEncoder.__init__(model, left, right, kind=self.kind)
        return model

    def write(self, folder: Path) -> None:
        """Write a sentence-transformers folder, with a Router if the sides differ in weights."""
        from dualenc.encoders.sentence_model import PROMPT_NAMES, is_of_a_side, save_model

        sides = {role: tower.parts for role, tower in zip(ROLES, (self.left, self.right))}
        if self.shares_weights:
            del sides["document"]
        own = {"query": self.left.prepare.prompt, "document": self.right.prepare.prompt}
        # A side without a prompt would otherwise get one of a related name ("passage" for a
        # document) when the folder is loaded.
        empty = {
            name: ""
            for role in ROLES
            for name in PROMPT_NAMES[role]
            if name in self.prompts and not own[role]
        }
        settings: dict[str, Any] = {"truncate_dim": self.left.truncate_dim}
        # The default prompt would likewise apply to a side without one.
        if all(own.values()) or is_of_a_side(self.default_prompt):
            settings["default_prompt_name"] = self.default_prompt
        save_model(sides, folder, prompts=self.prompts | empty | own, **settings)


class TokenCache:
    """Cache the tokens of texts, which training meets again in each epoch.

    The cache stops growing at `max_tokens`, of 4 bytes each.

        tokenize = lambda texts: [{"input_ids": np.arange(len(text))} for text in texts]
        tokens = TokenCache().tokenize(["one", "two", "one"], tokenize)

    Args:
        max_tokens: maximum number of cached tokens.
    """

    def __init__(self, max_tokens: int = MAX_CACHED_TOKENS) -> None:
        self.tokens_left = max_tokens
        self._tokens: dict[bytes, Tokens] = {}

    def tokenize(
        self, texts: list[str], tokenize: Callable[[list[str]], list[Tokens]]
    ) -> list[Tokens]:
        """Return the tokens of each text; only new texts are tokenized.

        Args:
            texts: texts, which may repeat.
            tokenize: function from a list of texts to their tokens.
        """
        # Digests as keys, because texts take more memory than their tokens.
        keys = [hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts]
        new = {key: text for key, text in zip(keys, texts) if key not in self._tokens}
        made = dict(zip(new, tokenize(list(new.values())))) if new else {}
        result = [made[key] if key in made else self._tokens[key] for key in keys]
        for key, tokens in made.items():
            if len(tokens["input_ids"]) <= self.tokens_left:
                self.tokens_left -= len(tokens["input_ids"])
                self._tokens[key] = tokens
        return result


class TextPrepare(Prepare):
    """Add the side's prompt, tokenize, truncate and pad texts.

    Texts are truncated to `max_length` tokens and padded on the right to the longest of the batch.

        prepare = TextEncoder("sentence-transformers/all-MiniLM-L6-v2").left.prepare
        prepare(["a short text", "another one"])["input_ids"]

    Args:
        parts: modules of a tower; the first one tokenizes.
        prompt: text to put before every text.
        role: "query" or "document", on which a module may depend.

    Attributes:
        token_cache: cache set by the trainer, or None.
        prompt_length: number of leading tokens excluded from pooling; None if all are pooled.
    """

    modality = "text"

    def __init__(self, parts: Sequence[Any], prompt: str, role: str) -> None:
        from dualenc.encoders.sentence_model import text_input

        module = parts[0]
        self.prompt = prompt
        self.max_length = module.max_seq_length
        self.token_cache: TokenCache | None = None
        # Only inputs that the model's forward accepts are kept and cached.
        accepted = getattr(module, "model_forward_params", None)
        self._padding = {"input_ids": getattr(module.tokenizer, "pad_token_id", None) or 0}
        if accepted is None or "token_type_ids" in accepted:
            self._padding["token_type_ids"] = getattr(module.tokenizer, "pad_token_type_id", 0)
        self._preprocess = partial(text_input(module).preprocess, prompt=prompt, task=role)
        pools_prompt = all(getattr(part, "include_prompt", True) for part in parts)
        prompt_length = self._preprocess(["a"]).get("prompt_length")
        self.prompt_length: int | None = None if pools_prompt else prompt_length

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        """Tokenize B texts to tensors (B, T) int64.

        Args:
            items: B texts.
            seeds: ignored, since texts are not augmented.
        """
        texts = list(items)
        cache = self.token_cache
        tokens = self._tokenize(texts) if cache is None else cache.tokenize(texts, self._tokenize)
        inputs = {
            name: self._stack(name, [torch.from_numpy(text[name]) for text in tokens])
            for name in tokens[0]
        }
        ones = [torch.ones(len(text["input_ids"])) for text in tokens]
        inputs["attention_mask"] = self._stack("attention_mask", ones)
        return inputs

    def cache_tokens(self) -> None:
        """Tokenize each text only once from here on, for training."""
        self.token_cache = self.token_cache or TokenCache()

    def may_be_empty(self) -> bool:
        """Return True if a text may yield zero tokens and so a zero vector, as in static models."""
        return "offsets" in self._preprocess([""])

    def join(self, parts: Sequence[Inputs]) -> Inputs | None:
        """Concatenate batches of texts, padded to the longest.

        Args:
            parts: prepared batches.

        Returns:
            The joint batch; None if pooling excludes the side's prompt.
        """
        if self.prompt_length is not None:
            return None
        names = parts[0] if parts else ()
        return {
            name: self._stack(name, [row for part in parts for row in part[name]]) for name in names
        }

    def _stack(self, name: str, rows: list[Tensor]) -> Tensor:
        """Stack rows of tokens (T,) as (n, longest T) int64, padded on the right."""
        return pad_sequence(rows, batch_first=True, padding_value=self._padding.get(name, 0)).long()

    def _tokenize(self, texts: list[str]) -> list[Tokens]:
        """Tokenize texts to unpadded rows."""
        if torch.utils.data.get_worker_info() is not None:
            # DataLoader workers already run in parallel, and a fork after use of the tokenizer's
            # threads would log a warning.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with explain("the tokenizer fails on a text", "restore tokenizer.json"):
            features = self._preprocess(texts)
        names = [name for name in self._padding if name in features]
        arrays = {name: features[name].numpy().astype(np.int32) for name in names}
        # StaticEmbedding concatenates all texts into one row.
        if "offsets" in features:
            return [
                {"input_ids": row} for row in np.split(arrays["input_ids"], features["offsets"][1:])
            ]
        masks = enumerate(features["attention_mask"].numpy().astype(bool))
        return [{name: arrays[name][number][mask] for name in names} for number, mask in masks]


class TextTower(Tower):
    """Run the modules of a sentence-transformers model for one side, then truncate and normalize.

    `TextEncoder` builds it, and `TextEncoder(name).left` is one.

    Args:
        parts: a Transformer or StaticEmbedding, then Pooling, Dense and others. A final Normalize
            is dropped, since the tower itself normalizes.
        prepare: tokenization for the first module.
        truncate_dim: keep only this number of leading components; None for all.
    """

    modality = "text"

    def __init__(
        self, parts: list[Any], prepare: TextPrepare, truncate_dim: int | None = None
    ) -> None:
        super().__init__()
        has_last = type(parts[-1]).__name__ == "Normalize"
        self.parts = parts[:-1] if has_last else parts
        self.prepare: TextPrepare = prepare
        self.is_static = type(parts[0]).__name__ == "StaticEmbedding"
        if self.is_static and not isinstance(parts[0].embedding, TokenTable):
            parts[0].embedding = TokenTable(parts[0].embedding)
        self.backbone = parts[0] if self.is_static else parts[0].model
        self.head = nn.Sequential(*self.parts[1:])
        for part in (self.backbone, self.head):
            convert_dropout(part)
        self.truncate_dim = truncate_dim
        # The last module decides the size; encode a text to learn it.
        with torch.no_grad():
            dim = self.eval()._embed(prepare(["a"])).shape[1]
        if truncate_dim is not None and not 1 <= truncate_dim <= dim:
            raise DualencError(
                f"truncate_dim is {truncate_dim}",
                fix=f"give 1 to {dim}, the model's size",
            )
        self.dim = self.feature_dim = truncate_dim or dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B tokenized texts (B, T), packed or not, to (B, D) unit-norm float32."""
        return unit_norm(self._embed(inputs)[:, : self.dim])

    def _embed(self, inputs: Inputs) -> Tensor:
        """Return the vectors (B, D) of the last module."""
        mask = inputs["attention_mask"]
        features: dict[str, Any]
        # EmbeddingBag takes the concatenated tokens, and the offset of each text.
        if self.is_static:
            lengths = mask.sum(dim=1)
            ids = inputs["input_ids"][mask.bool()]
            features = self.backbone({"input_ids": ids, "offsets": lengths.cumsum(0) - lengths})
        elif "place" in inputs:
            features = {
                "token_embeddings": run_packed(self.backbone, inputs),
                "attention_mask": mask,
            }
        else:
            features = self.parts[0](dict(inputs))
        # Sums over many tokens lose precision in 16 bits, so pool in float32.
        for name in ("token_embeddings", "sentence_embedding"):
            if name in features and features[name].dtype in (torch.bfloat16, torch.float16):
                features[name] = features[name].float()
        if self.prepare.prompt_length is not None:
            features["prompt_length"] = self.prepare.prompt_length
        vectors: Tensor = self.head(features)["sentence_embedding"]
        return vectors

    def pack(self, inputs: Inputs, one_by_one: bool = False) -> Inputs:
        """Pack several texts into a row, if the transformer supports that.

        Args:
            inputs: tokenized texts on the CPU.
            one_by_one: the tower runs uncompiled on a CPU, where a loop over texts is cheap.
        """
        first = None if self.is_static else first_position(self.backbone.config)
        if first is None:
            return inputs
        # Gradient checkpointing recomputes layers after `one_by_one_attention` has ended.
        repeats = any(
            getattr(layer, "gradient_checkpointing", False) for layer in self.backbone.modules()
        )
        return pack(inputs, first, one_by_one and not repeats)
