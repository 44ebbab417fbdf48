"""The sentence-transformers folder: read without running anything in it, and written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from dualenc.encoders.dense import Dense
from dualenc.errors import DualencError
from dualenc.files import write_json
from dualenc.reading import read_json, read_json_object
from dualenc.types import Pooling

POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
POOLING_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
QUERY_NAMES = ("query",)
DOCUMENT_NAMES = ("document", "passage", "corpus")
"""Names of prompts that sentence-transformers itself looks for, first ones first."""

MIN_LENGTH = 3
"""Shortest input in tokens: special tokens take two."""


@dataclass(frozen=True)
class SentenceFolder:
    """The settings of a text model's folder; of `head`, None stands for a Normalize, a path for a Dense module."""

    transformer: Path
    pooling: Pooling | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None
    lower_case: bool = False
    head: tuple[Path | None, ...] = ()
    truncate_dim: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read a sentence-transformers folder, or a plain transformers folder as one without settings.

    A default prompt that belongs to neither side is that of both, unless they have their own.
    """
    if not (folder / "modules.json").is_file():
        return SentenceFolder(folder)
    modules = list_modules(folder, SUPPORTED)
    names = [name for name, _ in modules]
    if names[:2] != ["Transformer", "Pooling"] or not set(names[2:]) <= {"Dense", "Normalize"}:
        raise DualencError(
            f"{folder / 'modules.json'}: lists {', '.join(names)}; only text embedding models can be loaded: "
            "Transformer, Pooling, then Dense and Normalize"
        )
    transformer = modules[0][1]
    settings = _optional_json(transformer / "sentence_bert_config.json")
    config = _optional_json(folder / "config_sentence_transformers.json")
    # Prompts may be null, as of sides that nobody gave one.
    prompts = {name: prompt or "" for name, prompt in (config.get("prompts") or {}).items()}
    default = config.get("default_prompt_name")
    shared = "" if default in (*QUERY_NAMES, *DOCUMENT_NAMES) else prompts.get(default, "")
    return SentenceFolder(
        transformer,
        pooling=_read_pooling(modules[1][1] / "config.json", bool(any(prompts.values()))),
        query_prompt=_side_prompt(prompts, QUERY_NAMES, shared),
        document_prompt=_side_prompt(prompts, DOCUMENT_NAMES, shared),
        max_length=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case")),
        head=tuple(place if name == "Dense" else None for name, place in modules[2:]),
        truncate_dim=config.get("truncate_dim"),
        prompts=prompts,
    )


def list_modules(folder: Path, supported: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Kind and folder of each module in modules.json; other kinds than the supported ones are refused."""
    file = folder / "modules.json"
    entries = read_json(file)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DualencError(f"{file}: is no list of modules; restore the file")
    modules: list[tuple[str, Path]] = []
    for entry in entries:
        package, _, name = str(entry.get("type", "")).rpartition(".")
        if name not in supported or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"{folder}: its module {entry.get('type')} is not supported; "
                f"only models of {', '.join(supported)} can be loaded"
            )
        path = str(entry.get("path", ""))
        place = folder / path
        if not place.resolve().is_relative_to(folder.resolve()):
            raise DualencError(f"{file}: {path[:80]!r} is no path in the folder; restore the file")
        modules.append((name, place))
    return modules


def _side_prompt(prompts: dict[str, str], names: tuple[str, ...], shared: str) -> str:
    """The first prompt of one of the names that is not empty; the shared one if there is none of them."""
    own = [prompts[name] for name in names if name in prompts]
    if not own:
        return shared
    return next((prompt for prompt in own if prompt), "")


def write_sentence_files(
    folder: Path,
    hidden_size: int,
    pooling: Pooling,
    max_length: int,
    prompts: dict[str, str],
    *,
    default_prompt_name: str | None = None,
    truncate_dim: int | None = None,
    head: Iterable[nn.Module] = (),
) -> None:
    """Write a sentence-transformers folder but for the transformer and the tokenizer; every version since 2 reads it.

    `head` are the `Dense` and `Normalize` modules between the pooling and the last `Normalize`.
    """
    head = list(head)
    names = ["Transformer", "Pooling", *(type(module).__name__ for module in head), "Normalize"]
    modules = []
    for number, name in enumerate(names):
        path = f"{number}_{name}" if number else ""
        kind = f"sentence_transformers.models.{name}"
        modules.append({"idx": number, "name": str(number), "path": path, "type": kind})
    config: dict[str, Any] = {
        "model_type": "SentenceTransformer",
        "prompts": prompts,
        "default_prompt_name": default_prompt_name,
        "similarity_fn_name": "cosine",
    }
    if truncate_dim is not None:
        config["truncate_dim"] = truncate_dim
    flags = {flag: name == pooling for flag, name in POOLING_FLAGS.items()}
    sizes = {"word_embedding_dimension": hidden_size}
    write_json(folder / "modules.json", modules)
    write_json(
        folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False}
    )
    write_json(folder / "config_sentence_transformers.json", config)
    write_json(folder / "1_Pooling" / "config.json", {**sizes, **flags, "include_prompt": True})
    for number, module in enumerate(head, start=2):
        if isinstance(module, Dense):
            module.write(folder / f"{number}_Dense")


def _read_pooling(path: Path, has_prompts: bool) -> Pooling:
    config: dict[str, Any] = read_json_object(path)
    if has_prompts and not config.get("include_prompt", True):
        raise DualencError(
            f"{path}: include_prompt is false, but prompts are always pooled here; set it to true"
        )
    named = config.get("pooling_mode")
    if named is None:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        chosen = [POOLING_FLAGS.get(mode) for mode in modes] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else list(named)
        chosen = [POOLING_NAMES.get(mode) for mode in modes]
    if len(chosen) != 1 or chosen[0] is None:
        raise DualencError(
            f"{path}: pooling {' + '.join(modes)} is not supported; only mean, cls or last token"
        )
    return chosen[0]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
