"""The sentence-transformers folder: read without running anything in it, and written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dualenc.encoders.dense import Dense
from dualenc.errors import DualencError
from dualenc.files import atomic_folder, write_json
from dualenc.reading import read_json, read_json_object
from dualenc.types import Pooling

POOLING_FLAGS: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
OTHER_FLAGS = (
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)
POOLING_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
MODULES = ("Transformer", "Pooling", "Normalize")
SUPPORTED = ("Transformer", "Pooling", "Dense", "Normalize")
QUERY_NAMES = ("query",)
DOCUMENT_NAMES = ("document", "passage", "corpus")
"""Names of prompts that sentence-transformers itself looks for, first ones first."""


MIN_LENGTH = 3
"""Shortest input in tokens: special tokens take two."""


@dataclass(frozen=True)
class SentenceFolder:
    """What a text model's folder says besides weights and vocabulary; None where it says nothing.

    Attributes:
        transformer: the folder with config.json, weights and tokenizer.
        pooling: how tokens become one vector.
        query_prompt: put before queries.
        document_prompt: put before documents.
        max_length: longest input in tokens.
        lower_case: whether the texts are lower-cased before tokenization.
        head: folders of Dense modules behind the pooling, in their order; None stands for a Normalize.
        truncate_dim: how many of the first components are used.
        prompts: all prompts by name.
    """

    transformer: Path
    pooling: Pooling | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None
    lower_case: bool = False
    head: tuple[Path | None, ...] = ()
    truncate_dim: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)

    def prompt(self, name: str) -> str:
        """The prompt of a name.

        Raises:
            DualencError: the folder has none of this name.
        """
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise DualencError(f"{self.transformer}: no prompt is called {name!r}; choose one of its own: {known}")
        return self.prompts[name]


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read a sentence-transformers folder, or a plain transformers folder as one that says nothing.

    A prompt that is the default without belonging to one side is that of both sides, unless they have their own.

    Raises:
        DualencError: it has modules that these towers cannot express, or is incomplete.
    """
    if not (folder / "modules.json").is_file():
        return SentenceFolder(folder)
    modules = _read_modules(folder)
    transformer = modules[0][1]
    pooling = modules[1][1]
    settings = _optional_json(transformer / "sentence_bert_config.json")
    task = settings.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise DualencError(f"{folder}: transformer_task is {task!r}; only embedding models can be loaded")
    path = folder / "config_sentence_transformers.json"
    config = _optional_json(path)
    prompts = _read_prompts(path, config.get("prompts"))
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise DualencError(f"{path}: default_prompt_name {default!r} is none of its prompts; restore the file")
    shared = "" if default in (None, *QUERY_NAMES, *DOCUMENT_NAMES) else prompts[default]
    length = settings.get("max_seq_length")
    if length is not None and (type(length) is not int or length < MIN_LENGTH):
        where = transformer / "sentence_bert_config.json"
        raise DualencError(
            f"{where}: max_seq_length is {length!r}; it must be a whole number from {MIN_LENGTH}, or null"
        )
    truncate_dim = config.get("truncate_dim")
    if truncate_dim is not None and (not isinstance(truncate_dim, int) or truncate_dim < 1):
        raise DualencError(f"{path}: truncate_dim is {truncate_dim!r}; it must be a whole number above 0, or left out")
    return SentenceFolder(
        transformer,
        pooling=_read_pooling(pooling / "config.json", bool(any(prompts.values()))),
        query_prompt=_first(prompts, QUERY_NAMES, shared),
        document_prompt=_first(prompts, DOCUMENT_NAMES, shared),
        max_length=length,
        lower_case=bool(settings.get("do_lower_case")),
        head=tuple(place if name == "Dense" else None for name, place in modules[2:]),
        truncate_dim=truncate_dim,
        prompts=prompts,
    )


def whole_module(folder: Path) -> Path | None:
    """Where the one module lies that a folder has besides a Normalize, as those of CLIP do; None of text models.

    Older folders call it CLIPModel, those that sentence-transformers writes since 5.4 Transformer.

    Raises:
        DualencError: modules.json cannot be read, or names modules that nothing here can express.
    """
    modules = list_modules(folder, (*SUPPORTED, "CLIPModel"))
    names = [name for name, _ in modules]
    return modules[0][1] if names[:1] in (["CLIPModel"], ["Transformer"]) and set(names[1:]) <= {"Normalize"} else None


def _read_modules(folder: Path) -> list[tuple[str, Path]]:
    """Kind and folder of each module: Transformer, Pooling, then any of Dense and Normalize."""
    file = folder / "modules.json"
    found = list_modules(folder, SUPPORTED)
    names = [name for name, _ in found]
    for position, name in enumerate(MODULES[:2]):
        if name not in names:
            raise DualencError(f"{file}: lists no {name}; only text embedding models can be loaded")
        if names.index(name) != position or names.count(name) > 1:
            raise DualencError(f"{file}: {name} is not module {position + 1}; only Transformer, Pooling, then others")
    return found


def list_modules(folder: Path, supported: tuple[str, ...]) -> list[tuple[str, Path]]:
    """Kind and folder of each module, all of supported kinds of sentence-transformers itself.

    Raises:
        DualencError: modules.json cannot be read, names another kind, or a folder outside of this one.
    """
    file = folder / "modules.json"
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise DualencError(f"{file}: is no list of modules; restore the file")
    found: list[tuple[str, Path]] = []
    for module in modules:
        package, _, name = str(module.get("type", "")).rpartition(".")
        if name not in supported or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"{folder}: its module {module.get('type')} is not supported; "
                f"only models of {', '.join(supported)} can be loaded"
            )
        path = module.get("path", "")
        place = folder / str(path)
        try:
            is_inside = place.resolve().is_relative_to(folder.resolve())
        except (ValueError, OSError):  # a NUL byte, half a character, links in a circle
            is_inside = False
        if not (is_inside and isinstance(path, str)):
            raise DualencError(f"{file}: {str(path)[:80]!r} is no path in the folder; restore the file")
        found.append((name, place))
    return found


def _read_prompts(path: Path, prompts: Any) -> dict[str, str]:
    """Prompts by name; None, as of sides that nobody gave one, is empty."""
    prompts = {} if prompts is None else prompts
    if not isinstance(prompts, dict) or not all(isinstance(p, str | None) for p in prompts.values()):
        raise DualencError(f"{path}: prompts are no texts by name; restore the file")
    return {name: prompt or "" for name, prompt in prompts.items()}


def _first(prompts: dict[str, str], names: tuple[str, ...], otherwise: str) -> str:
    """The first prompt of some names that says something; of those given as empty, nothing."""
    given = [prompts[name] for name in names if name in prompts]
    return next(filter(None, given), "") if given else otherwise


def write_sentence_files(
    folder: Path,
    hidden_size: int,
    pooling: Pooling,
    max_length: int,
    prompts: dict[str, str],
    *,
    default_prompt_name: str | None = None,
    head: Iterable[nn.Module] = (),
) -> None:
    """Write everything of a sentence-transformers folder but the transformer and the tokenizer.

    The older spellings are used, which every version since 2 reads.

    Args:
        folder: where, next to config.json and model.safetensors.
        hidden_size: of a token's vector.
        pooling: how tokens become one vector.
        max_length: longest input in tokens.
        prompts: by name, "query" and "document" among them.
        default_prompt_name: which of them plain `encode` uses.
        head: `Dense` and `Normalize` modules behind the pooling, before the last `Normalize`.
    """
    head = list(head)
    names = [*MODULES[:2], *(type(module).__name__ for module in head), "Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{m}" if i else "", "type": f"sentence_transformers.models.{m}"}
        for i, m in enumerate(names)
    ]
    flags = {flag: name == pooling for flag, name in POOLING_FLAGS.items()} | dict.fromkeys(OTHER_FLAGS, False)
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": prompts,
            "default_prompt_name": default_prompt_name,
            "similarity_fn_name": "cosine",
        },
    )
    sizes = {"word_embedding_dimension": hidden_size}
    write_json(folder / "1_Pooling" / "config.json", {**sizes, **flags, "include_prompt": True})
    for number, module in enumerate(head, start=2):
        if isinstance(module, Dense):
            module.write(folder / f"{number}_Dense")


def append_dense(base: Path, folder: Path, weight: Tensor, bias: Tensor, readme: str) -> None:
    """Write a sentence-transformers folder again with Normalize, Dense and Normalize behind its modules.

    Args:
        base: the folder; nothing but its configurations, vocabulary and safetensors weights are taken over.
        folder: where; new.
        weight: of the Dense module, (D, input_dim).
        bias: (D,).
        readme: the model card, in place of the base's.

    Raises:
        DualencError: the base is no folder of sentence-transformers, or its vectors have another size.
    """
    if not (base / "modules.json").is_file():
        raise DualencError(f"{base}: no modules.json; give the folder of a sentence-transformers model")
    says = read_sentence_folder(base)  # refuses what is no text embedding model
    if says.truncate_dim is not None:
        raise DualencError(f"{base}: truncates its vectors behind all modules, so none can follow; give its whole base")
    modules: list[dict[str, Any]] = read_json(base / "modules.json")
    pooling = next(base / str(module["path"]) for module in modules if str(module["type"]).endswith(".Pooling"))
    dim = read_json_object(pooling / "config.json").get("word_embedding_dimension", weight.shape[1])
    for place in filter(None, says.head):
        dim = read_json_object(place / "config.json")["out_features"]
    if dim != weight.shape[1]:
        raise DualencError(f"{base}: its vectors have dimension {dim}, but the adapter takes {weight.shape[1]}")

    def unwanted(place: str, names: list[str]) -> set[str]:
        suffixes = (".json", ".safetensors", ".txt", ".model")
        files = {name for name in names if not (Path(place, name).is_dir() or name.endswith(suffixes))}
        return files | {"onnx", "openvino"}

    with atomic_folder(folder, lambda _: False, "model") as new:
        shutil.copytree(base, new, ignore=unwanted)
        for name in ("Normalize", "Dense", "Normalize"):
            number = len(modules)
            path = f"{number}_{name}"
            modules.append(
                {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            )
            if name == "Dense":
                dense = Dense(weight.shape[1], weight.shape[0])
                dense.load_state_dict({"linear.weight": weight, "linear.bias": bias})
                dense.write(new / path)
            else:
                (new / path).mkdir()
        write_json(new / "modules.json", modules)
        (new / "README.md").write_text(readme, encoding="utf-8")


def _read_pooling(path: Path, has_prompts: bool) -> Pooling:
    config: dict[str, Any] = read_json_object(path)
    if has_prompts and not config.get("include_prompt", True):
        raise DualencError(f"{path}: include_prompt is false, but prompts are always pooled here; set it to true")
    named = config.get("pooling_mode")
    if named is None:
        modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value]
        chosen = [POOLING_FLAGS.get(mode) for mode in modes] or ["mean"]
    else:
        modes = [named] if isinstance(named, str) else list(named)
        chosen = [POOLING_NAMES.get(mode) for mode in modes]
    if len(chosen) != 1 or chosen[0] is None:
        raise DualencError(f"{path}: pooling {' + '.join(modes)} is not supported; only mean, cls or last token")
    return chosen[0]


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}
