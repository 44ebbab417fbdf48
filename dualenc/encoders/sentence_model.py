"""What text towers use of the inside of sentence-transformers 6: loading, the modules of a side, inputs, saving."""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
)
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from dualenc.encoders.hub import no_foreign_code
from dualenc.encoders.lora import ALPHA_PER_RANK
from dualenc.encoders.sentence_folder import check_sentence_folder, check_settings
from dualenc.encoders.tokenizer import save_tokenizer
from dualenc.errors import DualencError, explain

MIN_LENGTH = 3
"""Shortest input in tokens: special tokens take two."""
MAX_LENGTH = 512
"""Longest input in tokens where neither the model nor the tokenizer nor the user sets a limit."""
NO_LIMIT = 1_000_000
"""Lengths from here on stand for none."""


def open_model(folder: Path, dtype: torch.dtype = torch.float32) -> SentenceTransformer:
    """Load a folder of sentence-transformers or transformers; code in it is never run, and pickles are not read."""
    check_sentence_folder(folder)
    problem = explain(
        f"{folder}: the text model does not load", "restore its files, or choose another model"
    )
    with quiet_transformers(), no_foreign_code(), _complete_weights(folder), problem:
        return SentenceTransformer(
            str(folder),
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        )


def new_model(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype = torch.float32
) -> SentenceTransformer:
    """A transformer with random weights by a configuration's fields; vocabulary and padding follow the tokenizer."""
    fields = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        **copy.deepcopy(config),
    }
    if fields["vocab_size"] < len(tokenizer):
        raise DualencError(
            f"config has vocab_size {fields['vocab_size']}, the tokenizer {len(tokenizer)} tokens: leave it out"
        )
    check_settings(fields, "config")
    problem = explain("config of the text tower does not fit", "correct its fields")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with quiet_transformers(), problem:
            own = AutoConfig.for_model(**fields)
            # An architecture's default special tokens may lie beyond a small vocabulary.
            for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
                default = getattr(own, name, None)
                if isinstance(default, int) and default >= len(tokenizer):
                    setattr(own, name, getattr(tokenizer, name))
            AutoModel.from_config(own, trust_remote_code=False).save_pretrained(folder)
            save_tokenizer(tokenizer, folder, tokenizer.model_max_length)
        return open_model(folder, dtype)


def transformers_of(model: SentenceTransformer) -> list[Transformer]:
    """The Transformer modules, those inside a Router included."""
    return [module for module in model.modules() if isinstance(module, Transformer)]


def side_modules(model: SentenceTransformer, task: str) -> list[Any]:
    """The modules that encode a side in their order: of a Router, those of its route for "query" or "document"."""
    modules: list[Any] = []
    for module in model:
        if isinstance(module, Router):
            with explain(f"the Router has no route for {task}", "choose another model"):
                route: Any = module.sub_modules[str(module._resolve_route(task, "text"))]
                modules += list(route)
        else:
            modules.append(module)
    return modules


def side_prompt(model: SentenceTransformer, *names: str) -> str:
    """The first prompt of these names that is not empty, or the default one, unless that is a side's own."""
    default = model.default_prompt_name
    is_shared = default is not None and default not in ("query", "document", "passage", "corpus")
    candidates = [*names, default] if is_shared else names
    return next((prompt for name in candidates if (prompt := model.prompts.get(str(name)))), "")


def without_weights(module: Any) -> Any:
    """A picklable copy of an input module that shares its tokenizer, and can do nothing but `preprocess`."""
    light = _with_model(module, SimpleNamespace(config=getattr(module, "config", None)))
    light._modules = {}
    light.can_flatten_inputs = False
    return light


def _with_model(transformer: Any, model: Any) -> Any:
    """A copy of a Transformer module with another model inside."""
    other = copy.copy(transformer)
    other._modules = dict(transformer._modules)
    if isinstance(model, nn.Module):
        other._modules["model"] = model
    else:
        other.__dict__["model"] = model
    return other


def set_pooling(model: SentenceTransformer, modes: str | Sequence[str]) -> None:
    """Have every Pooling module combine token vectors in another way."""
    names = [modes] if isinstance(modes, str) else modes
    own_names = ["lasttoken" if name == "last" else name for name in names]
    pooled = False
    for module in model.modules():
        if isinstance(module, Pooling):
            with explain(f"pooling {modes}", "correct it"):
                module.__init__(module.embedding_dimension, own_names, module.include_prompt)
            pooled = True
    if not pooled:
        raise DualencError(f"pooling is {modes!r}, but the model has no Pooling module; leave it out")


def limit_length(model: SentenceTransformer, max_length: int | None) -> None:
    """Truncate to `max_length` tokens, or to the longest input that the model and its folder allow."""
    if max_length is not None and max_length < MIN_LENGTH:
        raise DualencError(
            f"max_length is {max_length}: give at least {MIN_LENGTH}, special tokens take two"
        )
    for module in model.modules():
        if isinstance(module, StaticEmbedding) and max_length is not None:
            module.tokenizer.enable_truncation(max_length)
        if isinstance(module, Transformer) and module.tokenizer is not None:
            positions = max_positions(module.model)
            wanted = max_length or module.max_seq_length or sys.maxsize
            if positions is not None and positions < wanted < NO_LIMIT:
                warnings.warn(f"texts are cut to {positions} tokens, the model's positions", stacklevel=3)
            limits = [limit for limit in (wanted, positions) if limit and limit < NO_LIMIT]
            module.max_seq_length = min(limits, default=MAX_LENGTH)


def input_length(module: Any) -> int:
    """Longest input of an input module in tokens."""
    if isinstance(module, StaticEmbedding):
        return int((module.tokenizer.truncation or {}).get("max_length", MAX_LENGTH))
    return int(module.max_seq_length or MAX_LENGTH)


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest input in tokens that the model can take, None if it has no limit."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the padding index on.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - first
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if limit and limit > 0 else None


def add_lora(model: SentenceTransformer, rank: int, targets: str | list[str]) -> None:
    """Freeze the transformers and add trainable adapters W + 2·BA to their linear layers, in place."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DualencError("LoRA needs the package peft: pip install 'dualenc[lora]'") from None
    transformers = transformers_of(model)
    if not transformers:
        raise DualencError("LoRA: the model has no transformer; leave lora_rank out")
    for transformer in transformers:
        has_pooler = getattr(transformer.model, "pooler", None) is not None
        with explain(f"LoRA of rank {rank}, targets {targets}", "correct them"):
            config = LoraConfig(
                r=rank,
                lora_alpha=ALPHA_PER_RANK * rank,
                target_modules=targets,
                # Named where there is none, peft warns.
                exclude_modules=r"(.*\.)?pooler\.dense" if has_pooler else None,
            )
            transformer.model = get_peft_model(transformer.model, config)  # type: ignore[assignment]


def enable_checkpointing(model: SentenceTransformer) -> None:
    """Have the transformers recompute activations in the backward pass."""
    for transformer in transformers_of(model):
        inner: Any = transformer.model
        # Renamed in transformers 5.
        enable = getattr(inner, "activation_checkpointing_enable", inner.gradient_checkpointing_enable)
        problem = f"{type(inner).__name__} has no gradient checkpointing"
        with explain(problem, "leave gradient_checkpointing out"):
            enable({"use_reentrant": False})


def freeze_poolers(model: SentenceTransformer) -> None:
    """Freeze BERT's own pooler, which no output here depends on."""
    for transformer in transformers_of(model):
        for name, parameter in transformer.model.named_parameters():
            if name.startswith("pooler."):
                parameter.requires_grad_(False)


def pad_behind(model: SentenceTransformer) -> None:
    """Have texts padded behind, which moves no positions, and by the token of the end where there is none for it."""
    for transformer in transformers_of(model):
        tokenizer = transformer.tokenizer
        if tokenizer is not None:
            tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
            if tokenizer.pad_token is None:
                tokenizer.pad_token = tokenizer.eos_token


def has_router(model: SentenceTransformer) -> bool:
    """Whether the sides may have different modules."""
    return any(isinstance(module, Router) for module in model)


def replace_tokenizer(model: SentenceTransformer, tokenizer: PreTrainedTokenizerBase) -> None:
    """Have the transformers read another tokenizer's ids."""
    for transformer in transformers_of(model):
        size = getattr(transformer.config, "vocab_size", len(tokenizer))
        if len(tokenizer) > size:
            raise DualencError(
                f"tokenizer has {len(tokenizer)} tokens, the model only {size}: use the model's own"
            )
        transformer.processor = tokenizer


def save_model(sides: dict[str, list[Any]], folder: Path, **settings: Any) -> None:
    """Write a folder for `SentenceTransformer`, with adapters merged and a last Normalize.

    Args:
        sides: the modules of "query" and "document", which a Router tells apart; or of one of them, for all texts.
        folder: an empty one.
        settings: prompts, default_prompt_name and truncate_dim of the model.
    """
    merged: dict[int, Any] = {}
    for modules in sides.values():
        for module in modules:
            merged.setdefault(id(module), _merged(module) if isinstance(module, Transformer) else module)
    complete = {task: [merged[id(m)] for m in modules] for task, modules in sides.items()}
    for modules in complete.values():
        if not isinstance(modules[-1], Normalize):
            modules.append(Normalize())
    if len(complete) == 2:
        modules = [Router.for_query_document(complete["query"], complete["document"])]
    else:
        (modules,) = complete.values()
    device = next(modules[0].parameters()).device
    with quiet_transformers():
        model = SentenceTransformer(
            modules=modules[:1], device=str(device), similarity_fn_name="cosine", **settings
        )
        # Given above, they would be cast to the type of the transformer's weights.
        for module in modules[1:]:
            model.append(module)
        model.save(str(folder), create_model_card=False)


def _merged(transformer: Transformer) -> Transformer:
    """A Transformer module to save: adapters merged in float32, and no trace of the tokenizer's last call."""
    tokenizer = transformer.tokenizer
    if tokenizer is not None and tokenizer.is_fast:
        tokenizer.backend_tokenizer.no_padding()
        tokenizer.backend_tokenizer.no_truncation()
    model: Any = transformer.model
    if not hasattr(model, "merge_and_unload"):
        return transformer
    dtype = next(p.dtype for p in model.parameters() if not p.requires_grad)
    return _with_model(transformer, copy.deepcopy(model).float().merge_and_unload().to(dtype))


@contextmanager
def _complete_weights(folder: Path) -> Iterator[None]:
    """Have transformers refuse a folder that lacks weights, which it would draw at random."""
    load = PreTrainedModel.__dict__["from_pretrained"]

    def load_all(cls: Any, *arguments: Any, **options: Any) -> Any:
        model, report = load.__func__(cls, *arguments, output_loading_info=True, **options)
        missing = sorted(key for key in report["missing_keys"] if "pooler." not in key)
        if missing:
            raise DualencError(
                f"{folder}: {len(missing)} weights are missing, {missing[0]} first; restore the folder"
            )
        return model

    PreTrainedModel.from_pretrained = classmethod(load_all)  # type: ignore
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = load  # type: ignore[method-assign]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switch off the progress bars, reports and warnings of transformers and sentence-transformers."""
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
