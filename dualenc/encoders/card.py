"""Model cards: a README.md with facts, training data, metrics and usage."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from dualenc.encoders.hub import hub_name, model_folder

TEMPLATE = Path(__file__).with_name("model_card.md.jinja")


LIBRARIES = {
    "query-document": ("sentence-transformers", "sentence-similarity", ("feature-extraction",)),
    "image-text": ("open_clip", "zero-shot-image-classification", ("clip",)),
    "image": ("timm", "image-feature-extraction", ("image-feature-extraction",)),
    "vector": ("dualenc", "feature-extraction", ()),
    "query-index": ("sentence-transformers", "sentence-similarity", ("feature-extraction",)),
}
"""Library, hub pipeline and further tags of each format of model folders."""

SECTIONS = {"task": "Task", "data": "Training data", "recipe": "Recipe", "metrics": "Metrics"}
METADATA = ("base_model", "datasets", "language", "license")
"""Keys of a card that belong in the front matter, where the hub reads them."""


def render_card(
    name: str,
    facts: Mapping[str, str],
    card: Mapping[str, Any],
    *,
    model_format: str,
    usage: str,
    example: str,
    on_hub: bool = False,
) -> str:
    """Render a model folder's README.md; absolute paths are shortened to their last part.

    Args:
        name: name of the model: a folder, or owner/name on the hub.
        facts: rows of the first table, such as {"Vector size": "128"}; "Kind" is required.
        card: what the model itself cannot know: `task`, `data`, `recipe`, `metrics` as {metric:
            number} or {metric: {column: number}}; `base_model`, `datasets`, `language` and
            `license` for the front matter. Other keys become sections.
        model_format: format of the folder, a key of `LIBRARIES`.
        usage: example in the template.
        example: arguments of `encode` in the example.
        on_hub: True if `name` is a repository of the hub.
    """
    library, pipeline, tags = LIBRARIES[model_format]
    # None values are dropped.
    metadata: dict[str, Any] = {key: card.get(key) for key in METADATA}
    card_data = ModelCardData(
        library_name=library,
        pipeline_tag=pipeline,
        tags=list(dict.fromkeys([library, *tags, "dualenc"])),
        **metadata,
    )
    rendered = ModelCard.from_template(
        card_data,
        template_path=str(TEMPLATE),
        name=name,
        quoted=json.dumps(name)[1:-1],
        facts={"Kind": facts["Kind"], "Format": library, **facts},
        sections=_sections(card),
        usage=usage,
        example=example,
        on_hub=on_hub,
        # Jinja escapes for HTML only, so Markdown's links, tables and code need their own escaping.
        inline=_inline,
        table=_table,
    )
    return str(rendered).rstrip("\n") + "\n"


def base_metadata(name: str) -> dict[str, str]:
    """Return `base_model` and `license` for the card of a model trained from this one, if known."""
    try:
        card = metadata_load(model_folder(name) / "README.md") or {}
    except Exception:
        # A missing or unusual card must not prevent training.
        card = {}
    known = {"license": card.get("license"), "base_model": hub_name(name) or card.get("base_model")}
    # A local path is useless elsewhere, and may reveal a user's name.
    if os.path.isabs(str(known["base_model"])):
        del known["base_model"]
    return {key: value for key, value in known.items() if isinstance(value, str)}


def _sections(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return title and Markdown of each section, in the order of `SECTIONS`."""
    sections = []
    for key in dict.fromkeys([*SECTIONS, *card]):
        value = card.get(key)
        if value is None or key in METADATA:
            continue
        title = SECTIONS.get(key, _inline(str(key).replace("_", " ").capitalize()))
        if key == "metrics":
            body = _metrics(value)
        elif key == "recipe" and isinstance(value, str):
            body = _fenced("yaml", value)
        elif isinstance(value, str):
            body = _inline(_without_folders(value.strip()))
        else:
            body = _fenced("json", json.dumps(value, indent=2, ensure_ascii=False, default=str))
        sections.append((title, body))
    return sections


def _metrics(metrics: Mapping[Any, Any]) -> str:
    """Format metrics as a table: a row per metric, and a column per name in nested mappings."""
    nested = {
        metric: value if isinstance(value, Mapping) else {"value": value}
        for metric, value in metrics.items()
    }
    columns = list(dict.fromkeys(column for row in nested.values() for column in row))
    rows = []
    for metric, row in nested.items():
        values = [row.get(column, "") for column in columns]
        rows.append(
            [metric, *(f"{value:.4f}" if isinstance(value, float) else value for value in values)]
        )
    return _table(["metric", *columns], rows)


def _table(header: Iterable[Any], rows: Iterable[Iterable[Any]]) -> str:
    """Format cells as a Markdown table."""
    cells = [[_inline(str(cell)) for cell in row] for row in (header, *rows)]
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fenced(language: str, text: str) -> str:
    """Format a code block with a fence longer than any in the text."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{_without_folders(text.rstrip())}\n{fence}"


def _without_folders(text: str) -> str:
    """Shorten absolute paths in a text to their last part, which hides user names; keep URLs."""
    return re.sub(
        r"""(?<![\w:/.<])(?:file://|~)?(?:/[^\s"'/:,<>()\]}]+)*/(?=[^\s"'/:,<>()\]}])""", "", text
    )


def _inline(text: str) -> str:
    """Escape a text for Markdown, so that no tag, link, code or table cell begins in it."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", html.escape(text, quote=False))
