"""The parts of sentence-transformers 6 that text towers depend on."""

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
"""Minimum input length in tokens: two are special tokens."""
MAX_LENGTH = 512
"""Default input length in tokens if model, tokenizer and user set no limit."""
NO_LIMIT = 1_000_000
"""Tokenizers express "no limit" by lengths of this size or more."""
MAX_LACKING = 4
"""Maximum ratio of missing to present weights: an encoder's folder may lack T5's decoder."""
PROMPT_NAMES = {"query": ("query",), "document": ("document", "passage", "corpus")}
SPECIAL_IDS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def open_sides(
    name: str | SentenceTransformer | None,
    config: dict[str, Any] | None,
    tokenizer: str | PreTrainedTokenizerBase | None,
    shared: bool | None,
    dtype: torch.dtype,
) -> tuple[SentenceTransformer, SentenceTransformer]:
    """Open the models of queries and documents; the arguments are those of `TextEncoder`.

    Returns:
        The query model and the document model: one object if they share weights.
    """
    if name is not None and config is None and tokenizer is None:
        queries = open_model(model_folder(name), dtype) if isinstance(name, str) else name.to(dtype)
        if queries.similarity_fn_name not in (None, "cosine"):
            logger.warning(
                "the model was trained for %s scores; dualenc uses, and saves, cosine similarity",
                queries.similarity_fn_name,
            )
        documents = copy.deepcopy(queries) if shared is False else queries
    elif name is None and config is not None and tokenizer is not None:
        own = load_tokenizer(tokenizer)
        queries = new_model(config, own, dtype)
        documents = new_model(config, own, dtype) if shared is False else queries
    else:
        raise DualencError(
            "a text encoder needs either a base model or a config with a tokenizer",
            fix="give the name of a model, or config and tokenizer to start from scratch",
        )
    for module in (*side_modules(queries, "query"), *side_modules(queries, "document")):
        if not isinstance(module, Transformer):
            # Adapters exist for transformers only. A Dense is trained in full, which needs
            # float32, and gets float32 vectors.
            module.float()
    has_router = any(isinstance(module, Router) for module in queries)
    if has_router and shared:
        raise DualencError(
            "its sides are separate, so shared cannot be true",
            fix="leave shared out",
            where=name,
        )
    if has_router:
        return queries, queries
    return queries, documents


def open_model(folder: Path, dtype: torch.dtype) -> SentenceTransformer:
    """Load a folder of sentence-transformers or transformers.

    Code in the folder is never run, and pickled weights are not read.
    """
    places = check_sentence_folder(folder)
    with (
        quiet_loading(),
        explain(f"{folder}: does not load", "restore it, or choose another model"),
    ):
        # First on the meta device, which is cheap, and raises before gigabytes are allocated.
        missing = [_missing_weights(place, AutoModel) for place in places]
        model = SentenceTransformer(
            str(folder),
            device="cpu",
            local_files_only=True,
            trust_remote_code=False,
            model_kwargs={"dtype": dtype, "use_safetensors": True},
        )
        # In the order of the folder's module list, like `places`.
        transformers = [module for module in model.modules() if isinstance(module, Transformer)]
        for place, lacks_weights, module in zip(places, missing, transformers, strict=True):
            # sentence-transformers loads some architectures, such as T5, as the encoder alone.
            # What AutoModel lacks may thus not be part of this model.
            if lacks_weights and (names := _missing_weights(place, type(module.model))):
                features = module(module.preprocess(["a"]))
                outputs = (module.module_output_name, "all_layer_embeddings")
                encoded = [features[name] for name in outputs if name in features]
                settle_missing(module.model, names, encoded, place)
    return model


def _missing_weights(place: Path, model_class: Any) -> list[str]:
    """Return the weights that a folder lacks; raise if shapes contradict config.json."""
    # The meta device has names and shapes but no memory, whatever sizes config.json claims.
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
        raise DualencError(
            f"{name} has shape {has}, but config.json requires {needs}",
            fix="restore its files",
            where=place,
        )
    missing = sorted(report["missing_keys"])
    sizes = {name: weight.numel() for name, weight in model.named_parameters()}
    lacking = sum(sizes.get(name, 0) for name in missing)
    if lacking > MAX_LACKING * (sum(sizes.values()) - lacking):
        raise DualencError(
            f"{len(missing)} weights are missing, such as {missing[0]}",
            fix="restore its files",
            where=place,
        )
    return missing


def new_model(
    config: dict[str, Any], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> SentenceTransformer:
    """Create a transformer with random weights, for the vocabulary of a tokenizer."""
    special_ids = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}
    fields = {"vocab_size": len(tokenizer), **special_ids, **copy.deepcopy(config)}
    if fields["vocab_size"] < len(tokenizer):
        raise DualencError(
            f"vocab_size is smaller than the tokenizer's, {len(tokenizer)}",
            fix="leave it out",
            where="config",
        )
    # A recipe may come from elsewhere, so its config is checked like a foreign folder.
    check_settings(fields, "config")
    # Save and reload: sentence-transformers chooses its modules when it opens a folder.
    with tempfile.TemporaryDirectory() as folder, quiet_loading():
        full_config = AutoConfig.for_model(**fields)
        AutoModel.from_config(full_config, trust_remote_code=False).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return open_model(Path(folder), dtype)


def side_modules(model: SentenceTransformer, role: str) -> list[Any]:
    """Return the modules that encode a side, in order; for a Router, those of the side's route."""
    modules: list[Any] = []
    for module in model:
        if isinstance(module, Router):
            modules += module.sub_modules[module._resolve_route(role, "text")]  # type: ignore
        else:
            modules.append(module)
    return modules


def side_prompt(model: SentenceTransformer, role: str) -> str:
    """Return a side's prompt, else the default prompt if it is for both sides, else an empty
    one."""
    default = model.default_prompt_name or ""
    names = PROMPT_NAMES[role] if is_of_a_side(default) else (*PROMPT_NAMES[role], default)
    return next((prompt for name in names if (prompt := model.prompts.get(name))), "")


def is_of_a_side(prompt: str | None) -> bool:
    """Return True if a prompt's name is that of a side."""
    return any(prompt in names for names in PROMPT_NAMES.values())


def recompute_activations(model: SentenceTransformer) -> None:
    """Recompute activations in the backward pass instead of storing them.

    Args:
        model: model of one side or both.
    """
    with warnings.catch_warnings():
        # sentence-transformers calls transformers by a name that is about to be dropped there.
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable`", FutureWarning)
        model.gradient_checkpointing_enable({"use_reentrant": False})


def set_up(
    model: SentenceTransformer,
    max_length: int | None,
    pooling: str | Sequence[str] | None,
    lora_rank: int,
    lora_targets: str | list[str],
) -> None:
    """Configure the modules of a model in one pass.

    Args:
        model: the model, changed in place.
        max_length: longest input in tokens; None for the model's limit.
        pooling: pooling mode or modes; None for the model's own.
        lora_rank: rank of the adapters; 0 for none.
        lora_targets: layers that get adapters, see `add_adapters`.
    """
    if max_length is not None and max_length < MIN_LENGTH:
        raise DualencError(f"max_length is {max_length}", fix=f"give at least {MIN_LENGTH} tokens")
    modules = list(model.modules())
    reads_layers = any(isinstance(module, WeightedLayerPooling) for module in modules)
    if pooling is not None and not any(isinstance(module, Pooling) for module in modules):
        raise DualencError(
            f"pooling is {pooling!r}, but the model has no Pooling module",
            fix="leave it out",
        )
    for module in modules:
        if isinstance(module, Pooling) and pooling is not None:
            modes = [pooling] if isinstance(pooling, str) else pooling
            library_modes = ["lasttoken" if mode == "last" else mode for mode in modes]
            # Pooling computes its output size from the modes in `__init__`.
            module.__init__(module.embedding_dimension, library_modes, module.include_prompt)  # type: ignore
        elif isinstance(module, StaticEmbedding) and lora_rank:
            raise DualencError(
                "LoRA needs a transformer, but the model is a table of token vectors",
                fix="leave lora_rank out",
            )
        elif isinstance(module, StaticEmbedding) and max_length is not None:
            module.tokenizer.enable_truncation(max_length)
        elif isinstance(module, Transformer):
            _set_up_transformer(module, max_length)
            _make_savable(module, reads_layers)
            if lora_rank:
                add_adapters(module.model, lora_rank, lora_targets)


def _set_up_transformer(module: Any, max_length: int | None) -> None:
    """Set truncation and padding of a transformer, and freeze BERT's unused pooler."""
    positions = getattr(module.config, "max_position_embeddings", None)
    for name, part in module.model.named_modules():
        if name.endswith("position_embeddings") and isinstance(part, nn.Embedding):
            # RoBERTa numbers positions from behind the padding index.
            first = 0 if part.padding_idx is None else part.padding_idx + 1
            positions = part.num_embeddings - first
        elif name == "pooler":
            # No output depends on it.
            part.requires_grad_(False)
    requested = max_length or module.max_seq_length or NO_LIMIT
    limits = [limit for limit in (requested, positions) if limit and 0 < limit < NO_LIMIT]
    module.max_seq_length = min(limits, default=MAX_LENGTH)
    if module.max_seq_length < MIN_LENGTH:
        raise DualencError(
            f"texts are truncated to {module.max_seq_length} tokens",
            fix=f"set max_length to {MIN_LENGTH} or more",
        )
    if module.max_seq_length < requested < NO_LIMIT:
        warnings.warn(
            f"texts are truncated to {positions} tokens, the number of the model's positions",
            stacklevel=4,
        )
    pad_behind(module.tokenizer)


def _make_savable(module: Any, reads_layers: bool) -> None:
    """Remove settings that transformers refuses to save, and keep do_lower_case."""
    config = module.config
    # transformers refuses to save these settings. Only pooling over layers needs one of them.
    config.output_attentions = False
    config.output_hidden_states = reads_layers
    # Older models keep generation settings in config.json, which transformers refuses to save.
    for name in config._get_generation_parameters():
        delattr(config, name)
    if module.do_lower_case:
        module.config_keys = [*module.config_keys, "do_lower_case"]


def check_vocabulary_sizes(model: SentenceTransformer, where: str) -> None:
    """Raise if the tokenizer has a token without a row in the embedding table."""
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
            raise DualencError(
                f"the tokenizer maps {token[:40]!r} to id {number}, but the model "
                f"has {num_rows} token vectors",
                fix="resize its embeddings, or remove the token",
                where=where,
            )


def text_input(module: Any) -> Any:
    """Return a picklable copy of an input module that supports nothing but `preprocess`."""
    # Workers get the tokenizer but not the weights. `preprocess` looks at the model's
    # configuration, so a stand-in carries it.
    other = copy.copy(module)
    other._modules = {}
    other.__dict__["model"] = SimpleNamespace(config=getattr(module, "config", None))
    # Flattened inputs cannot be collated. Packing comes later, after the tokens are cached.
    other.can_flatten_inputs = False
    return other


def save_model(sides: dict[str, list[Any]], folder: Path, **settings: Any) -> None:
    """Write a folder for `SentenceTransformer`, with adapters merged and a final Normalize.

    Args:
        sides: modules of "query" and "document", to be combined in a Router; or of one of them,
            used for all texts.
        folder: an empty folder.
        settings: prompts, default_prompt_name and truncate_dim of the model.
    """
    # Keyed by identity, because a Router stores modules that both sides share once.
    trained = nn.ModuleList(
        dict.fromkeys(module for modules in sides.values() for module in modules)
    )
    transformers = [module for module in trained if isinstance(module, Transformer)]
    for module in transformers:
        forget_last_call(module.tokenizer)
    # All sides in one list, so that the copies share what the originals share.
    saved: dict[int, Any] = dict(zip(map(id, trained), merge_adapters(trained).children()))
    # Merging computes in float32; the folder keeps the precision of the base model.
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
    # Routers exist only since sentence-transformers 5.
    if len(routes) == 1:
        write_older_layout(folder, only[0].max_seq_length)
