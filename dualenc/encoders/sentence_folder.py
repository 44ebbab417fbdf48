"""Checks of a sentence-transformers folder before the library reads it; paths to code are refused.

sentence-transformers instantiates `torch.…` classes named in a folder, passes on arguments from
it, and falls back to pickled weights.
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
"""Activations that a folder may name: classes of torch that are safe to construct."""
ARGUMENTS = re.compile("(model|config|tokenizer|processor)_(args|kwargs)|tokenizer_name_or_path")

WITH_SIZES = ("config.json", "tokenizer_config.json")
"""Files with sizes that a library allocates. Others, as data_config.json, count training rows."""
PURPOSES = {
    "config_sentence_transformers.json": "model_type",
    "sentence_bert_config.json": "transformer_task",
}
"""Files that state the purpose of a sentence-transformers folder, and the key."""
OTHER_PURPOSE = re.compile("CrossEncoder|sequence-classification")
OTHER_HEAD = re.compile(
    r"\w+For((Sequence|Token)Classification|QuestionAnswering|MultipleChoice)\b"
)
"""Architectures of transformers with a head for scores or labels."""
TABLES = ("embedding.weight", "embeddings")
"""Names of the table of token vectors in sentence-transformers and in model2vec."""


def check_sentence_folder(folder: Path) -> list[Path]:
    """Raise if a folder of sentence-transformers or transformers is unsafe or unsuitable.

    Refused are names of code, adapters, models of scores or labels, and missing safetensors.

    Args:
        folder: the model folder.

    Returns:
        The folders of its transformers.
    """
    # Check configuration files in all subfolders: transformers also reads the top level, and one
    # config.json can refer to another.
    for path in sorted(folder.rglob("*config*.json")):
        if path.name == "adapter_config.json":
            raise DualencError(
                "holds adapters of another model",
                fix="merge them into that model and save it",
                where=path,
            )
        settings = read_json(path)
        check_settings(settings, str(path))
        if path.name in WITH_SIZES:
            check_sizes(settings, path)
    _check_purpose(folder)
    if (folder / "modules.json").is_file():
        with explain(f"{folder / 'modules.json'}: is not a list of modules", "restore the file"):
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
    """Raise for models of scores or labels, whose head would be dropped silently."""
    kind = None
    for file, key in PURPOSES.items():
        if (folder / file).is_file() and not kind:
            kind = OTHER_PURPOSE.search(str(read_json_object(folder / file).get(key)))
    # modules.json turns any transformer into an encoder, whatever its original head was.
    if not kind and not (folder / "modules.json").is_file() and (folder / "config.json").is_file():
        kind = OTHER_HEAD.search(str(read_json_object(folder / "config.json").get("architectures")))
    if kind:
        raise DualencError(
            f"is {kind[0]}, a model of scores or labels, not of vectors",
            fix="rerank results with it (CrossEncoder of sentence-transformers), or load its "
            "encoder with AutoModel of transformers, save that and train from there",
            where=folder,
        )


def check_settings(settings: Any, where: str) -> None:
    """Raise if a setting, at any depth, would make a library run foreign code."""
    for key, value in _entries(settings):
        methods = {method for name, method in _entries(value) if name == "method"}
        # transformers itself names activations by plain words such as gelu; a dot means a class.
        is_class = key == "activation_function" and "." in str(value)
        if is_class and not ACTIVATION.fullmatch(str(value)):
            problem = "is not an activation of torch.nn, and is not run"
        elif key == "modality_config" and methods != {"forward"}:
            problem = "names methods other than forward, which are not called"
        elif key.endswith("attn_implementation") and "/" in str(value):
            problem = "is code from the hub, which is not run"
        elif value and ARGUMENTS.fullmatch(key):
            problem = "would be passed on to transformers"
        else:
            continue
        raise DualencError(f"{key} {str(value)[:80]!r} {problem}", fix="leave it out", where=where)


def _modules(
    folder: Path, entries: list[tuple[str, str]], allowed: tuple[str, ...]
) -> Iterator[tuple[str, Path]]:
    """Yield kind and folder of all modules, Routers' included; raise for other kinds and places."""
    for path, full_name in entries:
        package, _, kind = full_name.rpartition(".")
        if kind not in allowed or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"its module {full_name[:80]} is not supported",
                fix=f"choose a model of {', '.join(allowed)}",
                where=folder,
            )
        place = folder / path
        # Resolved, because a link or ".." may lead out of the folder.
        if not place.resolve().is_relative_to(folder.resolve()):
            raise DualencError(
                f"{path[:80]!r} is not a path in the folder",
                fix="restore modules.json",
                where=folder,
            )
        yield kind, place
        if kind not in IN_ROUTERS:
            settings = place / "router_config.json"
            types = read_json(settings if settings.is_file() else place / "config.json")["types"]
            yield from _modules(place, list(types.items()), IN_ROUTERS)


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield keys and values of a JSON document, at any depth."""
    if isinstance(value, dict):
        yield from value.items()
    children = value.values() if isinstance(value, dict) else value
    for child in children if isinstance(value, (dict, list)) else ():
        yield from _entries(child)
