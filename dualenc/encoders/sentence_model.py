"""What text towers use of the inside of sentence-transformers 6: loading, the modules of a side, inputs, saving."""

from __future__ import annotations

import copy
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
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}


def open_model(folder: Path, dtype: torch.dtype) -> SentenceTransformer:
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
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> SentenceTransformer:
    """A transformer with random weights by a configuration's fields; vocabulary and padding follow the tokenizer."""
    size = len(tokenizer)
    fields = {"vocab_size": size, "pad_token_id": tokenizer.pad_token_id, **copy.deepcopy(config)}
    if fields["vocab_size"] < size:
        raise DualencError(
            f"config has vocab_size {fields['vocab_size']}, the tokenizer {size} tokens: leave it out"
        )
    check_settings(fields, "config")
    problem = explain("config of the text tower does not fit", "correct its fields")
    with tempfile.TemporaryDirectory() as folder:
        with quiet_transformers(), problem:
            full_config = AutoConfig.for_model(**fields)
            # An architecture's default special tokens may lie beyond a small vocabulary.
            for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
                default = getattr(full_config, name, None)
                if isinstance(default, int) and default >= size:
                    setattr(full_config, name, getattr(tokenizer, name))
            AutoModel.from_config(full_config, trust_remote_code=False).save_pretrained(folder)
        save_tokenizer(tokenizer, Path(folder), tokenizer.model_max_length)
        return open_model(Path(folder), dtype)


def input_modules(model: SentenceTransformer) -> list[Any]:
    """The modules that read texts, those inside a Router included."""
    return [module for module in model.modules() if isinstance(module, Transformer | StaticEmbedding)]


def has_router(model: SentenceTransformer) -> bool:
    """Whether the sides have modules of their own."""
    return any(isinstance(module, Router) for module in model)


def side_modules(model: SentenceTransformer, role: str) -> list[Any]:
    """The modules that encode a side in their order; of a Router, those of the side's route."""
    modules: list[Any] = []
    for module in model:
        if isinstance(module, Router):
            with explain(f"the Router has no route for {role}", "choose another model"):
                modules += module.sub_modules[module._resolve_route(role, "text")]  # type: ignore
        else:
            modules.append(module)
    return modules


def side_prompt(model: SentenceTransformer, role: str) -> str:
    """A side's prompt that is not empty, by its names, or the default prompt, unless that belongs to a side."""
    names = [*PROMPT_NAMES[role]]
    default = model.default_prompt_name
    if default and default not in (*PROMPT_NAMES["query"], *PROMPT_NAMES["document"]):
        names.append(default)
    return next((prompt for name in names if (prompt := model.prompts.get(name))), "")


def set_pooling(model: SentenceTransformer, modes: str | Sequence[str]) -> None:
    """Have Pooling modules combine token vectors in another way; "last" is sentence-transformers' "lasttoken"."""
    names = [modes] if isinstance(modes, str) else modes
    poolings = [module for module in model.modules() if isinstance(module, Pooling)]
    if not poolings:
        raise DualencError(f"pooling is {modes!r}, but the model has no Pooling module; leave it out")
    library_names = ["lasttoken" if name == "last" else name for name in names]
    for pooling in poolings:
        with explain(f"pooling {modes}", "correct it"):
            pooling.__init__(pooling.embedding_dimension, library_names, pooling.include_prompt)  # type: ignore


def input_length(module: Any) -> int:
    """Longest input of a module in tokens."""
    if isinstance(module, StaticEmbedding):
        return int((module.tokenizer.truncation or {}).get("max_length", MAX_LENGTH))
    return int(module.max_seq_length)


def prepare_input(module: Any, max_length: int | None) -> None:
    """Set the length of inputs and the side of padding, and freeze BERT's own pooler, which no output depends on.

    Texts are cut to `max_length` tokens, or to the longest that the model and its folder allow. Padding comes behind
    them, where it moves no positions.
    """
    if max_length is not None and max_length < MIN_LENGTH:
        raise DualencError(
            f"max_length is {max_length}: give at least {MIN_LENGTH}, special tokens take two"
        )
    if isinstance(module, StaticEmbedding):
        if max_length is not None:
            module.tokenizer.enable_truncation(max_length)
        return
    positions = max_positions(module.model)
    wanted = max_length or module.max_seq_length or NO_LIMIT
    if positions is not None and positions < wanted < NO_LIMIT:
        warnings.warn(f"texts are cut to {positions} tokens, the model's positions", stacklevel=3)
    limits = [limit for limit in (wanted, positions) if limit and limit < NO_LIMIT]
    module.max_seq_length = min(limits, default=MAX_LENGTH)
    tokenizer = module.tokenizer
    tokenizer.padding_side = tokenizer.init_kwargs["padding_side"] = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    for name, parameter in module.model.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)


def max_positions(model: PreTrainedModel) -> int | None:
    """Longest input in tokens that the model can take, None if it has no limit."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding):
            # RoBERTa counts positions from the padding index on.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return module.num_embeddings - first
    limit = getattr(model.config, "max_position_embeddings", None)
    return limit if limit and limit > 0 else None


def add_lora(module: Any, rank: int, targets: str | list[str]) -> None:
    """Freeze a transformer and add trainable adapters W + 2·BA to its linear layers, in place."""
    if not isinstance(module, Transformer):
        raise DualencError("LoRA needs a transformer, and the model is a table; leave lora_rank out")
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise DualencError("LoRA needs the package peft: pip install 'dualenc[lora]'") from None
    has_pooler = getattr(module.model, "pooler", None) is not None
    with explain(f"LoRA of rank {rank}, targets {targets}", "correct them"):
        config = LoraConfig(
            r=rank,
            lora_alpha=ALPHA_PER_RANK * rank,
            target_modules=targets,
            # Named where there is none, peft warns.
            exclude_modules=r"(.*\.)?pooler\.dense" if has_pooler else None,
        )
        module.model = get_peft_model(module.model, config)


def with_model(module: Any, model: Any) -> Any:
    """A copy of an input module without weights of its own, with another model inside."""
    other = copy.copy(module)
    other._modules = {}
    other.__dict__["model"] = model
    return other


def text_input(module: Any) -> Any:
    """A picklable copy of an input module that can do nothing but `preprocess` texts."""
    other = with_model(module, SimpleNamespace(config=getattr(module, "config", None)))
    other.can_flatten_inputs = False
    return other


def save_model(sides: dict[str, list[Any]], folder: Path, **settings: Any) -> None:
    """Write a folder for `SentenceTransformer`, with adapters merged and a last Normalize.

    Args:
        sides: the modules of "query" and "document", which a Router tells apart; or of one of them, for all texts.
        folder: an empty one.
        settings: prompts, default_prompt_name and truncate_dim of the model.
    """
    all_modules = [module for modules in sides.values() for module in modules]
    device = next(nn.ModuleList(all_modules).parameters()).device
    with quiet_transformers():
        # By identity: a Router stores what both sides share once.
        saved = {id(module): _merged(module) for module in all_modules}
        routes = {role: [saved[id(m)] for m in modules] + [Normalize()] for role, modules in sides.items()}
        first = next(iter(routes.values()))
        modules = [Router(routes, default_route="document")] if len(routes) == 2 else first
        model = SentenceTransformer(
            modules=modules, device=str(device), similarity_fn_name="cosine", **settings
        )
        model.save(str(folder), create_model_card=False)


def _merged(module: Any) -> Any:
    """A module to save: adapters merged in float32, and no trace of the tokenizer's last call."""
    if not isinstance(module, Transformer):
        return module
    model: Any = module.model
    if hasattr(model, "merge_and_unload"):
        dtype = next(p.dtype for p in model.parameters() if not p.requires_grad)
        model = copy.deepcopy(model).float().merge_and_unload().to(dtype)
    backend = getattr(module.tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.no_truncation()
    return with_model(module, model)


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
