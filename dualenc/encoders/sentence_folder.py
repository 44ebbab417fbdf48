"""The sentence-transformers folder: read without running anything in it, and written."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.errors import DualencError
from dualenc.files import atomic_path, read_json, read_json_object, write_json
from dualenc.types import Pooling

if TYPE_CHECKING:
    from torch import Tensor

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
    """

    transformer: Path
    pooling: Pooling | None = None
    query_prompt: str = ""
    document_prompt: str = ""
    max_length: int | None = None
    lower_case: bool = False


def read_sentence_folder(folder: Path) -> SentenceFolder:
    """Read a sentence-transformers folder, or a plain transformers folder as one that says nothing.

    Raises:
        DualencError: it has modules that these towers cannot express, such as Dense, or is incomplete.
    """
    if not (folder / "modules.json").is_file():
        return SentenceFolder(folder)
    modules = read_json(folder / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise DualencError(f"{folder / 'modules.json'}: is no list of modules; restore the file")
    paths: dict[str, Path] = {}
    for module in modules:
        package, _, name = str(module.get("type", "")).rpartition(".")
        if name not in MODULES or package.partition(".")[0] != "sentence_transformers":
            raise DualencError(
                f"{folder}: its module {module.get('type')} is not supported; "
                f"only models of {', '.join(MODULES)} can be loaded"
            )
        path = str(module.get("path", ""))
        paths[name] = folder / path
        if not paths[name].resolve().is_relative_to(folder.resolve()):
            raise DualencError(f"{folder / 'modules.json'}: {path} leaves the folder; restore the file")
    for name in MODULES[:2]:
        if name not in paths:
            raise DualencError(f"{folder / 'modules.json'}: lists no {name}; only text embedding models can be loaded")
    settings = _optional_json(paths["Transformer"] / "sentence_bert_config.json")
    task = settings.get("transformer_task", "feature-extraction")
    if task != "feature-extraction":
        raise DualencError(f"{folder}: transformer_task is {task!r}; only embedding models can be loaded")
    prompts = _optional_json(folder / "config_sentence_transformers.json").get("prompts") or {}
    return SentenceFolder(
        paths["Transformer"],
        pooling=_read_pooling(paths["Pooling"] / "config.json", bool(any(prompts.values()))),
        query_prompt=prompts.get("query") or "",
        document_prompt=next((prompts[k] for k in ("document", "passage", "corpus") if prompts.get(k)), ""),
        max_length=settings.get("max_seq_length"),
        lower_case=bool(settings.get("do_lower_case")),
    )


def write_sentence_files(folder: Path, dim: int, pooling: Pooling, max_length: int, prompts: dict[str, str]) -> None:
    """Write everything of a sentence-transformers folder but the transformer and the tokenizer.

    The older spellings are used, which every version since 2 reads.

    Args:
        folder: where, next to config.json and model.safetensors.
        dim: D, the size of the vectors.
        pooling: how tokens become one vector.
        max_length: longest input in tokens.
        prompts: by name, "query" and "document"; a single one is also the default of plain `encode`.
    """
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{m}" if i else "", "type": f"sentence_transformers.models.{m}"}
        for i, m in enumerate(MODULES)
    ]
    flags = {flag: name == pooling for flag, name in POOLING_FLAGS.items()} | dict.fromkeys(OTHER_FLAGS, False)
    write_json(folder / "modules.json", modules)
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "prompts": prompts,
            "default_prompt_name": next(iter(prompts)) if len(prompts) == 1 else None,
            "similarity_fn_name": "cosine",
        },
    )
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": dim, **flags, "include_prompt": True})


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
    from safetensors.torch import save_file

    if not (base / "modules.json").is_file():
        raise DualencError(f"{base}: no modules.json; give the folder of a sentence-transformers model")
    read_sentence_folder(base)  # refuses what is no text embedding model
    modules: list[dict[str, Any]] = read_json(base / "modules.json")
    pooling = next(base / str(module["path"]) for module in modules if str(module["type"]).endswith(".Pooling"))
    dim = read_json_object(pooling / "config.json").get("word_embedding_dimension", weight.shape[1])
    if dim != weight.shape[1]:
        raise DualencError(f"{base}: its vectors have dimension {dim}, but the adapter takes {weight.shape[1]}")

    def unwanted(place: str, names: list[str]) -> set[str]:
        wanted = (".json", ".safetensors", ".txt", ".model")
        files = {name for name in names if not (Path(place, name).is_dir() or name.endswith(wanted))}
        return files | {"onnx", "openvino"}

    with atomic_path(folder) as new:
        shutil.copytree(base, new, ignore=unwanted)
        for name in ("Normalize", "Dense", "Normalize"):
            number = len(modules)
            path = f"{number}_{name}"
            modules.append(
                {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
            )
            (new / path).mkdir()
            if name == "Dense":
                sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": True}
                identity = {"activation_function": "torch.nn.modules.linear.Identity"}
                write_json(new / path / "config.json", {**sizes, **identity})
                tensors = {"linear.weight": weight.detach().contiguous(), "linear.bias": bias.detach().contiguous()}
                save_file(tensors, new / path / "model.safetensors")
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
