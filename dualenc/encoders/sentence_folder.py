"""Checks of a sentence-transformers folder before the library reads it: what could lead to code is refused.

sentence-transformers imports modules and calls `torch.…` classes by the names in a folder, passes on arguments from it,
and falls back to pickled weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dualenc.encoders.hub import check_safetensors
from dualenc.encoders.tokenizer import check_vocabulary
from dualenc.errors import DualencError
from dualenc.reading import read_json, read_json_object

ROUTERS = ("Router", "Asym")
WITH_WEIGHTS = ("StaticEmbedding", "Dense", "LayerNorm", "WeightedLayerPooling")
MODULES = ("Transformer", "Pooling", "Normalize", "Dropout", *WITH_WEIGHTS, *ROUTERS)
ACTIVATION = re.compile(r"torch\.nn\.(modules\.(activation\.|linear\.)?)?[A-Z]\w*")
"""Names of activations that a folder may give: classes of torch, whose making runs nothing else."""
ARGUMENTS = re.compile("(model|config|tokenizer|processor)_(args|kwargs)|tokenizer_name_or_path")


def check_sentence_folder(folder: Path) -> None:
    """Refuse a folder of sentence-transformers or transformers that names code, other models, or lacks safetensors."""
    # Wherever it lies: transformers looks at the top level, too.
    if any(folder.rglob("adapter_config.json")):
        raise DualencError(f"{folder}: holds adapters of another model; merge them into it and save that")
    modules = [("Transformer", folder)]
    if (folder / "modules.json").is_file():
        modules = list(_modules(folder, _entries_of_modules(folder / "modules.json")))
    for kind, place in modules:
        if kind == "Transformer":
            _check_transformer(place)
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


def _entries_of_modules(path: Path) -> Iterator[tuple[str, str]]:
    """Path and type of each module of modules.json."""
    entries = read_json(path)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DualencError(f"{path}: is no list of modules; restore the file")
    for entry in entries:
        yield str(entry.get("path", "")), str(entry.get("type", ""))


def _modules(folder: Path, entries: Iterator[tuple[str, str]]) -> Iterator[tuple[str, Path]]:
    """Kind and folder of each module, those inside a Router included; other kinds are refused."""
    for path, kind in entries:
        package, _, name = kind.rpartition(".")
        if name not in MODULES or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"{folder}: its module {kind[:80]} is not supported; only models of {', '.join(MODULES)} can be loaded"
            )
        place = folder / path
        if not place.resolve().is_relative_to(folder.resolve()):
            raise DualencError(f"{folder}: {path[:80]!r} is no path in the folder; restore modules.json")
        yield name, place
        if name in ROUTERS:
            settings = place / "router_config.json"
            settings = settings if settings.is_file() else place / "config.json"
            types: Mapping[str, Any] = read_json_object(settings, {"types": dict})["types"]
            yield from _modules(place, ((inner, str(of)) for inner, of in types.items()))


def _check_transformer(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise DualencError(f"{folder}: no config.json, so no transformers model; give another folder")
    check_safetensors(folder)
    check_vocabulary(folder)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON document, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    children = value.values() if isinstance(value, dict) else value
    for child in children if isinstance(value, (dict, list)) else ():
        yield from _entries(child)
