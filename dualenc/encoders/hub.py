"""Resolve model names to local folders; executable files are never downloaded."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub

from dualenc.errors import DualencError, explain

ALLOWED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "README.md"]
"""Chat templates (jinja) are included, because they are rendered in a sandbox."""
IGNORED_FILES = ["onnx/*", "openvino/*"]

_LOADING = threading.RLock()
"""Held while the settings of all threads are changed."""


def model_folder(name: str | os.PathLike[str]) -> Path:
    """Return the local folder of a model, downloading from the hub what cannot contain code.

    Args:
        name: a folder, `local-dir:FOLDER`, `owner/name` or `hf-hub:owner/name`.
    """
    repository = hub_name(name)
    if repository is not None:
        with explain(
            f"{repository}: neither a local folder nor available from the hub", "check the name"
        ):
            fetched = huggingface_hub.snapshot_download(
                repository, allow_patterns=ALLOWED_FILES, ignore_patterns=IGNORED_FILES
            )
            return Path(fetched)
    local = Path(os.fspath(name).removeprefix("local-dir:")).expanduser()
    if not local.is_dir():
        raise DualencError(
            "is a file" if local.exists() else "no such folder",
            fix="give the folder of a model",
            where=local,
        )
    return local


def hub_name(name: str | os.PathLike[str]) -> str | None:
    """Return the hub repository that a model's name refers to; None for a local folder."""
    text = os.fspath(name)
    if text.startswith("hf-hub:"):
        return text.removeprefix("hf-hub:")
    is_local = text.startswith("local-dir:") or os.path.exists(text) or looks_like_path(text)
    return None if is_local else text


def looks_like_path(text: str) -> bool:
    """Return True if a name can only be a path, not `owner/name` on the hub."""
    return (
        text.startswith((".", "~", os.sep))
        or text.count("/") > 1
        or (os.sep == "\\" and "\\" in text)
    )


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence progress bars and log messages while loading a model, and never run its code.

    `trust_remote_code=False` is not passed on to models inside a model, nor by open_clip, and
    transformers would ask on the terminal whether to run their code.
    """
    from transformers import dynamic_module_utils
    from transformers.utils import logging as progress

    # A thread that ends would give another one, which still loads, the question about code back.
    with _LOADING:
        disabled = logging.root.manager.disable
        shows_bars = progress.is_progress_bar_enabled()
        seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
        logging.disable()
        progress.disable_progress_bar()
        # Seconds that a user has for the answer. With 0 transformers does not ask, and refuses.
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = 0
        try:
            yield
        finally:
            logging.disable(disabled)
            dynamic_module_utils.TIME_OUT_REMOTE_CODE = seconds
            if shows_bars:
                progress.enable_progress_bar()
