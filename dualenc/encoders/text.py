"""Query-document encoders on transformers: towers, pooling, adapters, and backbones made, loaded and written."""

from __future__ import annotations

import copy
import inspect
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from dualenc import distributed
from dualenc.encoders.dense import Dense, Normalize, first_components, kept_components, read_dense
from dualenc.encoders.dropout import convert_dropout
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Prepare, Tower, unit_norm
from dualenc.encoders.hub import base_metadata, model_folder
from dualenc.encoders.packing import first_position, pack, run_packed
from dualenc.encoders.sentence_folder import MIN_LENGTH, SentenceFolder, read_sentence_folder, write_sentence_files
from dualenc.encoders.tokenizer import (
    TokenCache,
    Tokens,
    check_texts,
    load_tokenizer,
    lower_casing,
    save_tokenizer,
)
from dualenc.errors import DualencError, first_line
from dualenc.files import write_json
from dualenc.types import Inputs, Pooling

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger("dualenc.encoders")

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
        pooling: "mean", "cls" or "last"; None: as the base model says, otherwise mean.
        query_prompt: put before every query; None: as the base model says, otherwise nothing.
        document_prompt: put before every document; likewise.
        query_prompt_name: instead of a query_prompt: the name of one of the prompts that the base model brings.
        document_prompt_name: instead of a document_prompt; likewise.
        truncate_dim: use only so many of the first components of the vectors; None: as the base model says, otherwise
            all.
        max_length: longest input in tokens; None: as the base model says, otherwise all its positions.
        shared: one transformer for both sides, or two; None: as the base model says, otherwise one.
        lora_rank: train adapters of this rank instead of the transformer's own weights; 0 trains the weights.
        lora_alpha: scale of the adapters, twice the rank if None.
        lora_dropout: dropout before the adapters.
        lora_targets: "all-linear", or endings of the names of the layers to adapt.
        gradient_checkpointing: recompute activations in the backward pass instead of storing them.
        dtype: of the weights that adapters leave as they are; adapters are always in float32. "bfloat16" halves the
            memory of a large language model, and is refused without adapters: small updates would round to nothing.

    Raises:
        DualencError: the base model does not load, or an argument is missing or does not fit the others.
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
        query_prompt_name: str | None = None,
        document_prompt_name: str | None = None,
        truncate_dim: int | None = None,
        max_length: int | None = None,
        shared: bool | None = None,
        lora_rank: int = 0,
        lora_alpha: float | None = None,
        lora_dropout: float = 0.0,
        lora_targets: str | list[str] = "all-linear",
        gradient_checkpointing: bool = False,
        dtype: WeightType = "float32",
    ) -> None:
        if dtype not in get_args(WeightType) or (dtype != "float32" and not lora_rank):
            raise DualencError(
                f"dtype is {dtype!r}: choose float32, or bfloat16 with lora_rank; to train all weights in less memory "
                "set trainer.mixed_precision=bf16"
            )
        if pooling is not None and pooling not in POOLINGS:
            raise DualencError(f"pooling is {pooling!r}: choose one of {', '.join(POOLINGS)}")
        bases = _bases(name, config, tokenizer, shared)
        for base in bases:
            _check_inputs(base, name)
            if max_length is None:
                _report_cut(base)
            if lora_rank:
                base.backbone.to(getattr(torch, dtype))
                base.backbone = add_lora(base.backbone, lora_rank, lora_alpha, lora_dropout, lora_targets)
            if gradient_checkpointing:
                enable_checkpointing(base.backbone)
        left = bases[0]
        right = bases[-1]
        left_prompt = _choose_prompt("query", query_prompt, query_prompt_name, left.says, left.says.query_prompt)
        right_prompt = _choose_prompt(
            "document", document_prompt, document_prompt_name, right.says, right.says.document_prompt
        )
        super().__init__(
            left.tower(left_prompt, max_length, truncate_dim, pooling),
            right.tower(right_prompt, max_length, truncate_dim, pooling),
            kind="query-document",
        )
        self.prompts = left.says.prompts | right.says.prompts
        if name is not None:
            self.base = base_metadata(name, model_folder(name))

    def name_prompts(self, prompts: Mapping[str, tuple[str, str]]) -> None:
        """Have saved folders know further prompts: of each name, `NAME_query` and `NAME_document`.

        Args:
            prompts: what was put before a query and before a document of a source, behind the model's own prompts.
        """
        own = [tower.prepare.prompt for tower in (self.left, self.right)]
        for name, both in prompts.items():
            self.prompts |= {f"{name}_{role}": first + then for role, first, then in zip(ROLES, own, both)}

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

    @property
    def usage(self) -> str:
        """Which example of the model card's template shows how the folder is loaded."""
        return self.kind if self.shares_weights else f"{self.kind}, separate"

    @property
    def transformers_configs(self) -> list[Any]:
        """One, or that of each tower where they share no weights."""
        return [tower.backbone.config for tower in ((self.left,) if self.shares_weights else (self.left, self.right))]

    def describe(self) -> dict[str, str]:
        """What the model is, as rows of a table."""
        tower = self.left
        sides = zip(ROLES, (self.left, self.right))
        prompts = {role: repr(side.prepare.prompt) for role, side in sides if side.prepare.prompt}
        return {
            "Transformer": tower.backbone.config.model_type,
            "Towers": "shared" if self.shares_weights else "separate",
            "Pooling": ", ".join([tower.pooling, *tower.layers(), "normalised"]),
            "Longest input": f"{tower.prepare.max_length} tokens",
            **{f"{role} prompt".capitalize(): prompt for role, prompt in prompts.items()},
            **super().describe(),
        }


class TextPrepare(Prepare):
    """Add the side's prompt, tokenize, truncate, pad to the longest of the batch.

    Args:
        tokenizer: a transformers tokenizer that pads behind the text, as `load_tokenizer` gives it.
        prompt: put before every text as it is, without a space between.
        max_length: longest input in tokens, special ones and prompt included.

    Attributes:
        token_cache: tokens of texts that were tokenized before, or None; see `cache_tokens`.
    """

    modality = "text"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: str = "", max_length: int = 512) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.max_length = max_length
        self.token_cache: TokenCache | None = None

    def __call__(self, items: Sequence[str], seeds: Sequence[int] | None = None) -> Inputs:
        texts = [self.prompt + text for text in check_texts(items, self.tokenizer.truncation_side)]
        tokens = self._tokenize(texts) if self.token_cache is None else self.token_cache.tokenize(texts, self._tokenize)
        longest = max(len(row["input_ids"]) for row in tokens)
        inputs: Inputs = {}
        for name in tokens[0]:
            padded = np.full((len(tokens), longest), self._padding(name), dtype=np.int64)
            for row, each in zip(padded, tokens):
                row[: len(each[name])] = each[name]
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
        return [
            {name: np.asarray(column[row], dtype=np.int32) for name, column in columns.items()}
            for row in range(len(texts))
        ]

    def _padding(self, name: str) -> int:
        padding = {"input_ids": self.tokenizer.pad_token_id, "token_type_ids": self.tokenizer.pad_token_type_id}
        return padding.get(name) or 0

    def join(self, parts: Sequence[Inputs]) -> Inputs:
        """Texts (n, T), each part with a T of its own, padded to the longest."""
        if not parts:
            return {}
        longest = max(part["input_ids"].shape[1] for part in parts)

        def padded(name: str, tensor: Tensor) -> Tensor:
            return nn.functional.pad(tensor, (0, longest - tensor.shape[1]), value=self._padding(name))

        return {name: torch.cat([padded(name, part[name]) for part in parts]) for name in parts[0]}


class TextTower(Tower):
    """A transformer's last hidden state (B, T, hidden size), pooled, mapped by what stands behind, cut and normalised.

    Args:
        backbone: the transformer.
        prepare: makes its inputs.
        pooling: how tokens become one vector.
        head: `Dense` and `Normalize` modules behind the pooling; most models have none.
        truncate_dim: how many of the first components are used; None: all.

    Raises:
        DualencError: sizes do not follow from one another.
    """

    modality = "text"

    def __init__(
        self,
        backbone: PreTrainedModel,
        prepare: TextPrepare,
        pooling: Pooling,
        head: nn.Sequential | None = None,
        truncate_dim: int | None = None,
    ) -> None:
        super().__init__()
        convert_dropout(backbone)
        self.backbone = backbone
        self.prepare: TextPrepare = prepare
        self.pooling = pooling
        self.head = head if head is not None else nn.Sequential()
        dim = backbone.config.hidden_size
        for dense in (module for module in self.head if isinstance(module, Dense)):
            if dense.linear.in_features != dim:
                raise DualencError(
                    f"a Dense module takes {dense.linear.in_features}, but gets {dim}; restore the folder"
                )
            dim = dense.dim
        if truncate_dim is not None and not 1 <= truncate_dim <= dim:
            raise DualencError(f"truncate_dim is {truncate_dim}: give 1 to {dim}, the size of the model's vectors")
        self.truncate_dim = truncate_dim
        self.dim = self.feature_dim = dim if truncate_dim is None else truncate_dim

    def forward(self, inputs: Inputs) -> Tensor:
        """Encode B tokenized texts, each (B, T), or what `pack` made of them, to (B, D) unit-norm float32."""
        hidden = run_packed(self.backbone, inputs) if "place" in inputs else self.backbone(**inputs).last_hidden_state
        vectors = self.head(pool(hidden, inputs["attention_mask"], self.pooling))
        return unit_norm(vectors[:, : self.dim])

    @property
    def packs(self) -> bool:
        """Whether the transformer takes several texts in a row."""
        return first_position(self.backbone.config) is not None

    def pack(self, inputs: Inputs, one_by_one: bool = False) -> Inputs:
        """Several texts in a row, where the transformer takes them so."""
        first = first_position(self.backbone.config)
        # Gradient checkpointing repeats layers, by then with the usual attention.
        checkpoints = any(getattr(layer, "gradient_checkpointing", False) for layer in self.backbone.modules())
        return inputs if first is None else pack(inputs, first, one_by_one and not checkpoints)

    def layers(self) -> list[str]:
        """What stands between pooling and normalisation, in words."""
        shown = [f"{type(m).__name__} to {m.dim}" if isinstance(m, Dense) else "normalised" for m in self.head]
        return [*shown, *([] if self.truncate_dim is None else [f"the first {self.truncate_dim}"])]

    def write(self, prompts: dict[str, str], default_prompt_name: str | None, folder: Path) -> None:
        """Write a sentence-transformers folder, with prompts by name."""
        head = list(self.head)
        if self.truncate_dim is not None:
            # sentence-transformers would cut behind the last Normalize, to vectors that are shorter than one.
            widths = [module.dim for module in head if isinstance(module, Dense)]
            head.append(first_components([self.backbone.config.hidden_size, *widths][-1], self.truncate_dim))
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
            head=head,
        )


@dataclass
class _Base:
    """A transformer with its tokenizer, and what its folder says about their use."""

    backbone: Any
    tokenizer: PreTrainedTokenizerBase
    says: SentenceFolder
    head: nn.Sequential

    def tower(
        self, prompt: str, max_length: int | None, truncate_dim: int | None, pooling: Pooling | None
    ) -> TextTower:
        """The tower of one side; what is None is as the folder says."""
        length = check_length(max_length, self.backbone, self.tokenizer, self.says.max_length)
        truncate = self.says.truncate_dim if truncate_dim is None else truncate_dim
        prepare = TextPrepare(self.tokenizer, prompt, length)
        return TextTower(self.backbone, prepare, pooling or self.says.pooling or "mean", self.head, truncate)


def _check_inputs(base: _Base, name: str | None) -> None:
    """Refuse models that encode no text, and leave out inputs that the model does not take."""
    # Adapters would hide the signature, so this comes before them.
    accepted = inspect.signature(base.backbone.forward).parameters
    if "input_ids" not in accepted or not isinstance(getattr(base.backbone.config, "hidden_size", None), int):
        kind = base.backbone.config.model_type
        raise DualencError(f"{name or 'config'}: a model of type {kind} is no text encoder; choose another")
    base.tokenizer.model_input_names = [key for key in base.tokenizer.model_input_names if key in accepted]


def _report_cut(base: _Base) -> None:
    """Log where a folder's maximum length exceeds the model's positions."""
    positions = max_positions(base.backbone)
    length = base.says.max_length
    if positions is not None and length is not None and length > positions and distributed.is_main():
        stated = f"max_seq_length is {length}, but the model has {positions} positions"
        logger.warning("%s: %s; longer texts are cut there", base.says.transformer, stated)


def enable_checkpointing(model: Any) -> None:
    """Have a transformer recompute activations in the backward pass.

    Raises:
        DualencError: its architecture cannot.
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise DualencError(f"{type(model).__name__} has no gradient checkpointing: leave gradient_checkpointing out")
    # The second is what older versions of transformers call the first.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _choose_prompt(role: str, prompt: str | None, name: str | None, says: SentenceFolder, default: str) -> str:
    """The prompt of one side: as given, by its name in the folder, or the folder's own."""
    if prompt is not None and name is not None:
        raise DualencError(f"both {role}_prompt and {role}_prompt_name are given: leave one out")
    if name is not None:
        return says.prompt(name)
    return default if prompt is None else prompt


def _bases(
    name: str | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    shared: bool | None,
) -> list[_Base]:
    """One base for both sides, or one for each."""
    if name is None:
        if config is None or tokenizer is None:
            raise DualencError("no base model: give its name, or both config and tokenizer to start from scratch")
        own = [load_tokenizer(tokenizer) for _ in range(1 if shared is not False else 2)]
        return [_Base(new_transformer(config, one), one, SentenceFolder(Path()), nn.Sequential()) for one in own]
    if config is not None:
        raise DualencError("both name and config are given: leave one out, config is for starting from scratch")
    folder = model_folder(name)
    folders = [folder] * (1 if shared is not False else 2)
    if (folder / DUALENC_FILE).is_file():
        if shared:
            raise DualencError(f"{folder}: its towers are separate, so shared cannot be true; leave it out")
        folders = [folder / role for role in ROLES]
    return [_read_base(folder, tokenizer) for folder in folders]


def _read_base(folder: Path, tokenizer: str | PreTrainedTokenizerBase | None) -> _Base:
    says = read_sentence_folder(folder)
    backbone = load_transformer(says.transformer)
    own_tokenizer = load_tokenizer(says.transformer if tokenizer is None else tokenizer)
    size = len(own_tokenizer)
    if size > getattr(backbone.config, "vocab_size", size):
        raise DualencError(
            f"tokenizer has {size} tokens, {folder} only {backbone.config.vocab_size}: use the model's own"
        )
    if says.lower_case:
        lower_casing(own_tokenizer)
    # The tower normalises its vectors in any case, so a Normalize at the end is left out.
    folders = says.head[:-1] if says.head[-1:] == (None,) else says.head
    modules = [Normalize() if place is None else read_dense(place) for place in folders]
    # `TextTower.write` writes a truncation as a last Dense module.
    truncation = kept_components(modules[-1]) if modules else None
    if truncation is not None:
        modules.pop()
        says = replace(says, truncate_dim=min(truncation, says.truncate_dim or truncation))
    return _Base(backbone, own_tokenizer, says, nn.Sequential(*modules))


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Pool the tokens of each text; padding may be on either side.

    Args:
        hidden: token vectors (B, T, D), any floating dtype.
        mask: (B, T), 1 for tokens and 0 for padding.
        pooling: "mean" of the tokens, the first ("cls") or the "last" token.

    Returns:
        (B, D) float32.
    """
    if pooling == "mean":
        total = (hidden * mask.unsqueeze(-1).to(hidden.dtype)).sum(1, dtype=torch.float32)
        return total / mask.sum(1, keepdim=True, dtype=torch.float32).clamp(min=1)
    first = mask.int().argmax(1)  # argmax gives the first of equal values
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    position = first if pooling == "cls" else last
    return hidden[torch.arange(len(hidden), device=hidden.device), position].float()


def add_lora(
    backbone: PreTrainedModel, rank: int, alpha: float | None, dropout: float, targets: str | list[str]
) -> Any:
    """Freeze the backbone and put trainable adapters of W + (alpha / rank)·BA in parallel to its linear layers.

    LoRA (Hu et al. 2021, arXiv 2106.09685). The backbone is changed in place; alpha is 2·rank if None.

    Raises:
        DualencError: peft is not installed, or the arguments fit no layer.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DualencError("LoRA needs the package peft: pip install 'dualenc[lora]'") from None
    try:
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank if alpha is None else alpha,  # type: ignore[arg-type]
            lora_dropout=dropout,
            target_modules=targets,
            # Named where there is none, peft warns.
            exclude_modules=r"(.*\.)?pooler\.dense" if getattr(backbone, "pooler", None) is not None else None,
        )
        return get_peft_model(backbone, config)
    except Exception as error:
        raise DualencError(f"LoRA (rank {rank}, targets {targets}): {first_line(error)}; mend them") from error


def new_transformer(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """A transformer with random weights, drawn from torch's generator, that fits the tokenizer.

    Args:
        config: fields of a transformers configuration, `model_type` among them; `vocab_size` and `pad_token_id`
            follow the tokenizer unless given.
        tokenizer: what its inputs will come from.

    Raises:
        DualencError: `model_type` is missing or unknown, or fields do not fit together or the tokenizer.
    """
    from transformers import AutoConfig

    fields = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, **copy.deepcopy(config)}
    if fields["vocab_size"] < len(tokenizer):
        raise DualencError(
            f"config has vocab_size {fields['vocab_size']}, the tokenizer {len(tokenizer)} tokens: leave it out"
        )
    try:
        with quiet_transformers():
            own_config = AutoConfig.for_model(**fields)
            # An architecture's usual special tokens may lie beyond a small vocabulary.
            for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
                usual = getattr(own_config, name, None)
                if isinstance(usual, int) and usual >= len(tokenizer):
                    setattr(own_config, name, getattr(tokenizer, name))
            model = _auto_class(own_config).from_config(own_config, trust_remote_code=False)
    except DualencError as error:
        raise DualencError(f"config of the text tower: {error}") from None
    except Exception as error:
        raise DualencError(f"config of the text tower: {first_line(error)}; mend its fields") from error
    return _without_pooler(model)


def load_transformer(folder: Path) -> PreTrainedModel:
    """A transformer in float32 with the folder's weights; code in the folder is never run.

    Raises:
        DualencError: the folder has no configuration or no safetensors weights, or they are corrupt or incomplete.
    """
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise DualencError(f"{folder}: no config.json, so no transformers model; give another folder")
    if (folder / "adapter_config.json").is_file():
        raise DualencError(f"{folder}: holds adapters of another model; merge them into it and save that")
    if not any(folder.glob("*.safetensors")):
        raise DualencError(f"{folder}: no *.safetensors; convert its weights to safetensors first")
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            model, report = _auto_class(config).from_pretrained(
                folder, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
    except DualencError as error:
        raise DualencError(f"{folder}: {error}") from None
    except Exception as error:
        advice = "restore its files, or choose another model"
        raise DualencError(f"{folder}: the text model does not load ({first_line(error)}); {advice}") from error
    missing = sorted(key for key in report["missing_keys"] if "pooler." not in key)
    if missing:
        raise DualencError(f"{folder}: {len(missing)} weights are missing, {missing[0]} first; restore the folder")
    return _without_pooler(model.float())


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
    max_length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, stored: int | None = None
) -> int:
    """The length to truncate to, in tokens: the one asked for, or the longest that all agree on.

    Args:
        max_length: as the user asks for it; None: by the model.
        model: the transformer.
        tokenizer: its own.
        stored: what the folder says, in place of the tokenizer's maximum.

    Raises:
        DualencError: the model has fewer positions than were asked for.
    """
    positions = max_positions(model)
    if max_length is None:
        known = [n for n in (positions, stored or tokenizer.model_max_length) if n and n < 1_000_000]
        return min(known, default=MAX_LENGTH)
    if max_length < MIN_LENGTH:
        raise DualencError(f"max_length is {max_length}: give at least {MIN_LENGTH}, special tokens take two")
    if positions is not None and max_length > positions:
        raise DualencError(f"max_length is {max_length}, but the model has {positions} positions: lower it")
    return max_length


def save_transformer(model: nn.Module, folder: Path) -> None:
    """Write config.json and model.safetensors; adapters are merged into a copy's weights first, in float32."""
    if hasattr(model, "merge_and_unload"):
        dtype = next(p.dtype for p in model.parameters() if not p.requires_grad)
        model = copy.deepcopy(model).float().merge_and_unload().to(dtype)  # type: ignore[operator]
    with quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and reports: what matters of them is checked here."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _auto_class(config: Any) -> Any:
    """The class that makes a text encoder: of an encoder-decoder such as T5, only the first half."""
    from transformers import AutoModel, AutoModelForTextEncoding

    attention = str(getattr(config, "_attn_implementation", None))
    if "/" in attention:
        raise DualencError(f"attn_implementation {attention} is code from the hub, which is not run; leave it out")
    half = any(name.endswith("EncoderModel") for name in config.architectures or [])
    if not half and not getattr(config, "is_encoder_decoder", False):
        return AutoModel
    if type(config) not in AutoModelForTextEncoding._model_mapping:
        kind = f"a model of type {config.model_type} is an encoder with a decoder"
        raise DualencError(f"{kind}, and transformers has no class for its encoder alone; choose an encoder, or a T5")
    return AutoModelForTextEncoding


def _without_pooler(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze BERT's own pooler, which no output here depends on."""
    for name, parameter in model.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)
    return model.eval()
