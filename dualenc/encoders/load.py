"""Any model folder or name to a dual encoder."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import cast, get_args

import torch

from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Kind
from dualenc.encoders.hub import first_line, looks_like_path, model_folder
from dualenc.encoders.image import ImageEncoder
from dualenc.encoders.image_text import ImageTextEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.errors import DualencError
from dualenc.files import read_json_object, recover

LOADERS: dict[Kind, Callable[[Path], DualEncoder]] = {
    "query-document": lambda folder: TextEncoder(str(folder)),
    "image-text": lambda folder: ImageTextEncoder(str(folder)),
    "image": ImageEncoder.from_folder,
}


def load_model(path_or_name: str | os.PathLike[str], device: str | torch.device = "cpu") -> DualEncoder:
    """Load a model to encode with; code in its folder is never run, and only safetensors weights are read.

    Args:
        path_or_name: a folder written by `DualEncoder.save`, or one of sentence-transformers, transformers,
            open_clip or timm; a hub name; an open_clip name with the tag of its weights, "ViT-B-32/openai"; or a
            timm name, "resnet18.a1_in1k".
        device: where to put it.

    Returns:
        The model in evaluation mode.

    Raises:
        DualencError: no model is there, or its files are incomplete or corrupt.
    """
    recover(Path(os.fspath(path_or_name).removeprefix("local-dir:")).expanduser())
    model = _named(os.fspath(path_or_name)) or _from_folder(model_folder(path_or_name))
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:
        raise DualencError(f"device {device}: {first_line(error)}; choose another device") from error


def folder_kind(folder: Path) -> Kind:
    """Which kind of model a folder holds, by its files.

    Raises:
        DualencError: none that is known.
    """
    if (folder / DUALENC_FILE).is_file():
        kind = read_json_object(folder / DUALENC_FILE).get("kind")
        if kind not in get_args(Kind):
            raise DualencError(f"{folder / DUALENC_FILE}: unknown kind {kind!r}; was it written by a later version?")
        return cast(Kind, kind)
    if (folder / "modules.json").is_file():
        return "query-document"
    if (folder / "open_clip_config.json").is_file():
        return "image-text"
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "architecture" in config:
        return "image"
    if "model_type" in config:
        return "query-document"
    raise DualencError(
        f"{folder}: holds no model (no modules.json, open_clip_config.json or config.json); give the folder of one"
    )


def _from_folder(folder: Path) -> DualEncoder:
    return LOADERS[folder_kind(folder)](folder)


def _named(name: str) -> DualEncoder | None:
    """A model that open_clip or timm know by name, if no folder is called so."""
    if os.path.exists(name) or looks_like_path(name):
        return None
    from dualenc.encoders import image_text, timm_folder

    architecture, _, tag = name.partition("/")
    if image_text.is_registered(architecture):
        if not tag:
            raise DualencError(f"{name}: an architecture without weights; say which, as in {name}/openai")
        return ImageTextEncoder(architecture, tag)
    if "/" not in name and ":" not in name and timm_folder.is_registered(name):
        return ImageEncoder(name, pretrained=True, projector_dim=None)
    return None
