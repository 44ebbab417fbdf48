"""Query-document encoders on transformers: towers, pooling, adapters, and backbones made, loaded and written."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dualenc.encoders.dense import Dense, Normalize, read_dense
from dualenc.encoders.dropout import convert_dropout
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Prepare, Tower, check_items, unit_norm
from dualenc.encoders.hub import base_metadata, check_safetensors, model_folder
from dualenc.encoders.lora import ALPHA_PER_RANK
from dualenc.encoders.packing import first_position, pack, run_packed
from dualenc.encoders.sentence_folder import (
    MIN_LENGTH,
    SentenceFolder,
    read_sentence_folder,
    write_sentence_files,
)
from dualenc.encoders.tokenizer import TokenCache, Tokens, load_tokenizer, lower_casing, save_tokenizer
from dualenc.errors import DualencError, explain
from dualenc.files import write_json
from dualenc.reading import read_json_object
from dualenc.types import Inputs, Pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

POOLINGS: tuple[str, ...] = get_args(Pooling)

WeightType = Literal["float32", "bfloat16"]
ROLES = ("query", "document")
"""Names of the two sides in folders and prompts, left first."""

MAX_LENGTH = 512
"""Longest input in tokens where neither the model nor the tokenizer nor the user sets a limit."""


class TextEncoder(DualEncoder):
    """Queries and documents through a transformer: shared weights, or one set per side.

    Args:
        name: base model: a sentence-transformers or transformers folder, or a hub name. None: from scratch.
        config: from scratch only: a transformers configuration as a dict with `model_type`.
        tokenizer: folder, hub name or tokenizer object; the base model's own if None.
        pooling: "mean", "cls" or "last"; None: the base model's, otherwise mean.
        query_prompt: put before every query; None: the base model's, otherwise nothing.
        document_prompt: put before every document; likewise.
        truncate_dim: use only so many of the first components of the vectors; None: as the base model, otherwise all.
        max_length: longest input in tokens; None: the base model's, otherwise all its positions.
        shared: one transformer for both sides, or two; None: as the base model, otherwise one.
        lora_rank: train adapters of this rank instead of the transformer's own weights; 0 trains the weights.
        lora_targets: "all-linear", or endings of the names of the layers to adapt.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        dtype: of the weights that adapters leave as they are; adapters are always in float32. "bfloat16" halves the
            memory of a large language model, and needs adapters: small updates would round to nothing.
    """

    left: TextTower
    right: TextTower

    def __init__(
        self,
        name: str | None = None,
        *,
        config: dict[str, Any] | None = None,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        pooling: Pooling | None = None,
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
        if dtype not in get_args(WeightType) or (dtype != "float32" and not lora_rank):
            raise DualencError(f"dtype is {dtype!r}: choose float32, or bfloat16 with lora_rank")
        if pooling is not None and pooling not in POOLINGS:
            raise DualencError(f"pooling is {pooling!r}: choose one of {', '.join(POOLINGS)}")
        sources = _open_sources(name, config, tokenizer, shared)
        for source in sources:
            _check_inputs(source, name)
            if lora_rank:
                source.backbone.to(getattr(torch, dtype))
                source.backbone = add_lora(source.backbone, lora_rank, lora_targets)
            if gradient_checkpointing:
                enable_checkpointing(source.backbone)
        left = sources[0]
        right = sources[-1]
        if query_prompt is None:
            query_prompt = left.settings.query_prompt
        if document_prompt is None:
            document_prompt = right.settings.document_prompt
        super().__init__(
            left.tower(query_prompt, max_length, truncate_dim, pooling),
            right.tower(document_prompt, max_length, truncate_dim, pooling),
            kind="query-document",
        )
        self.usage = None if self.shares_weights else f"{self.kind}, separate"
        self.prompts = left.settings.prompts | right.settings.prompts
        if name is not None:
            self.base = base_metadata(name, model_folder(name))

    def name_prompts(self, prompts: Mapping[str, tuple[str, str]]) -> None:
        """Have saved folders know `NAME_query` and `NAME_document`, the prompts of a source behind the model's own."""
        for name, pair in prompts.items():
            for role, tower, prompt in zip(ROLES, (self.left, self.right), pair):
                self.prompts[f"{name}_{role}"] = tower.prepare.prompt + prompt

    def with_towers(self, left: TextTower, right: TextTower) -> TextEncoder:
        """A model of two other towers, with the prompts and the card's facts of this one."""
        model = copy.copy(self)
        DualEncoder.__init__(model, left, right, kind=self.kind)
        model.usage = None if model.shares_weights else f"{self.kind}, separate"
        return model

    def write(self, folder: Path) -> None:
        """Write one sentence-transformers folder if the weights are shared, else one below for each side."""
        towers = dict(zip(ROLES, (self.left, self.right)))
        prompts = {role: tower.prepare.prompt for role, tower in towers.items()}
        if self.shares_weights:
            self.left.write(self.prompts | prompts, None, folder)
            return
        write_json(folder / DUALENC_FILE, {"kind": self.kind, "towers": list(ROLES)})
        for role, tower in towers.items():
            (folder / role).mkdir()
            further = {name: prompt for name, prompt in self.prompts.items() if name.endswith(f"_{role}")}
            tower.write({**further, role: prompts[role]}, role, folder / role)


class TextPrepare(Prepare):
    """Add the side's prompt, tokenize, truncate to `max_length` tokens, pad behind to the longest of the batch."""

    modality = "text"

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: str = "", max_length: int = 512
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_length = max_length
        self.token_cache: TokenCache | None = None

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        """Collate B texts, see `Prepare.__call__`."""
        check_items(items, "text")
        texts = [self.prompt + text for text in items]
        tokens = (
            self._tokenize(texts)
            if self.token_cache is None
            else self.token_cache.tokenize(texts, self._tokenize)
        )
        longest = max(len(row["input_ids"]) for row in tokens)
        inputs: Inputs = {}
        for name in tokens[0]:
            padded = np.full((len(tokens), longest), self._padding(name), dtype=np.int64)
            for row, text_tokens in zip(padded, tokens):
                row[: len(text_tokens[name])] = text_tokens[name]
            inputs[name] = torch.from_numpy(padded)
        return inputs

    def cache_tokens(self) -> None:
        """Tokenize each text once only, for training."""
        self.token_cache = self.token_cache or TokenCache()

    def _tokenize(self, texts: list[str]) -> list[Tokens]:
        if torch.utils.data.get_worker_info() is not None:
            # Workers are parallel already; this also spares tokenizers' warning about forked threads.
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        columns = self.tokenizer(texts, truncation=True, max_length=self.max_length)
        tokens = []
        for row in range(len(texts)):
            tokens.append(
                {name: np.asarray(column[row], dtype=np.int32) for name, column in columns.items()}
            )
        return tokens

    def _padding(self, name: str) -> int:
        padding = {
            "input_ids": self.tokenizer.pad_token_id,
            "token_type_ids": self.tokenizer.pad_token_type_id,
        }
        return padding.get(name) or 0

    def join(self, parts: Sequence[Inputs]) -> Inputs:
        """Several batches of texts as one, padded to the longest."""
        if not parts:
            return {}
        longest = max(part["input_ids"].shape[1] for part in parts)

        def padded(name: str, tensor: Tensor) -> Tensor:
            return nn.functional.pad(tensor, (0, longest - tensor.shape[1]), value=self._padding(name))

        return {name: torch.cat([padded(name, part[name]) for part in parts]) for name in parts[0]}


class TextTower(Tower):
    """A transformer's last hidden state (B, T, hidden size), pooled, mapped by Dense modules, cut and normalised."""

    modality = "text"

    def __init__(
        self,
        backbone: PreTrainedModel,
        prepare: TextPrepare,
        pooling: Pooling,
        head: Sequence[nn.Module] = (),
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        convert_dropout(backbone)
        self.backbone = backbone
        self.prepare: TextPrepare = prepare
        self.pooling = pooling
        dim = backbone.config.hidden_size
        for module in head:
            if isinstance(module, Dense):
                if module.linear.in_features != dim:
                    raise DualencError(f"a Dense module takes {module.linear.in_features}, but gets {dim}")
                dim = module.dim
        if truncate_dim is not None and not 1 <= truncate_dim <= dim:
            raise DualencError(
                f"truncate_dim is {truncate_dim}: give 1 to {dim}, the size of the model's vectors"
            )
        self.head = nn.Sequential(*head)
        self.truncate_dim = truncate_dim
        self.dim = self.feature_dim = dim if truncate_dim is None else truncate_dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B tokenized texts, each (B, T), or what `pack` made of them, to (B, D) unit-norm float32."""
        hidden = (
            run_packed(self.backbone, inputs)
            if "place" in inputs
            else self.backbone(**inputs).last_hidden_state
        )
        vectors = self.head(pool(hidden, inputs["attention_mask"], self.pooling))
        return unit_norm(vectors[:, : self.dim])

    def pack(self, inputs: Inputs, one_by_one: bool = False) -> Inputs:
        """Several texts in a row, where the transformer takes them so."""
        first = first_position(self.backbone.config)
        if first is None:
            return inputs
        # Gradient checkpointing repeats layers, by then with the usual attention.
        repeats = any(getattr(layer, "gradient_checkpointing", False) for layer in self.backbone.modules())
        return pack(inputs, first, one_by_one and not repeats)

    def write(self, prompts: dict[str, str], default_prompt_name: str | None, folder: Path) -> None:
        """Write a sentence-transformers folder, with prompts by name."""
        length = self.prepare.max_length
        save_transformer(self.backbone, folder)
        save_tokenizer(self.prepare.tokenizer, folder, length)
        write_sentence_files(
            folder,
            self.backbone.config.hidden_size,
            self.pooling,
            length,
            prompts,
            default_prompt_name=default_prompt_name,
            truncate_dim=self.truncate_dim,
            head=self.head,
        )


@dataclass
class _Source:
    """A transformer with its tokenizer, the modules behind its pooling, and its folder's settings."""

    backbone: Any
    tokenizer: PreTrainedTokenizerBase
    settings: SentenceFolder
    head: Sequence[nn.Module] = ()

    def tower(
        self, prompt: str, max_length: int | None, truncate_dim: int | None, pooling: Pooling | None
    ) -> TextTower:
        """The tower of one side; None stands for the folder's setting."""
        length = check_length(max_length, self.backbone, self.tokenizer, self.settings.max_length)
        truncate = self.settings.truncate_dim if truncate_dim is None else truncate_dim
        prepare = TextPrepare(self.tokenizer, prompt, length)
        return TextTower(
            self.backbone, prepare, pooling or self.settings.pooling or "mean", self.head, truncate
        )


def _open_sources(
    name: str | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    shared: bool | None,
) -> list[_Source]:
    """One transformer for both sides, or one for each."""
    count = 2 if shared is False else 1
    if name is None:
        if config is None or tokenizer is None:
            raise DualencError(
                "no base model: give its name, or both config and tokenizer to start from scratch"
            )
        own_tokenizers = [load_tokenizer(tokenizer) for _ in range(count)]
        return [
            _Source(new_transformer(config, own), own, SentenceFolder(Path())) for own in own_tokenizers
        ]
    if config is not None:
        raise DualencError(
            "both name and config are given: leave one out, config is for starting from scratch"
        )
    folder = model_folder(name)
    if not _has_separate_towers(folder):
        return [_read_source(folder, tokenizer) for _ in range(count)]
    if shared:
        raise DualencError(f"{folder}: its towers are separate, so shared cannot be true; leave it out")
    return [_read_source(folder / role, tokenizer) for role in ROLES]


def _has_separate_towers(folder: Path) -> bool:
    """Whether each side has a folder of its own; an encoder of queries over an index has one tower."""
    path = folder / DUALENC_FILE
    return path.is_file() and read_json_object(path).get("kind") != "query-index"


def _read_source(folder: Path, tokenizer: str | PreTrainedTokenizerBase | None) -> _Source:
    settings = read_sentence_folder(folder)
    backbone = load_transformer(settings.transformer)
    own_tokenizer = load_tokenizer(settings.transformer if tokenizer is None else tokenizer)
    size = len(own_tokenizer)
    if size > getattr(backbone.config, "vocab_size", size):
        raise DualencError(
            f"tokenizer has {size} tokens, {folder} only {backbone.config.vocab_size}: use the model's own"
        )
    if settings.lower_case:
        lower_casing(own_tokenizer)
    head = [Normalize() if place is None else read_dense(place) for place in settings.head]
    # The tower normalises its vectors in any case.
    if head and isinstance(head[-1], Normalize):
        head.pop()
    return _Source(backbone, own_tokenizer, settings, head)


def _check_inputs(source: _Source, name: str | None) -> None:
    """Refuse models that encode no text, and leave out inputs that the model does not take."""
    # Adapters would hide the signature, so this comes before them.
    accepted = inspect.signature(source.backbone.forward).parameters
    config = source.backbone.config
    if "input_ids" not in accepted or not isinstance(getattr(config, "hidden_size", None), int):
        raise DualencError(
            f"{name or 'config'}: a model of type {config.model_type} is no text encoder; choose another"
        )
    names = source.tokenizer.model_input_names
    source.tokenizer.model_input_names = [key for key in names if key in accepted]


def enable_checkpointing(model: Any) -> None:
    """Have a transformer recompute activations in the backward pass."""
    # Renamed in transformers 5.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    with explain(
        f"{type(model).__name__} has no gradient checkpointing", "leave gradient_checkpointing out"
    ):
        enable({"use_reentrant": False})


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool token vectors (B, T, D) of each text to (B, D) float32; the mask (B, T) has padding on either side."""
    if pooling == "mean":
        total = (hidden * mask.unsqueeze(-1).to(hidden.dtype)).sum(1, dtype=torch.float32)
        return total / mask.sum(1, keepdim=True, dtype=torch.float32).clamp(min=1)
    first = mask.int().argmax(1)  # argmax gives the first of equal values
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    position = first if pooling == "cls" else last
    return hidden[torch.arange(len(hidden), device=hidden.device), position].float()


def add_lora(backbone: PreTrainedModel, rank: int, targets: str | list[str]) -> Any:
    """Freeze the backbone and add trainable adapters W + 2·BA to its linear layers, in place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DualencError("LoRA needs the package peft: pip install 'dualenc[lora]'") from None
    with explain(f"LoRA of rank {rank}, targets {targets}", "correct them"):
        config = LoraConfig(
            r=rank,
            lora_alpha=ALPHA_PER_RANK * rank,
            target_modules=targets,
            # Named where there is none, peft warns.
            exclude_modules=r"(.*\.)?pooler\.dense"
            if getattr(backbone, "pooler", None) is not None
            else None,
        )
        return get_peft_model(backbone, config)


def new_transformer(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A transformer with random weights by a configuration's fields; vocabulary and padding follow the tokenizer."""
    from transformers import AutoConfig

    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        **copy.deepcopy(config),
    }
    if fields["vocab_size"] < len(tokenizer):
        raise DualencError(
            f"config has vocab_size {fields['vocab_size']}, the tokenizer {len(tokenizer)} tokens: leave it out"
        )
    with quiet_transformers(), explain("config of the text tower does not fit", "correct its fields"):
        own_config = AutoConfig.for_model(**fields)
        # An architecture's default special tokens may lie beyond a small vocabulary.
        for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
            default = getattr(own_config, name, None)
            if isinstance(default, int) and default >= len(tokenizer):
                setattr(own_config, name, getattr(tokenizer, name))
        model = _auto_class(own_config).from_config(own_config, trust_remote_code=False)
    return _without_pooler(model)


def load_transformer(folder: Path) -> PreTrainedModel:
    """A text transformer in float32 with the folder's weights; code in the folder is never run."""
    if not (folder / "config.json").is_file():
        raise DualencError(f"{folder}: no config.json, so no transformers model; give another folder")
    if (folder / "adapter_config.json").is_file():
        raise DualencError(f"{folder}: holds adapters of another model; merge them into it and save that")
    return _without_pooler(load_pretrained(folder, _auto_class, "text model"))


def load_pretrained(folder: Path, auto_class: Callable[[Any], Any], what: str) -> Any:
    """A model of transformers in float32 with a folder's safetensors weights; code in the folder is never run.

    `auto_class` gives the class that loads a configuration; `what` names the kind of model in errors.
    """
    from transformers import AutoConfig

    check_safetensors(folder)
    advice = "restore its files, or choose another model"
    with quiet_transformers(), explain(f"{folder}: the {what} does not load", advice):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        model, report = auto_class(config).from_pretrained(
            folder, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    missing = sorted(key for key in report["missing_keys"] if "pooler." not in key)
    if missing:
        raise DualencError(
            f"{folder}: {len(missing)} weights are missing, {missing[0]} first; restore the folder"
        )
    return model.float().eval()


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest input in tokens that the model can take, None if it has no limit."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the padding index on.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - first
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if limit and limit > 0 else None


def check_length(
    max_length: int | None,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    stored: int | None = None,
) -> int:
    """The length to truncate to, in tokens: the user's, or the longest that the model and its folder allow."""
    positions = max_positions(model)
    if max_length is None:
        known = [n for n in (positions, stored or tokenizer.model_max_length) if n and n < 1_000_000]
        return min(known, default=MAX_LENGTH)
    if max_length < MIN_LENGTH:
        raise DualencError(
            f"max_length is {max_length}: give at least {MIN_LENGTH}, special tokens take two"
        )
    if positions is not None and max_length > positions:
        raise DualencError(
            f"max_length is {max_length}, but the model has {positions} positions: lower it"
        )
    return max_length


def save_transformer(model: Any, folder: Path) -> None:
    """Write config.json and model.safetensors; adapters are merged into a copy's weights first, in float32."""
    if hasattr(model, "merge_and_unload"):
        dtype = next(p.dtype for p in model.parameters() if not p.requires_grad)
        model = copy.deepcopy(model).float().merge_and_unload().to(dtype)
    with quiet_transformers():
        model.save_pretrained(folder)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off transformers' progress bars and reports."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    shows_bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()


def _auto_class(config: Any) -> Any:
    """The class that makes a text encoder: of an encoder-decoder such as T5, only the first half."""
    from transformers import AutoModel, AutoModelForTextEncoding

    attention = str(getattr(config, "_attn_implementation", None))
    if "/" in attention:
        raise DualencError(
            f"attn_implementation {attention} is code from the hub, which is not run; leave it out"
        )
    is_half = any(name.endswith("EncoderModel") for name in config.architectures or [])
    if not is_half and not getattr(config, "is_encoder_decoder", False):
        return AutoModel
    if type(config) not in AutoModelForTextEncoding._model_mapping:
        kind = f"a model of type {config.model_type} is an encoder with a decoder"
        raise DualencError(
            f"{kind}, and transformers has no class for its encoder alone; choose an encoder, or a T5"
        )
    return AutoModelForTextEncoding


def _without_pooler(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze BERT's own pooler, which no output here depends on."""
    for name, parameter in model.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)
    return model.eval()
