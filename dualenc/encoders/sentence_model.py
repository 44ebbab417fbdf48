"""What text towers use of the inside of sentence-transformers 6: loading, the modules of a side,
inputs, saving."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Sequence
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
    WeightedLayerPooling,
)
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerBase

from dualenc.encoders.hub import model_folder, quiet_loading
from dualenc.encoders.lora import add_adapters, merge_adapters
from dualenc.encoders.older_layout import write_older_layout
from dualenc.encoders.sentence_folder import check_sentence_folder, check_settings
from dualenc.encoders.tokenizer import forget_last_call, load_tokenizer, pad_behind
from dualenc.encoders.weights import settle_missing
from dualenc.errors import DualencError, explain

logger = logging.getLogger("dualenc.encoders")

MIN_LENGTH = 3
"""Shortest input in tokens: special tokens take two."""
MAX_LENGTH = 512
"""Longest input in tokens where neither the model nor the tokenizer nor the user sets a limit."""
NO_LIMIT = 1_000_000
"""Lengths from here on stand for none."""
MAX_LACKING = 4
"""How many times the weights that it has a folder may lack: of T5, the decoder."""
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def open_sides(
    name: str | SentenceTransformer | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    shared: bool | None,
    dtype: torch.dtype,
) -> tuple[SentenceTransformer, SentenceTransformer]:
    """The models of queries and of documents by the arguments of `TextEncoder`: one and the same,
    or one each."""
    if name is not None and config is None and tokenizer is None:
        queries = open_model(model_folder(name), dtype) if isinstance(name, str) else name.to(dtype)
        if queries.similarity_fn_name not in (None, "cosine"):
            kind = queries.similarity_fn_name
            logger.warning(
                "the model was trained for %s scores; here, and where it is saved, cosines compare",
                kind,
            )
        documents = copy.deepcopy(queries) if shared is False else queries
    elif name is None and config is not None and tokenizer is not None:
        own = load_tokenizer(tokenizer)
        queries = new_model(config, own, dtype)
        documents = new_model(config, own, dtype) if shared is False else queries
    else:
        raise DualencError(
            "give the name of a base model, or config and tokenizer to start from scratch"
        )
    for module in (*side_modules(queries, "query"), *side_modules(queries, "document")):
        if not isinstance(module, Transformer):
            module.float()  # a Dense is trained in full, and gets vectors in float32
    has_router = any(isinstance(module, Router) for module in queries)
    if has_router and shared:
        raise DualencError(
            f"{name}: its sides are separate, so shared cannot be true; leave it out"
        )
    if has_router:
        return queries, queries
    return queries, documents


def open_model(folder: Path, dtype: torch.dtype) -> SentenceTransformer:
    """Load a folder of sentence-transformers or transformers; code in it is never run, and pickles
    are not read."""
    places = check_sentence_folder(folder)
    with (
        quiet_loading(),
        explain(f"{folder}: does not load", "restore it, or choose another model"),
    ):
        missing = [_missing_weights(place, AutoModel) for place in places]
        model = SentenceTransformer(
            str(folder),
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        )
        # In the order in which the folder names them.
        transformers = [module for module in model.modules() if isinstance(module, Transformer)]
        for place, lacks_weights, module in zip(places, missing, transformers, strict=True):
            # For some kinds, sentence-transformers loads the encoder alone.
            if lacks_weights and (names := _missing_weights(place, type(module.model))):
                features = module(module.preprocess(["a"]))
                outputs = (module.module_output_name, "all_layer_embeddings")
                encoded = [features[name] for name in outputs if name in features]
                settle_missing(module.model, names, encoded, place)
    return model


def _missing_weights(place: Path, model_class: Any) -> list[str]:
    """The weights that a transformer's folder lacks; raises for shapes other than config.json
    says."""
    # On the meta device names and shapes alone are read, before config.json allocates anything.
    model, report = model_class.from_pretrained(
        place,
        device_map="meta",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    for name, *shapes in sorted(report["mismatched_keys"]):
        has, needs = (tuple(shape) for shape in shapes)
        problem = f"{name} is {has}, but {needs} by config.json"
        raise DualencError(f"{place}: {problem}; restore its files")
    missing = sorted(report["missing_keys"])
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    lacking = sum(sizes.get(name, 0) for name in missing)
    if lacking > MAX_LACKING * (sum(sizes.values()) - lacking):
        problem = f"{len(missing)} weights are missing, {missing[0]} first"
        raise DualencError(f"{place}: {problem}; restore its files")
    return missing


def new_model(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> SentenceTransformer:
    """A transformer with random weights by a configuration's fields, for the vocabulary of a
    tokenizer."""
    special_ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    fields = {"vocab_size": len(tokenizer), **special_ids, **copy.deepcopy(config)}
    if fields["vocab_size"] < len(tokenizer):
        problem = f"vocab_size is below the {len(tokenizer)} of the tokenizer"
        raise DualencError(f"config: {problem}; leave it out")
    check_settings(fields, "config")
    with tempfile.TemporaryDirectory() as folder, quiet_loading():
        full_config = AutoConfig.for_model(**fields)
        AutoModel.from_config(full_config, trust_remote_code=False).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return open_model(Path(folder), dtype)


def side_modules(model: SentenceTransformer, role: str) -> list[Any]:
    """The modules that encode a side in their order; of a Router, those of the side's route."""
    modules: list[Any] = []
    for module in model:
        if isinstance(module, Router):
            modules += module.sub_modules[module._resolve_route(role, "text")]  # type: ignore
        else:
            modules.append(module)
    return modules


def side_prompt(model: SentenceTransformer, role: str) -> str:
    """A side's prompt that is not empty, by its names, or the default prompt, unless that belongs
    to a side."""
    default = model.default_prompt_name or ""
    names = PROMPT_NAMES[role] if is_of_a_side(default) else (*PROMPT_NAMES[role], default)
    return next((prompt for name in names if (prompt := model.prompts.get(name))), "")


def is_of_a_side(prompt: str | None) -> bool:
    """Whether a prompt's name says which side it is for."""
    return any(prompt in names for names in PROMPT_NAMES.values())


def set_up(
    model: SentenceTransformer,
    max_length: int | None,
    pooling: str | Sequence[str] | None,
    lora_rank: int,
    lora_targets: str | list[str],
) -> None:
    """Set the modules of a model up by the arguments of `TextEncoder`, in one pass."""
    if max_length is not None and max_length < MIN_LENGTH:
        raise DualencError(f"max_length is {max_length}: give at least {MIN_LENGTH} tokens")
    modules = list(model.modules())
    reads_layers = any(isinstance(module, WeightedLayerPooling) for module in modules)
    if pooling is not None and not any(isinstance(module, Pooling) for module in modules):
        raise DualencError(
            f"pooling is {pooling!r}, but the model has no Pooling module; leave it out"
        )
    for module in modules:
        if isinstance(module, Pooling) and pooling is not None:
            modes = [pooling] if isinstance(pooling, str) else pooling
            library_modes = ["lasttoken" if mode == "last" else mode for mode in modes]
            module.__init__(module.embedding_dimension, library_modes, module.include_prompt)  # type: ignore
        elif isinstance(module, StaticEmbedding) and lora_rank:
            raise DualencError("LoRA needs a transformer, not a table; leave lora_rank out")
        elif isinstance(module, StaticEmbedding) and max_length is not None:
            module.tokenizer.enable_truncation(max_length)
        elif isinstance(module, Transformer):
            _set_up_transformer(module, max_length)
            _make_savable(module, reads_layers)
            if lora_rank:
                add_adapters(module.model, lora_rank, lora_targets)


def _set_up_transformer(module: Any, max_length: int | None) -> None:
    """Cut texts to `max_length`, or to what model and folder allow, pad behind them, and freeze
    BERT's own pooler."""
    positions = getattr(module.config, "max_position_embeddings", None)
    for name, part in module.model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            # RoBERTa counts positions from the padding index on.
            positions = part.num_embeddings - (
                0 if part.padding_idx is None else part.padding_idx + 1
            )
        elif name == "pooler":
            part.requires_grad_(False)  # no output depends on it
    requested = max_length or module.max_seq_length or NO_LIMIT
    limits = [limit for limit in (requested, positions) if limit and 0 < limit < NO_LIMIT]
    module.max_seq_length = min(limits, default=MAX_LENGTH)
    if module.max_seq_length < MIN_LENGTH:
        problem = f"texts are cut to {module.max_seq_length} tokens"
        raise DualencError(f"{problem}; set max_length to {MIN_LENGTH} or more")
    if module.max_seq_length < requested < NO_LIMIT:
        warnings.warn(f"texts are cut to {positions} tokens, the model's positions", stacklevel=4)
    pad_behind(module.tokenizer)


def _make_savable(module: Any, reads_layers: bool) -> None:
    """Leave out settings that transformers does not save, none of vectors, and save
    do_lower_case."""
    config = module.config
    config.output_attentions = False
    config.output_hidden_states = reads_layers
    # Of text generation, as in the config.json of older models.
    for name in config._get_generation_parameters():
        delattr(config, name)
    if module.do_lower_case:
        module.config_keys = [*module.config_keys, "do_lower_case"]


def check_vocabulary_sizes(model: SentenceTransformer, where: str) -> None:
    """Refuse a tokenizer with a token that has no row in the table of vectors."""
    for module in model.modules():
        if isinstance(module, StaticEmbedding):
            num_rows = module.num_embeddings
        elif isinstance(module, Transformer):
            table = module.model.get_input_embeddings()
            if not isinstance(table, nn.Embedding):
                continue
            num_rows = table.num_embeddings
        else:
            continue
        token, number = max(module.tokenizer.get_vocab().items(), key=lambda item: item[1])
        if number >= num_rows:
            rows = f"the model has {num_rows} vectors"
            problem = f"the tokenizer gives {token[:40]!r} the id {number}, but {rows}"
            raise DualencError(f"{where}: {problem}; resize its embeddings, or remove the token")


def text_input(module: Any) -> Any:
    """A picklable copy of an input module that can do nothing but `preprocess` texts."""
    other = copy.copy(module)
    other._modules = {}
    other.__dict__["model"] = SimpleNamespace(config=getattr(module, "config", None))
    other.can_flatten_inputs = False
    return other


def save_model(sides: dict[str, list[Any]], folder: Path, **settings: Any) -> None:
    """Write a folder for `SentenceTransformer`, with adapters merged and a last Normalize.

    Args:
        sides: the modules of "query" and "document", which a Router tells apart; or of one of them,
            for all texts.
        folder: an empty one.
        settings: prompts, default_prompt_name and truncate_dim of the model.
    """
    # By identity: a Router stores what both sides share once.
    trained = nn.ModuleList(
        dict.fromkeys(module for modules in sides.values() for module in modules)
    )
    transformers = [module for module in trained if isinstance(module, Transformer)]
    for module in transformers:
        forget_last_call(module.tokenizer)
    saved: dict[int, Any] = dict(zip(map(id, trained), merge_adapters(trained).children()))
    for module in transformers:
        saved[id(module)].to(module.model.dtype)
    routes = {
        role: [saved[id(m)] for m in modules] + [Normalize()] for role, modules in sides.items()
    }
    only = next(iter(routes.values()))
    modules = only if len(routes) == 1 else [Router(routes, default_route="document")]
    with quiet_loading():
        device = str(next(saved[id(trained[0])].parameters()).device)
        settings |= {"modules": modules, "device": device, "similarity_fn_name": "cosine"}
        SentenceTransformer(**settings).save(str(folder), create_model_card=False)
    if len(routes) == 1:
        write_older_layout(folder, only[0].max_seq_length)
