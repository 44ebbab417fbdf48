"""Model names: a folder, or a hub repository fetched without anything that could be code."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub

from dualenc.errors import DualencError, explain

ALLOWED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]
"""Among them chat templates of language models, which are rendered in a sandbox."""
IGNORED_FILES = ["onnx/*", "openvino/*"]


def model_folder(name: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the one named, or the hub's, fetched without anything that could
    be code.

    A name is a folder, `local-dir:FOLDER`, `owner/name` or `hf-hub:owner/name`.
    """
    repository = hub_name(name)
    if repository is not None:
        with explain(
            f"{repository}: neither a folder here nor a model that the hub gives", "check the name"
        ):
            fetched = huggingface_hub.snapshot_download(
                repository, allow_patterns=ALLOWED_FILES, ignore_patterns=IGNORED_FILES
            )
            return Path(fetched)
    local = Path(os.fspath(name).removeprefix("local-dir:")).expanduser()
    if not local.is_dir():
        what = "is a file" if local.exists() else "no such folder"
        raise DualencError(f"{local}: {what}; give the folder of a model")
    return local


def hub_name(name: str | os.PathLike[str]) -> str | None:
    """The hub repository that a model's name means; None for a local folder."""
    text = os.fspath(name)
    if text.startswith("hf-hub:"):
        return text.removeprefix("hf-hub:")
    is_local = text.startswith("local-dir:") or os.path.exists(text) or looks_like_path(text)
    return None if is_local else text


def looks_like_path(text: str) -> bool:
    """Whether a name can only be meant as a path, and not as `owner/name` on the hub."""
    return (
        text.startswith((".", "~", os.sep))
        or text.count("/") > 1
        or (os.sep == "\\" and "\\" in text)
    )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Load a model without progress bars and log messages, and never by code of its own.

    `trust_remote_code=False` is not passed on to models inside a model, nor by open_clip, and
    transformers would ask on the terminal whether to run their code.
    """
    from transformers import dynamic_module_utils
    from transformers.utils import logging as progress

    disabled = logging.root.manager.disable
    shows_bars = progress.is_progress_bar_enabled()
    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    logging.disable()
    progress.disable_progress_bar()
    dynamic_module_utils.TIME_OUT_REMOTE_CODE = (
        0  # seconds to answer the question; at 0 none is asked
    )
    try:
        yield
    finally:
        logging.disable(disabled)
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds
        if shows_bars:
            progress.enable_progress_bar()
