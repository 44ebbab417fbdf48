"""Checks of a sentence-transformers folder before the library reads it: what could lead to code is
refused.

sentence-transformers calls `torch.…` classes by the names in a folder, passes on arguments from it,
and falls back to pickled weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dualenc.encoders.limits import check_sizes
from dualenc.encoders.tokenizer import check_vocabulary
from dualenc.encoders.weights import check_floats, check_safetensors
from dualenc.errors import DualencError, explain
from dualenc.io.reading import read_json, read_json_object

WITH_WEIGHTS = ("StaticEmbedding", "Dense", "LayerNorm", "WeightedLayerPooling")
IN_ROUTERS = ("Transformer", "Pooling", "Normalize", "Dropout", *WITH_WEIGHTS)
MODULES = (*IN_ROUTERS, "Router", "Asym")
ACTIVATION = re.compile(r"torch\.nn\.(modules\.(activation\.|linear\.)?)?[A-Z]\w*")
"""Names of activations that a folder may give: classes of torch, whose making runs nothing else."""
ARGUMENTS = re.compile("(model|config|tokenizer|processor)_(args|kwargs)|tokenizer_name_or_path")

WITH_SIZES = ("config.json", "tokenizer_config.json")
"""Files by whose sizes something is built; data_config.json, say, counts rows of training data."""
PURPOSES = {
    "config_sentence_transformers.json": "model_type",
    "sentence_bert_config.json": "transformer_task",
}
"""Files that say what a folder of sentence-transformers is for, and where."""
OTHER_PURPOSE = re.compile("CrossEncoder|sequence-classification")
OTHER_HEAD = re.compile(
    r"\w+For((Sequence|Token)Classification|QuestionAnswering|MultipleChoice)\b"
)
"""Architectures of transformers whose head gives scores or labels."""
TABLES = ("embedding.weight", "embeddings")
"""Names of a table of token vectors, by sentence-transformers and by model2vec."""


def check_sentence_folder(folder: Path) -> list[Path]:
    """Refuse a folder of sentence-transformers or transformers that names code, other models, or
    lacks safetensors.

    Returns the folders of its transformers.
    """
    # All files, wherever they lie: transformers looks at the top level, too, and one config.json
    # may name another.
    for path in sorted(folder.rglob("*config*.json")):
        if path.name == "adapter_config.json":
            raise DualencError(
                f"{path}: adapters of another model; merge them into it and save that"
            )
        settings = read_json(path)
        check_settings(settings, str(path))
        if path.name in WITH_SIZES:
            check_sizes(settings, path)
    _check_purpose(folder)
    if (folder / "modules.json").is_file():
        with explain(f"{folder / 'modules.json'}: is no list of modules", "restore the file"):
            entries = [
                (entry["path"], entry["type"]) for entry in read_json(folder / "modules.json")
            ]
            modules = list(_modules(folder, entries, MODULES))
    else:
        modules = [("Transformer", folder)]
    for kind, place in modules:
        if kind == "Transformer":
            check_safetensors(place)
            check_vocabulary(place)
        elif kind in WITH_WEIGHTS:
            check_safetensors(place, "model.safetensors")
            check_floats(place / "model.safetensors", TABLES)
    return [place for kind, place in modules if kind == "Transformer"]


def _check_purpose(folder: Path) -> None:
    """Refuse a model that gives scores or labels, whose head would be left out in silence."""
    kind = None
    for file, key in PURPOSES.items():
        if (folder / file).is_file() and not kind:
            kind = OTHER_PURPOSE.search(str(read_json_object(folder / file).get(key)))
    # Modules make vectors of any transformer, whatever it was trained for before.
    if not kind and not (folder / "modules.json").is_file() and (folder / "config.json").is_file():
        kind = OTHER_HEAD.search(str(read_json_object(folder / "config.json").get("architectures")))
    if kind:
        problem = f"{kind[0]}, a model of scores or labels for texts, not of vectors"
        raise DualencError(
            f"{folder}: {problem}; rerank results with it (CrossEncoder of sentence-transformers), "
            "or save its encoder, which AutoModel of transformers loads, to train from there"
        )


def check_settings(settings: Any, where: str) -> None:
    """Refuse settings, at any depth, by which transformers or sentence-transformers would run
    foreign code."""
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


def _modules(
    folder: Path, entries: list[tuple[str, str]], allowed: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    """Kind and folder of modules, and of those inside Routers; other kinds, and folders elsewhere,
    are refused."""
    for path, full_name in entries:
        package, _, kind = full_name.rpartition(".")
        if kind not in allowed or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"{folder}: its module {full_name[:80]} is not supported; choose a model of {', '.join(allowed)}"
            )
        place = folder / path
        if not place.resolve().is_relative_to(folder.resolve()):
            raise DualencError(
                f"{folder}: {path[:80]!r} is no path in the folder; restore modules.json"
            )
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
