"""Any model folder or name to a dual encoder; hub repositories are fetched without anything that could be code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from dualenc.encoders.dual import DUALENC_FILE, DualEncoder, Kind
from dualenc.errors import DualencError
from dualenc.files import read_json_object, recover

if TYPE_CHECKING:
    import torch

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model"]
UNWANTED = ["onnx/*", "openvino/*"]


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
    # These modules import this one.
    from dualenc.encoders import image, image_text, text, vector, vision_text

    name = os.fspath(path_or_name)
    recover(Path(name.removeprefix("local-dir:")).expanduser())
    may_be_known = not os.path.exists(name) and not looks_like_path(name)
    architecture, _, tag = name.partition("/")
    model: DualEncoder
    if may_be_known and image_text.is_registered(architecture):
        if not tag:
            raise DualencError(f"{name}: an architecture without weights; say which, as in {name}/openai")
        model = image_text.ImageTextEncoder(architecture, tag)
    elif may_be_known and "/" not in name and ":" not in name and image.is_registered(name):
        model = image.ImageEncoder(name, pretrained=True, projector_dim=None)
    else:
        folder = model_folder(name)
        kind = folder_kind(folder)
        if kind == "image":
            model = image.ImageEncoder.from_folder(folder)
        elif kind == "vector":
            model = vector.VectorEncoder.from_folder(folder)
        elif kind == "query-document":
            model = text.TextEncoder(str(folder))
        elif (folder / "open_clip_config.json").is_file():
            model = image_text.ImageTextEncoder(str(folder))
        else:
            model = vision_text.VisionTextEncoder(str(folder))
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
        from dualenc.encoders.vision_text import two_towers_in

        return "query-document" if two_towers_in(folder) is None else "image-text"
    if (folder / "open_clip_config.json").is_file():
        return "image-text"
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if "architecture" in config:
        return "image"
    if "model_type" in config:
        from dualenc.encoders.vision_text import MODEL_TYPES

        return "image-text" if config["model_type"] in MODEL_TYPES else "query-document"
    raise DualencError(
        f"{folder}: holds no model (no modules.json, open_clip_config.json or config.json); give the folder of one"
    )


def model_folder(name: str | os.PathLike[str], *further: str) -> Path:
    """The local folder of a model: the one named, or the hub's, fetched without anything that could be code.

    Args:
        name: a folder, `local-dir:FOLDER`, a hub repository `owner/name`, or `hf-hub:owner/name`.
        further: patterns of files to fetch from the hub besides configurations, vocabulary and safetensors.

    Raises:
        DualencError: there is no such folder, and the hub gives nothing under this name.
    """
    repository = hub_name(name)
    if repository is not None:
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(repository, allow_patterns=[*WANTED, *further], ignore_patterns=UNWANTED))
        except Exception as error:
            raise DualencError(
                f"{repository}: neither a folder here nor a model that the hub gives ({first_line(error)}); "
                "check the name"
            ) from error
    folder = Path(os.fspath(name).removeprefix("local-dir:")).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise DualencError(f"{folder}: {what}; give the folder of a model")
    return folder


def hub_name(name: str | os.PathLike[str]) -> str | None:
    """The repository of the hub that a model's name means; None of a local folder."""
    text = os.fspath(name)
    is_local = text.startswith("local-dir:") or os.path.exists(text) or looks_like_path(text)
    return text.removeprefix("hf-hub:") if text.startswith("hf-hub:") or not is_local else None


def looks_like_path(text: str) -> bool:
    """Whether a name can only be meant as a path, and not as `owner/name` on the hub."""
    return text.startswith((".", "~", os.sep)) or text.count("/") > 1 or (os.sep == "\\" and "\\" in text)


@contextmanager
def no_foreign_code() -> Iterator[None]:
    """Within it, transformers refuses a model's own code where nobody passes `trust_remote_code=False` on.

    open_clip's text towers do not; without this, transformers would ask on the terminal whether to run the code.
    """
    from transformers import dynamic_module_utils

    seconds = getattr(dynamic_module_utils, "TIME_OUT_REMOTE_CODE", 0)
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0  # of the question; none is asked at 0
    try:
        yield
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds


def first_line(error: BaseException) -> str:
    """The beginning of another library's message as one line, to be quoted in ours."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
    return text.rstrip(".:")
