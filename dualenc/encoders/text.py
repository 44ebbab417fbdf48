"""Query-document encoders on sentence-transformers: towers, and how texts become token ids."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from dualenc.encoders.card import base_metadata
from dualenc.encoders.dropout import convert_dropout
from dualenc.encoders.dual import DualEncoder, Prepare, Tower, check_items, unit_norm
from dualenc.encoders.packing import first_position, pack, run_packed
from dualenc.encoders.token_table import TokenTable
from dualenc.encoders.tokenizer import TokenCache, Tokens
from dualenc.errors import DualencError, explain
from dualenc.types import Inputs, Pooling

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from transformers import PreTrainedTokenizerBase

WeightType = Literal["float32", "bfloat16"]
ROLES = ("query", "document")
"""Names of the two sides in folders and prompts, left first."""


class TextEncoder(DualEncoder):
    """Queries and documents through a `SentenceTransformer`: shared weights, or one set per side.

    Args:
        name: base model: a sentence-transformers or transformers folder, a hub name, or the model
            itself. None: from scratch.
        config: from scratch only: a transformers configuration as a dict with `model_type`.
        tokenizer: from scratch only: folder, hub name or object.
        pooling: "mean", "cls", "last" or another mode of sentence-transformers, or several; None:
            the base model's, otherwise "last" for language models and "mean" for others.
        query_prompt: put before every query; None: the base model's, otherwise nothing.
        document_prompt: put before every document; likewise.
        truncate_dim: use only so many of the first components of the vectors; None: as the base
            model, otherwise all.
        max_length: longest input in tokens; None: the base model's, otherwise all its positions.
        shared: one transformer for both sides, or two; None: as the base model, otherwise one.
        lora_rank: train adapters of this rank instead of the transformer's own weights; 0 trains
            the weights.
        lora_targets: "all-linear", a list of endings of the names of layers, or a regular
            expression of whole names.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        dtype: of the weights that adapters leave as they are; adapters are always in float32.
            "bfloat16" halves the memory of a large language model, and needs adapters: small
            updates would round to nothing.
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
        from dualenc.encoders import sentence_model  # takes seconds

        if dtype not in get_args(WeightType) or (dtype != "float32" and not lora_rank):
            raise DualencError(f"dtype is {dtype!r}: choose float32, or bfloat16 with lora_rank")
        towers = []
        with explain("no encoder of texts", "correct its arguments, or choose another model"):
            models = sentence_model.open_sides(
                name, config, tokenizer, shared, getattr(torch, dtype)
            )
            for model in dict.fromkeys(models):
                where = name if isinstance(name, str) else "the model"
                sentence_model.check_vocabulary_sizes(model, where)
                sentence_model.set_up(model, max_length, pooling, lora_rank, lora_targets)
                if gradient_checkpointing:
                    model.gradient_checkpointing_enable({"use_reentrant": False})
            for role, model, prompt in zip(ROLES, models, (query_prompt, document_prompt)):
                dim = model.truncate_dim if truncate_dim is None else truncate_dim
                own_prompt = sentence_model.side_prompt(model, role) if prompt is None else prompt
                parts = sentence_model.side_modules(model, role)
                towers.append(TextTower(parts, TextPrepare(parts, own_prompt, role), dim))
        super().__init__(towers[0], towers[1], kind="query-document")
        if self.shares_weights and self.left.parts != self.right.parts:
            raise DualencError("the sides share weights, but not modules; leave the Router out")
        self.prompts = dict(models[0].prompts)
        self.default_prompt = models[0].default_prompt_name
        if isinstance(name, str):
            self.base = base_metadata(name)

    def name_prompts(self, prompts: Mapping[str, tuple[str, str]]) -> None:
        """Have saved folders know `NAME_query` and `NAME_document`, the prompts of a source behind
        the model's own."""
        for name, pair in prompts.items():
            for role, tower, prompt in zip(ROLES, (self.left, self.right), pair):
                self.prompts[f"{name}_{role}"] = tower.prepare.prompt + prompt

    def with_towers(self, left: TextTower, right: TextTower) -> TextEncoder:
        """A model of two other towers, with the prompts and the card's facts of this one."""
        model = copy.copy(self)
        DualEncoder.__init__(model, left, right, kind=self.kind)
        return model

    def write(self, folder: Path) -> None:
        """Write a sentence-transformers folder, with a Router where the sides have different
        weights."""
        from dualenc.encoders.sentence_model import PROMPT_NAMES, is_of_a_side, save_model

        sides = {role: tower.parts for role, tower in zip(ROLES, (self.left, self.right))}
        if self.shares_weights:
            del sides["document"]
        own = {"query": self.left.prepare.prompt, "document": self.right.prepare.prompt}
        # A side without a prompt would get one of another name when the folder is loaded.
        empty = {
            name: ""
            for role in ROLES
            for name in PROMPT_NAMES[role]
            if name in self.prompts and not own[role]
        }
        settings: dict[str, Any] = {"truncate_dim": self.left.truncate_dim}
        # Likewise the default one.
        if all(own.values()) or is_of_a_side(self.default_prompt):
            settings["default_prompt_name"] = self.default_prompt
        save_model(sides, folder, prompts=self.prompts | empty | own, **settings)


class TextPrepare(Prepare):
    """Add the side's prompt, tokenize, truncate to `max_length` tokens, pad behind to the longest
    of the batch.

    Args:
        parts: the modules of a tower, of which the first makes the tokens.
        prompt: put before every text.
        role: "query" or "document", on which a module may depend.

    Attributes:
        prompt_length: number of first tokens that are not pooled; None: all are.
    """

    modality = "text"

    def __init__(self, parts: Sequence[Any], prompt: str, role: str) -> None:
        from dualenc.encoders.sentence_model import text_input

        module = parts[0]
        self.prompt = prompt
        self.max_length = module.max_seq_length
        self.token_cache: TokenCache | None = None
        accepted = getattr(module, "model_forward_params", None)
        self._padding = {"input_ids": getattr(module.tokenizer, "pad_token_id", None) or 0}
        if accepted is None or "token_type_ids" in accepted:
            self._padding["token_type_ids"] = getattr(module.tokenizer, "pad_token_type_id", 0)
        self._preprocess = partial(text_input(module).preprocess, prompt=prompt, task=role)
        pools_prompt = all(getattr(part, "include_prompt", True) for part in parts)
        prompt_length = self._preprocess(["a"]).get("prompt_length")
        self.prompt_length: int | None = None if pools_prompt else prompt_length

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        """Collate B texts, see `Prepare.__call__`."""
        check_items(items, "text")
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
        """Tokenize each text once only, for training."""
        self.token_cache = self.token_cache or TokenCache()

    def may_be_empty(self) -> bool:
        """Whether a text may have no tokens, as in static models, and so a zero vector."""
        return "offsets" in self._preprocess([""])

    def join(self, parts: Sequence[Inputs]) -> Inputs | None:
        """Several batches of texts as one, padded to the longest; None where pooling leaves out the
        side's prompt."""
        if self.prompt_length is not None:
            return None
        names = parts[0] if parts else ()
        return {
            name: self._stack(name, [row for part in parts for row in part[name]]) for name in names
        }

    def _stack(self, name: str, rows: list[Tensor]) -> Tensor:
        """Rows of tokens (T,) as (n, longest T) int64, padded behind."""
        return pad_sequence(rows, batch_first=True, padding_value=self._padding.get(name, 0)).long()

    def _tokenize(self, texts: list[str]) -> list[Tokens]:
        if torch.utils.data.get_worker_info() is not None:
            # Workers are parallel already; this also spares tokenizers' warning about forked
            # threads.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        with explain("the tokenizer fails on a text", "restore tokenizer.json"):
            features = self._preprocess(texts)
        names = [name for name in self._padding if name in features]
        arrays = {name: features[name].numpy().astype(np.int32) for name in names}
        if "offsets" in features:  # the texts of a StaticEmbedding are in one row
            return [
                {"input_ids": row} for row in np.split(arrays["input_ids"], features["offsets"][1:])
            ]
        masks = enumerate(features["attention_mask"].numpy().astype(bool))
        return [{name: arrays[name][number][mask] for name in names} for number, mask in masks]


class TextTower(Tower):
    """The modules of a sentence-transformers model for one side; their vectors are cut and
    normalised.

    Args:
        parts: a Transformer or StaticEmbedding, then Pooling, Dense and others. A last Normalize is
            left out, since the tower itself normalises.
        prepare: makes token ids for the first of them.
        truncate_dim: use only so many of the first components of the vectors; None: all.
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
        with torch.no_grad():
            dim = self.eval()._embed(prepare(["a"])).shape[1]
        if truncate_dim is not None and not 1 <= truncate_dim <= dim:
            raise DualencError(f"truncate_dim is {truncate_dim}: give 1 to {dim}, the model's size")
        self.dim = self.feature_dim = truncate_dim or dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B tokenized texts, each (B, T), or what `pack` made of them, to (B, D) unit-norm
        float32."""
        return unit_norm(self._embed(inputs)[:, : self.dim])

    def _embed(self, inputs: Inputs) -> Tensor:
        """The vectors (B, D) of the last module."""
        mask = inputs["attention_mask"]
        features: dict[str, Any]
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
        for name in ("token_embeddings", "sentence_embedding"):
            if name in features and features[name].dtype in (torch.bfloat16, torch.float16):
                features[name] = features[name].float()
        if self.prepare.prompt_length is not None:
            features["prompt_length"] = self.prepare.prompt_length
        vectors: Tensor = self.head(features)["sentence_embedding"]
        return vectors

    def pack(self, inputs: Inputs, one_by_one: bool = False) -> Inputs:
        """Several texts in a row, where the transformer takes them so."""
        first = None if self.is_static else first_position(self.backbone.config)
        if first is None:
            return inputs
        # Gradient checkpointing repeats layers, by then with the usual attention.
        repeats = any(
            getattr(layer, "gradient_checkpointing", False) for layer in self.backbone.modules()
        )
        return pack(inputs, first, one_by_one and not repeats)
