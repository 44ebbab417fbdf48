"""Checks of a sentence-transformers folder before the library reads it: what could lead to code is refused.

sentence-transformers imports modules and calls `torch.…` classes by the names in a folder, passes on arguments from it,
and falls back to pickled weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualenc.encoders.hub import check_safetensors
from dualenc.encoders.tokenizer import check_vocabulary
from dualenc.errors import DualencError
from dualenc.reading import read_json, read_json_object

ROUTERS = ("Router", "Asym")
WITH_WEIGHTS = ("StaticEmbedding", "Dense", "LayerNorm", "WeightedLayerPooling")
IN_ROUTERS = ("Transformer", "Pooling", "Normalize", "Dropout", *WITH_WEIGHTS)
MODULES = (*IN_ROUTERS, *ROUTERS)
ACTIVATION = re.compile(r"torch\.nn\.(modules\.(activation\.|linear\.)?)?[A-Z]\w*")
"""Names of activations that a folder may give: classes of torch, whose making runs nothing else."""
ARGUMENTS = re.compile("(model|config|tokenizer|processor)_(args|kwargs)|tokenizer_name_or_path")


def check_sentence_folder(folder: Path) -> None:
    """Refuse a folder of sentence-transformers or transformers that names code, other models, or lacks safetensors."""
    # Wherever it lies: transformers looks at the top level, too.
    if any(folder.rglob("adapter_config.json")):
        raise DualencError(f"{folder}: holds adapters of another model; merge them into it and save that")
    listed = (folder / "modules.json").is_file()
    for kind, place in _modules(folder) if listed else [("Transformer", folder)]:
        if kind == "Transformer":
            if not (place / "config.json").is_file():
                raise DualencError(
                    f"{place}: no config.json, so no transformers model; give another folder"
                )
            check_safetensors(place)
            check_vocabulary(place)
        elif kind in WITH_WEIGHTS:
            check_safetensors(place, "model.safetensors")
    # All of them, wherever they lie: a config.json may itself name another one to read in its place.
    for path in sorted(folder.rglob("*config*.json")):
        check_settings(read_json(path), str(path))


def check_settings(settings: Any, where: str) -> None:
    """Refuse settings, at any depth, by which transformers or sentence-transformers would run foreign code."""
    for key, value in _entries(settings):
        # In transformers' configurations an activation is a plain word such as gelu.
        is_class = key == "activation_function" and "." in str(value)
        if is_class and not ACTIVATION.fullmatch(str(value)):
            raise DualencError(
                f"{where}: {key} {str(value)[:80]!r} is no activation of torch.nn, and is not run"
            )
        if ARGUMENTS.fullmatch(key) and value:
            raise DualencError(
                f"{where}: {key} are arguments for transformers, which are not passed on; leave them out"
            )
        if key == "modality_config" and {"forward"} != {
            method for name, method in _entries(value) if name == "method"
        }:
            raise DualencError(
                f"{where}: {key} names a method other than forward, which is not called; leave it out"
            )
        if key.endswith("attn_implementation") and "/" in str(value):
            raise DualencError(
                f"{where}: {key} {str(value)[:80]} is code from the hub, which is not run; leave it out"
            )


def _modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module that modules.json lists, and of those inside a Router."""
    path = folder / "modules.json"
    entries = read_json(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DualencError(f"{path}: is no list of modules; restore the file")
    modules = []
    for entry in entries:
        modules.append(_module(folder, entry.get("path", ""), entry.get("type", ""), MODULES))
    for kind, place in list(modules):
        if kind in ROUTERS:
            settings = place / "router_config.json"
            settings = settings if settings.is_file() else place / "config.json"
            types = read_json_object(settings, {"types": dict})["types"]
            modules += [_module(place, inner, types[inner], IN_ROUTERS) for inner in types]
    return modules


def _module(folder: Path, path: Any, kind: Any, allowed: tuple[str, ...]) -> tuple[str, Path]:
    """Kind and folder of a module; other kinds than the allowed ones, and folders elsewhere, are refused."""
    package, _, name = str(kind).rpartition(".")
    if name not in allowed or package.partition(".")[0] != "sentence_transformers":
        raise DualencError(
            f"{folder}: its module {str(kind)[:80]} is not supported; only models of {', '.join(allowed)} can be loaded"
        )
    place = folder / str(path)
    if not place.resolve().is_relative_to(folder.resolve()):
        raise DualencError(f"{folder}: {str(path)[:80]!r} is no path in the folder; restore modules.json")
    return name, place


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON document, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    children = value.values() if isinstance(value, dict) else value
    for child in children if isinstance(value, (dict, list)) else ():
        yield from _entries(child)
