"""Model cards: a README.md with a model's facts, training data, metrics, and how to load it, from a
template file."""

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
"""Library, pipeline of the hub and further tags of each format of model folders."""

SECTIONS = {"task": "Task", "data": "Training data", "recipe": "Recipe", "metrics": "Metrics"}
METADATA = ("base_model", "datasets", "language", "license")
"""Keys of a card that go to its front matter, where the hub looks for them."""


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
    """The text of a model folder's README.md; of absolute paths only the last part is shown.

    `card` is what the model cannot know: `task`, `data`, `recipe`, `metrics` as {metric: number} or
    {metric: {column: number}}; `base_model`, `datasets`, `language`, `license` for the front
    matter. Further keys become sections.
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
        # Jinja's own escaping is for HTML, which leaves Markdown's links, tables and code as they
        # are.
        inline=_inline,
        table=_table,
    )
    return str(rendered).rstrip("\n") + "\n"


def base_metadata(name: str) -> dict[str, str]:
    """`base_model` and `license` for the card of a model trained from this one, where they are
    known."""
    try:
        card = metadata_load(model_folder(name) / "README.md") or {}
    except Exception:  # no card, or one of another form, which is no reason not to train
        card = {}
    known = {"license": card.get("license"), "base_model": hub_name(name) or card.get("base_model")}
    # A path of this machine means nothing elsewhere.
    if os.path.isabs(str(known["base_model"])):
        del known["base_model"]
    return {key: value for key, value in known.items() if isinstance(value, str)}


def _sections(card: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Title and Markdown of each section, in the order of `SECTIONS`."""
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
    """A table with a row per metric, and a column per name in nested mappings."""
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
    cells = [[_inline(str(cell)) for cell in row] for row in (header, *rows)]
    lines = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _fenced(language: str, text: str) -> str:
    """A code block that nothing in the text can end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{_without_folders(text.rstrip())}\n{fence}"


def _without_folders(text: str) -> str:
    """A text in which only the last part of absolute paths is left; URLs stay."""
    return re.sub(
        r"""(?<![\w:/.<])(?:file://|~)?(?:/[^\s"'/:,<>()\]}]+)*/(?=[^\s"'/:,<>()\]}])""", "", text
    )


def _inline(text: str) -> str:
    """Plain text in Markdown: no tag, link, code or table cell begins in it."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", html.escape(text, quote=False))
