"""Transformers backbones of text towers: random, loaded, adapted, written."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dualenc.encoders.load import first_line
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MAX_LENGTH = 512
"""Longest input in tokens where neither the model nor the tokenizer nor the user sets a limit."""


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
            _adopt_special_tokens(own_config, tokenizer)
            _refuse_kernels(own_config)
            model = _auto_class(own_config).from_config(own_config, trust_remote_code=False)
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
            _refuse_kernels(config)
            model, report = _auto_class(config).from_pretrained(
                folder, config=config, use_safetensors=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:
        raise DualencError(
            f"{folder}: the text model does not load ({first_line(error)}); restore the folder"
        ) from error
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


def check_length(max_length: int | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """The length to truncate to, in tokens: the one asked for, or the longest that all agree on.

    Raises:
        DualencError: the model has fewer positions than were asked for.
    """
    positions = max_positions(model)
    if max_length is None:
        known = [n for n in (positions, tokenizer.model_max_length) if n and n < 1_000_000]
        return min(known, default=MAX_LENGTH)
    if max_length < 3:
        raise DualencError(f"max_length is {max_length}: give at least 3, special tokens take two")
    if positions is not None and max_length > positions:
        raise DualencError(f"max_length is {max_length}, but the model has {positions} positions: lower it")
    return max_length


def checkpoint_activations(model: Any) -> None:
    """Store no activations inside the layers; the backward pass computes them again.

    Raises:
        DualencError: the architecture cannot do it.
    """
    if not getattr(model, "supports_gradient_checkpointing", True):
        raise DualencError(f"{type(model).__name__} has no gradient checkpointing: leave gradient_checkpointing out")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def accepted_inputs(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Those of the tokenizer's outputs that the model's forward takes."""
    accepted = inspect.signature(model.forward).parameters
    return [name for name in tokenizer.model_input_names if name in accepted]


def save_transformer(model: nn.Module, folder: Path) -> None:
    """Write config.json and model.safetensors; adapters are merged into a copy's weights first."""
    if hasattr(model, "merge_and_unload"):
        model = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
    with quiet_transformers():
        model.save_pretrained(folder)  # type: ignore[operator]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and reports: what matters of them is checked here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
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

    half = any(name.endswith("EncoderModel") for name in config.architectures or [])
    return AutoModelForTextEncoding if half or getattr(config, "is_encoder_decoder", False) else AutoModel


def _refuse_kernels(config: Any) -> None:
    """An attention named `owner/name` would be fetched from the hub and run."""
    name = str(getattr(config, "_attn_implementation", None))
    if "/" in name:
        raise DualencError(f"attn_implementation {name} is code from the hub, which is not run; leave it out")


def _adopt_special_tokens(config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Replace an architecture's usual special tokens where the vocabulary is too small to have them."""
    for name in ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"):
        usual = getattr(config, name, None)
        if isinstance(usual, int) and usual >= len(tokenizer):
            setattr(config, name, getattr(tokenizer, name))


def _without_pooler(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze BERT's own pooler, which no output here depends on."""
    for name, parameter in model.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)
    return model.eval()
