"""The folder of a cross-encoder, checked before sentence-transformers reads it: what could lead to code is refused.

sentence-transformers calls whatever `torch.…` name a folder gives, imports modules by name, and passes on arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualenc.encoders.hub import check_safetensors, model_folder
from dualenc.encoders.sentence_folder import list_modules
from dualenc.errors import DualencError
from dualenc.reading import read_json

SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize", "LogitScore")
ACTIVATION = re.compile(r"torch\.nn\.(modules\.(activation\.|linear\.)?)?[A-Z]\w*")
"""Names that a folder may give: classes of torch, whose making runs nothing else."""
ACTIVATION_KEYS = ("activation_fn", "sbert_ce_default_activation_function")
ARGUMENT_KEYS = (
    "model_args",
    "model_kwargs",
    "tokenizer_args",
    "processor_kwargs",
    "config_args",
    "config_kwargs",
)


def cross_encoder_folder(name: str) -> Path:
    """The local folder of a cross-encoder, by its path or hub name; one that could lead to code is refused."""
    folder = model_folder(name)
    if (folder / "adapter_config.json").is_file():
        raise DualencError(f"{folder}: holds adapters of another model; merge them into it and save that")
    if (folder / "modules.json").is_file():
        for kind, place in list_modules(folder, SUPPORTED):
            if kind == "Dense":
                check_safetensors(place, "model.safetensors")
    # All of them, wherever they lie: a config.json may itself name another one to read in its place.
    for path in sorted(folder.rglob("*config*.json")):
        for key, value in _entries(read_json(path)):
            _check_entry(path, key, value)
    return folder


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON document, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    children = value.values() if isinstance(value, dict) else value
    for child in children if isinstance(value, (dict, list)) else ():
        yield from _entries(child)


def _check_entry(path: Path, key: str, value: Any) -> None:
    # In transformers' configurations the last one is a plain word such as gelu.
    is_activation = key in ACTIVATION_KEYS or (key == "activation_function" and "." in str(value))
    if is_activation and value is not None and not ACTIVATION.fullmatch(str(value)):
        raise DualencError(
            f"{path}: {key} {str(value)[:80]!r} is no activation of torch.nn, and is not run"
        )
    if key in ARGUMENT_KEYS and value:
        raise DualencError(
            f"{path}: {key} are arguments for transformers, which are not passed on; leave them out"
        )
    if key == "modality_config" and any(
        name == "method" and method != "forward" for name, method in _entries(value)
    ):
        raise DualencError(
            f"{path}: {key} names a method other than forward, which is not called; leave it out"
        )
    if key.endswith("attn_implementation") and "/" in str(value):
        raise DualencError(
            f"{path}: {key} {str(value)[:80]} is code from the hub, which is not run; leave it out"
        )
