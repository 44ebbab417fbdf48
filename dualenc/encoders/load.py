"""Load any model folder or name as a dual encoder; its kind is detected from its files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast, get_args

import torch

from dualenc.encoders import image, image_text
from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Kind
from dualenc.encoders.hub import looks_like_path, model_folder
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.encoders.vector import VectorEncoder
from dualenc.errors import DualencError, explain
from dualenc.io.files import recover
from dualenc.io.reading import read_json_object


def load_model(
    path_or_name: str | os.PathLike[str], device: str | torch.device = "cpu"
) -> DualEncoder:
    """Load a model in evaluation mode.

    Code in its folder is never run, and only safetensors weights are read.

    Args:
        path_or_name: a folder written by `DualEncoder.save` or by sentence-transformers,
            transformers, open_clip or timm; a hub name; an open_clip name with the tag of its
            weights, "ViT-B-32/openai"; or a timm name, "resnet18.a1_in1k".
        device: device to move the model to.
    """
    name = os.fspath(path_or_name)
    # A writer that was killed between two renames leaves the folder under another name.
    recover(Path(name.removeprefix("local-dir:")).expanduser())
    model = _load_registered(name) or _load_folder(model_folder(name))
    with explain(f"device {device} is not usable", "choose another device"):
        model.to(device)
    return model.eval()


def _load_registered(name: str) -> DualEncoder | None:
    """Load the model of an open_clip or timm name; None for other names."""
    if os.path.exists(name) or looks_like_path(name):
        return None
    architecture, _, tag = name.partition("/")
    if image_text.is_open_clip_name(architecture):
        if not tag:
            raise DualencError(
                "names an architecture but no weights",
                fix=f"add the tag of its weights, as in {name}/openai",
                where=name,
            )
        return image_text.ImageTextEncoder(architecture, tag)
    if "/" not in name and ":" not in name and image.is_timm_name(name):
        return image.ImageEncoder(name, pretrained=True, projector_dim=None)
    return None


def _load_folder(folder: Path) -> DualEncoder:
    """Load the model in a folder."""
    kind = folder_kind(folder)
    if kind == "image":
        return image.ImageEncoder.from_folder(folder)
    if kind == "vector":
        return VectorEncoder.from_folder(folder)
    if kind == "query-index":
        return IndexEncoder.from_folder(folder)
    if kind == "query-document":
        return TextEncoder(str(folder))
    return image_text.ImageTextEncoder(str(folder))


def folder_kind(folder: Path) -> Kind:
    """Detect the kind of model in a folder from its files."""
    if (folder / DUALENC_FILE).is_file():
        kind = read_json_object(folder / DUALENC_FILE).get("kind")
        if kind not in get_args(Kind):
            raise DualencError(
                f"unknown kind {kind!r}",
                fix="upgrade dualenc if a later version wrote it",
                where=folder / DUALENC_FILE,
            )
        return cast(Kind, kind)
    if (folder / "modules.json").is_file():
        return "query-document"
    if (folder / "open_clip_config.json").is_file():
        return "image-text"
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "architecture" in config:
        return "image"
    if "vision_config" in config:
        raise DualencError(
            "is an image-text model of transformers, which dualenc does not load",
            fix="give the same model by its open_clip name, such as ViT-B-32/openai",
            where=folder,
        )
    if "model_type" in config:
        return "query-document"
    raise DualencError(
        "is not a model folder (no modules.json, open_clip_config.json or config.json)",
        fix="give the folder of a model",
        where=folder,
    )
