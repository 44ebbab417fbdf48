"""Settings of a text folder in the format before sentence-transformers 5.4.

TEI, vLLM and Ollama read only this format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dualenc.io.files import write_json
from dualenc.io.reading import read_json

FILES = {
    "Transformer": "sentence_bert_config.json",
    "Pooling": "config.json",
    "Dense": "config.json",
}
MODES = {
    **{"cls": "cls_token", "max": "max_tokens", "mean": "mean_tokens", "lasttoken": "lasttoken"},
    **{"mean_sqrt_len_tokens": "mean_sqrt_len_tokens", "weightedmean": "weightedmean_tokens"},
}
"""Pooling modes, and their names in the keys of the older layout."""
NEWER = ("processing_kwargs", "query_length", "document_length")
"""Settings of a transformer that the older layout cannot express."""


def write_older_layout(folder: Path, max_length: int) -> None:
    """Rewrite the settings in a folder so that all versions of sentence-transformers read them.

    Nothing is changed if a module lacks an older form: Router, StaticEmbedding, several pooling
    modes, chat templates, different lengths for the two sides.

    Args:
        folder: folder written by `SentenceTransformer.save`.
        max_length: longest input in tokens.
    """
    modules = read_json(folder / "modules.json")
    contents: dict[Path, Any] = {folder / "modules.json": modules}
    for module in modules:
        kind = module["type"].rpartition(".")[2]
        module["type"] = f"sentence_transformers.models.{kind}"
        if kind == "Normalize":
            continue
        if kind not in FILES:
            return
        file = folder / module["path"] / FILES[kind]
        contents[file] = _older_settings(kind, read_json(file), max_length)
    # All files or none, so that the folder stays consistent.
    if all(contents.values()):
        for file, settings in contents.items():
            write_json(file, settings)


def _older_settings(kind: str, settings: dict[str, Any], max_length: int) -> dict[str, Any] | None:
    """Return a module's settings in their older form; None if there is none."""
    if kind == "Transformer":
        is_newer = settings["modality_config"].keys() != {"text"} or any(
            settings.get(name) for name in NEWER
        )
        lower = settings.get("do_lower_case", False)
        return None if is_newer else {"max_seq_length": max_length, "do_lower_case": lower}
    if kind == "Pooling":
        mode = settings["pooling_mode"]
        if not isinstance(mode, str):
            return None
        # Write all keys: versions of 2024 default to the mean unless its key is false.
        keys = {f"pooling_mode_{name}": own == mode for own, name in MODES.items()}
        keys["word_embedding_dimension"] = settings["embedding_dimension"]
        return keys | {"include_prompt": settings["include_prompt"]}
    names = (settings["module_input_name"], settings["module_output_name"])
    if names != ("sentence_embedding", "sentence_embedding") or settings.get("use_residual"):
        return None
    return {
        key: settings[key] for key in ("in_features", "out_features", "bias", "activation_function")
    }
