"""open_clip models: created from a name or a configuration; their folder, read and written."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from dualenc.encoders.load import first_line, no_foreign_code
from dualenc.encoders.tokenizer import save_tokenizer
from dualenc.errors import DualencError
from dualenc.files import read_json_object, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokenize = Callable[[list[str]], Tensor]
"""Texts to token ids (B, context length)."""

CONTEXT_LENGTH = 77
VOCAB_SIZE = 49408
"""open_clip's defaults, of the original CLIP."""

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
WEIGHTS_FILES = (WEIGHTS_FILE, "open_clip_pytorch_model.safetensors", "model.safetensors")
SECTIONS = ("embed_dim", "vision_cfg", "text_cfg")
TOKENIZER_ARGUMENTS = ("clean", "strip_sep_token", "language", "additional_special_tokens", "reduction_mask")
"""Those that cannot lead a tokenizer to other files or to code; open_clip's own configurations use the first two."""


def registered_config(name: str) -> dict[str, Any]:
    """The configuration that open_clip knows under a name.

    Raises:
        DualencError: it knows none.
    """
    import open_clip

    config = open_clip.get_model_config(name)
    if config is None:
        raise DualencError(f"{name}: open_clip knows no such model; open_clip.list_models() lists them")
    return config


def folder_config(folder: Path) -> dict[str, Any]:
    """The `model_cfg` of an open_clip folder.

    Raises:
        DualencError: there is none.
    """
    config = read_json_object(folder / CONFIG_FILE).get("model_cfg")
    if not isinstance(config, dict):
        raise DualencError(f"{folder / CONFIG_FILE}: no model_cfg, so no open_clip model; restore the file")
    return config


def create(source: str | dict[str, Any], **options: Any) -> nn.Module:
    """Create an open_clip model.

    Args:
        source: what `open_clip.create_model` takes as a name, or a configuration (weights random, from torch's
            generator).
        options: further arguments of `open_clip.create_model`.

    Raises:
        DualencError: the configuration is not one of a two-tower model, or weights cannot be had.
    """
    import open_clip

    if isinstance(source, str):
        with _explained(source):
            return open_clip.create_model(source, weights_only=True, **options)
    check_config(source, "config", pretrained=bool(options.get("pretrained_text") or options.get("pretrained_image")))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG_FILE).write_text(json.dumps({"model_cfg": source}))
        with _explained("config"):
            return open_clip.create_model(f"local-dir:{folder}", load_weights=False, **options)


def check_config(config: dict[str, Any], where: str, pretrained: bool = False) -> None:
    """Refuse configurations that are not two towers, and those with which open_clip would run code of a model.

    Args:
        config: an open_clip configuration.
        where: what errors call it.
        pretrained: the towers that it names are loaded with their weights.

    Raises:
        DualencError: a section is missing, the model is generative, a tower or tokenizer is code of its own, or a
            tower's folder has other weights than safetensors.
    """
    missing = [section for section in SECTIONS if section not in config]
    if missing:
        raise DualencError(f"{where}: {', '.join(missing)} missing; an open_clip model needs {', '.join(SECTIONS)}")
    if "multimodal_cfg" in config:
        raise DualencError(f"{where}: CoCa models are not supported; choose one without multimodal_cfg")
    text, vision = config["text_cfg"], config["vision_cfg"]
    if not isinstance(text, dict) or not isinstance(vision, dict):
        raise DualencError(f"{where}: text_cfg or vision_cfg does not hold keys; restore it")
    for key in text.get("tokenizer_kwargs") or {}:
        if key not in TOKENIZER_ARGUMENTS:
            raise DualencError(
                f"{where}: with {key} in tokenizer_kwargs a tokenizer can be code of its own, which is not run; "
                f"leave it out, only {', '.join(TOKENIZER_ARGUMENTS)} are taken"
            )
    towers = [str(name) for name in (text.get("hf_model_name"), vision.get("timm_model_name")) if name]
    for folder in (Path(name.removeprefix("local-dir:")) for name in towers):
        if pretrained and folder.is_dir() and not any(folder.glob("*.safetensors")):
            raise DualencError(f"{folder}: no *.safetensors; convert its weights to safetensors first")
    if text.get("hf_model_name"):
        _check_text_tower(str(text["hf_model_name"]), where)


def _check_text_tower(name: str, where: str) -> None:
    """open_clip loads this configuration without a word about its code; loaded so once before, its code is refused."""
    from transformers import AutoConfig

    try:
        AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Exception as error:
        raise DualencError(
            f"{where}: text_cfg.hf_model_name {name} does not load without code of its own, which is not run "
            f"({first_line(error)}); choose another"
        ) from error


def load_folder(folder: Path, **options: Any) -> nn.Module:
    """The model of an open_clip folder, from its safetensors weights only.

    Raises:
        DualencError: configuration or weights are missing, corrupt, or do not fit each other.
    """
    from open_clip.factory import load_checkpoint

    check_config(folder_config(folder), str(folder / CONFIG_FILE))
    weights = [folder / name for name in WEIGHTS_FILES if (folder / name).is_file()]
    if not weights:
        raise DualencError(f"{folder}: no {WEIGHTS_FILE}; convert its weights to safetensors first")
    model = create(f"local-dir:{folder}", load_weights=False, **options)
    with _explained(str(weights[0])):
        load_checkpoint(model, str(weights[0]))
    return model


def write_folder(folder: Path, config: dict[str, Any], preprocess: dict[str, Any], weights: dict[str, Tensor]) -> None:
    """Write an open_clip folder, all but its tokenizer.

    Args:
        folder: where.
        config: open_clip's `model_cfg`.
        preprocess: the model's `visual.preprocess_cfg`.
        weights: state dict of the whole model.
    """
    from safetensors.torch import save_file

    config = copy.deepcopy(config)
    # Towers are complete here: nothing is to be fetched when the folder is loaded.
    config["vision_cfg"].pop("timm_model_pretrained", None)
    config["text_cfg"].pop("hf_model_pretrained", None)
    kept = {key: preprocess[key] for key in ("mean", "std", "interpolation", "resize_mode") if key in preprocess}
    write_json(folder / CONFIG_FILE, {"model_cfg": config, "preprocess_cfg": kept})
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / WEIGHTS_FILE)


def get_tokenizer(source: str, config: dict[str, Any], context_length: int | None = None) -> Tokenize:
    """The tokenizer that open_clip uses for a model name or `local-dir:FOLDER`.

    Args:
        source: the name or folder.
        config: its `model_cfg`.
        context_length: longest text in tokens; None: as the configuration says.

    Raises:
        DualencError: its files are missing or cannot be fetched.
    """
    import open_clip

    # A tokenizer of open_clip's own takes no such argument.
    trust: dict[str, Any] = {"trust_remote_code": False} if config["text_cfg"].get("hf_tokenizer_name") else {}
    try:
        with no_foreign_code():
            return open_clip.get_tokenizer(source, context_length=context_length, **trust)
    except Exception as error:
        raise DualencError(
            f"{source}: its tokenizer does not load ({first_line(error)}); restore the tokenizer's files"
        ) from error


def folder_tokenizer(folder: Path, config: dict[str, Any], context_length: int | None = None) -> Tokenize:
    """The tokenizer of an open_clip folder.

    Args:
        folder: where its files are.
        config: the folder's `model_cfg`.
        context_length: longest text in tokens; None: as the folder says.

    Raises:
        DualencError: its files are missing, or it could only be made by running code from the folder.
    """
    settings = folder / "tokenizer_config.json"
    check_config(config, str(folder / CONFIG_FILE))
    if settings.is_file() and "auto_map" in read_json_object(settings):
        raise DualencError(f"{folder}: its tokenizer is code of its own, which is not run; save it with a plain one")
    return get_tokenizer(f"local-dir:{folder}", config, context_length)


def config_tokenizer(config: dict[str, Any], tokenizer: PreTrainedTokenizerBase | None) -> Tokenize:
    """The tokenizer of a model made from a configuration.

    Args:
        config: an open_clip configuration; with a tokenizer of one's own, its `text_cfg` is fitted to it in place:
            vocabulary size, and reading the output at the token that ends every text.
        tokenizer: a transformers tokenizer, or None for open_clip's own.

    Raises:
        DualencError: the vocabulary is larger than the configuration's, or nothing marks the end of a text.
    """
    text = config["text_cfg"]
    if tokenizer is None:
        if not text.get("hf_tokenizer_name") and text.get("vocab_size", VOCAB_SIZE) < VOCAB_SIZE:
            raise DualencError(
                f"text_cfg.vocab_size is {text['vocab_size']}: open_clip's tokenizer needs {VOCAB_SIZE}; "
                "leave it out or give a tokenizer"
            )
    else:
        _fit(text, tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG_FILE).write_text(json.dumps({"model_cfg": config}))
        if tokenizer is not None:
            save_tokenizer(tokenizer, Path(folder), text.get("context_length", CONTEXT_LENGTH))
        return get_tokenizer(f"local-dir:{folder}", config)


def _fit(text: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    text["hf_tokenizer_name"] = "."  # in a folder, open_clip takes the tokenizer beside its configuration
    if text.setdefault("vocab_size", len(tokenizer)) < len(tokenizer):
        raise DualencError(
            f"text_cfg.vocab_size is {text['vocab_size']}, the tokenizer has {len(tokenizer)} tokens: leave it out"
        )
    if "hf_model_name" in text:
        return
    end = tokenizer("a").input_ids[-1]
    if end not in tokenizer.all_special_ids:
        raise DualencError("the tokenizer ends texts without a special token, where the output could be read")
    text.setdefault("pad_id", tokenizer.pad_token_id)
    text.setdefault("pool_type", "eos")
    text.setdefault("eos_id", end)


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Quiet open_clip's log, and tell its errors in one line."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with no_foreign_code():
            yield
    except Exception as error:
        raise DualencError(
            f"{where}: open_clip says: {first_line(error)}; check name, weights and configuration"
        ) from error
    finally:
        logging.disable(disabled)
