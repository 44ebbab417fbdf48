"""open_clip models: created from a name or a configuration; their folder, read and written."""

from __future__ import annotations

import copy
import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dualenc.encoders.hub import first_line
from dualenc.errors import DualencError
from dualenc.files import read_json, write_json

CONFIG_FILE = "open_clip_config.json"
WEIGHTS_FILE = "open_clip_model.safetensors"
WEIGHTS_FILES = (WEIGHTS_FILE, "open_clip_pytorch_model.safetensors", "model.safetensors")
SECTIONS = ("embed_dim", "vision_cfg", "text_cfg")


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
    config = read_json(folder / CONFIG_FILE).get("model_cfg")
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
            return open_clip.create_model(source, **options)
    check_config(source, "config")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG_FILE).write_text(json.dumps({"model_cfg": source}))
        with _explained("config"):
            return open_clip.create_model(f"local-dir:{folder}", load_weights=False, **options)


def check_config(config: dict[str, Any], where: str) -> None:
    """Refuse configurations that are not two towers.

    Raises:
        DualencError: a section is missing, or the model is generative.
    """
    missing = [section for section in SECTIONS if section not in config]
    if missing:
        raise DualencError(f"{where}: {', '.join(missing)} missing; an open_clip model needs {', '.join(SECTIONS)}")
    if "multimodal_cfg" in config:
        raise DualencError(f"{where}: CoCa models are not supported; choose one without multimodal_cfg")


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


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Quiet open_clip's log, and tell its errors in one line."""
    disabled = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    except Exception as error:
        raise DualencError(
            f"{where}: open_clip says: {first_line(error)}; check name, weights and configuration"
        ) from error
    finally:
        logging.disable(disabled)
