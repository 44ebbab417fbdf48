"""Checks of a sentence-transformers folder before the library reads it: what could lead to code is refused.

sentence-transformers calls `torch.…` classes by the names in a folder, passes on arguments from it, and falls back to
pickled weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualenc.encoders.tokenizer import check_vocabulary
from dualenc.encoders.weights import check_safetensors
from dualenc.errors import DualencError, explain
from dualenc.reading import read_json

WITH_WEIGHTS = ("StaticEmbedding", "Dense", "LayerNorm", "WeightedLayerPooling")
IN_ROUTERS = ("Transformer", "Pooling", "Normalize", "Dropout", *WITH_WEIGHTS)
MODULES = (*IN_ROUTERS, "Router", "Asym")
ACTIVATION = re.compile(r"torch\.nn\.(modules\.(activation\.|linear\.)?)?[A-Z]\w*")
"""Names of activations that a folder may give: classes of torch, whose making runs nothing else."""
ARGUMENTS = re.compile("(model|config|tokenizer|processor)_(args|kwargs)|tokenizer_name_or_path")


def check_sentence_folder(folder: Path) -> list[Path]:
    """Refuse a folder of sentence-transformers or transformers that names code, other models, or lacks safetensors.

    Returns the folders of its transformers.
    """
    # All files, wherever they lie: transformers looks at the top level, too, and one config.json may name another.
    for path in sorted(folder.rglob("*config*.json")):
        if path.name == "adapter_config.json":
            raise DualencError(f"{path}: adapters of another model; merge them into it and save that")
        check_settings(read_json(path), str(path))
    if (folder / "modules.json").is_file():
        with explain(f"{folder / 'modules.json'}: is no list of modules", "restore the file"):
            entries = [(entry["path"], entry["type"]) for entry in read_json(folder / "modules.json")]
            modules = list(_modules(folder, entries, MODULES))
    else:
        modules = [("Transformer", folder)]
    for kind, place in modules:
        if kind == "Transformer":
            check_safetensors(place)
            check_vocabulary(place)
        elif kind in WITH_WEIGHTS:
            check_safetensors(place, "model.safetensors")
    return [place for kind, place in modules if kind == "Transformer"]


def check_settings(settings: Any, where: str) -> None:
    """Refuse settings, at any depth, by which transformers or sentence-transformers would run foreign code."""
    for key, value in _entries(settings):
        methods = {method for name, method in _entries(value) if name == "method"}
        # In transformers' configurations an activation is a plain word such as gelu.
        is_class = key == "activation_function" and "." in str(value)
        if is_class and not ACTIVATION.fullmatch(str(value)):
            problem = "is no activation of torch.nn, and is not run"
        elif key == "modality_config" and methods != {"forward"}:
            problem = "names a method other than forward, which is not called"
        elif key.endswith("attn_implementation") and "/" in str(value):
            problem = "is code from the hub, which is not run"
        elif value and ARGUMENTS.fullmatch(key):
            problem = "would be passed on to transformers"
        else:
            continue
        raise DualencError(f"{where}: {key} {str(value)[:80]!r} {problem}; leave it out")


def _modules(folder: Path, entries: list[tuple[str, str]], allowed: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """Kind and folder of modules, and of those inside Routers; other kinds, and folders elsewhere, are refused."""
    for path, full_name in entries:
        package, _, kind = full_name.rpartition(".")
        if kind not in allowed or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"{folder}: its module {full_name[:80]} is not supported; choose a model of {', '.join(allowed)}"
            )
        place = folder / path
        if not place.resolve().is_relative_to(folder.resolve()):
            raise DualencError(f"{folder}: {path[:80]!r} is no path in the folder; restore modules.json")
        yield kind, place
        if kind not in IN_ROUTERS:
            settings = place / "router_config.json"
            types = read_json(settings if settings.is_file() else place / "config.json")["types"]
            yield from _modules(place, list(types.items()), IN_ROUTERS)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of a JSON document, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    children = value.values() if isinstance(value, dict) else value
    for child in children if isinstance(value, (dict, list)) else ():
        yield from _entries(child)
