"""Where a model's files are: a folder, or a hub repository fetched into one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dualenc.errors import DualencError

WANTED = ["*.json", "*.safetensors", "*.txt", "*.model"]
UNWANTED = ["onnx/*", "openvino/*"]


def model_folder(name: str | os.PathLike[str]) -> Path:
    """The local folder of a model: the one named, or the hub's, fetched without anything that could be code.

    Args:
        name: a folder, `local-dir:FOLDER`, a hub repository `owner/name`, or `hf-hub:owner/name`.

    Raises:
        DualencError: there is no such folder, and the hub gives nothing under this name.
    """
    text = os.fspath(name)
    if text.startswith("local-dir:"):
        return _existing(text.removeprefix("local-dir:"))
    if not text.startswith("hf-hub:") and (os.path.exists(text) or looks_like_path(text)):
        return _existing(text)
    return _fetch(text.removeprefix("hf-hub:"))


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


def looks_like_path(text: str) -> bool:
    """Whether a name can only be meant as a path, and not as `owner/name` on the hub."""
    return text.startswith((".", "~", os.sep)) or text.count("/") > 1 or (os.sep == "\\" and "\\" in text)


def _existing(text: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "no such folder"
        raise DualencError(f"{folder}: {what}; give the folder of a model")
    return folder


def _fetch(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    except Exception as error:
        raise DualencError(
            f"{name}: neither a folder here nor a model that the hub gives ({first_line(error)}); check the name"
        ) from error
