"""The model card: a README.md that says what a model is, what it was trained on, and how to load it anywhere."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dualenc.errors import DualencError

if TYPE_CHECKING:
    from huggingface_hub import EvalResult

    from dualenc.encoders.dual import DualEncoder
    from dualenc.encoders.vector import VectorEncoder
    from dualenc.types import Side


class Code(NamedTuple):
    """A text to be shown as it is, in a fenced block that nothing in it can end.

    Attributes:
        language: of the text, such as "yaml".
        text: any text.
    """

    language: str
    text: str


class Results(NamedTuple):
    """What a model achieved on one data set, for the `model-index` of the front matter.

    Attributes:
        task: one of `TASKS`.
        data: name of the data set.
        split: of it, if it has splits.
        metrics: numbers by name, such as "ndcg@10"; those that are not finite are left out.
    """

    task: str
    data: str
    split: str | None
    metrics: Mapping[str, float]


_TEXT = """\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}")
queries = model.encode_query(["a question"])
documents = model.encode_document(["a text"])
print(queries @ documents.T)
"""

_TWO_TEXTS = """\
from sentence_transformers import SentenceTransformer

queries = SentenceTransformer("{name}/query").encode_query(["a question"])
documents = SentenceTransformer("{name}/document").encode_document(["a text"])
print(queries @ documents.T)
"""

_ONE_TEXT = """\
from sentence_transformers import SentenceTransformer

vectors = SentenceTransformer("{name}").encode_{role}(["a text"])
"""

_IMAGE_TEXT = """\
import open_clip

model, _, preprocess = open_clip.create_model_and_transforms("local-dir:{name}")
tokenizer = open_clip.get_tokenizer("local-dir:{name}")
model.eval()
texts = model.encode_text(tokenizer(["a caption"]), normalize=True)
# images = model.encode_image(preprocess(image).unsqueeze(0), normalize=True)
"""

_VISION_TEXT = """\
from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{name}").eval()
tokenizer = AutoTokenizer.from_pretrained("{name}")
processor = AutoImageProcessor.from_pretrained("{name}")
tokens = tokenizer(["a caption"], padding="max_length", truncation=True, return_tensors="pt")
texts = model.get_text_features(**tokens).pooler_output
texts = texts / texts.norm(dim=1, keepdim=True)
# images = model.get_image_features(**processor(images=image, return_tensors="pt")).pooler_output
"""

_IMAGE = """\
import timm

model = timm.create_model("local-dir:{name}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
# features = model(transform(image).unsqueeze(0))
"""

_SMALL_IMAGE = """\
import timm
import torch
from safetensors.torch import load_file

model = timm.create_model("local-dir:{name}").eval()
# The small-image stem, which timm does not know
model.conv1 = torch.nn.Conv2d(model.conv1.in_channels, model.conv1.out_channels, 3, padding=1, bias=False)
model.maxpool = torch.nn.Identity()
model.load_state_dict(load_file("{name}/model.safetensors"))
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
# features = model(transform(image).unsqueeze(0))
"""

_OWN = """\
from dualenc.encoders import load_model

model = load_model("{name}")
vectors = model.encode("right", model.right.prepare({items}))
"""

# Of each kind or format of model: library, pipeline of the hub, further tags, and how the library loads it.
ECOSYSTEMS = {
    "query-document": ("sentence-transformers", "sentence-similarity", ("feature-extraction",), _TEXT),
    "image-text": ("open_clip", "zero-shot-image-classification", ("clip",), _IMAGE_TEXT),
    "vision-text": ("transformers", "zero-shot-image-classification", ("clip",), _VISION_TEXT),
    "image": ("timm", "image-feature-extraction", ("image-feature-extraction",), _IMAGE),
    "vector": ("dualenc", "feature-extraction", (), _OWN),
}

TASKS = {
    "retrieval": ("information-retrieval", "Information Retrieval"),
    "image-text": ("image-text-retrieval", "Image-Text Retrieval"),
    "zero-shot": ("zero-shot-image-classification", "Zero-Shot Image Classification"),
    "nearest-neighbours": ("image-classification", "Image Classification by Nearest Neighbours"),
}
"""What is evaluated: type and name of the task in a model-index."""
METRIC_TYPES = {"top@1": "accuracy", "top@5": "top_5_accuracy", "knn_accuracy": "accuracy"}
"""Of metrics whose type is not simply their name as MTEB spells it, ndcg_at_10."""

SECTIONS = {"task": "Task", "data": "Training data", "recipe": "Recipe", "metrics": "Metrics"}
FRONT = ("base_model", "datasets", "language", "license", "results")
"""Keys of a card that go to its front matter, where the hub looks for them."""


def model_card(model: DualEncoder, name: str, card: Mapping[str, Any]) -> str:
    """Write the text of a model's README.md.

    Prompts, names and paths in it are shown as they are: none can become markup, a link or front matter.

    Args:
        model: what the card describes.
        name: of its folder; stands for it in the examples.
        card: what the model itself cannot know: `task` and `data` as text, `recipe` as `Code` or mapping, `metrics` as
            {metric: number} or {metric: {column: number}}; `base_model`, `datasets`, `language`, `license` and
            `results` (a list of `Results`) for the front matter. Further keys become sections of their own.
    """
    ecosystem = model.ecosystem or model.kind
    library, _, _, usage = ECOSYSTEMS[ecosystem]
    facts = {"Kind": f"{model.kind} dual encoder", "Format": library, **model.describe()}
    if model.kind == "query-document" and not model.shares_weights:
        usage = _TWO_TEXTS
    elif getattr(model, "small_image_stem", False):
        usage = _SMALL_IMAGE
    items = {"text": '["a text"]', "image": "images", "vector": "rows_of_an_array"}[model.right.modality]
    quoted = _quoted(name)
    examples = {library: usage.format(name=quoted, items=items), "dualenc": _OWN.format(name=quoted, items=items)}
    return _card(ecosystem, name, facts, examples, card)


def base_card(model: VectorEncoder, name: str, base: str, side: Side, card: Mapping[str, Any]) -> str:
    """Write the text of the README.md of a folder with a text model and an adapter of its vectors behind it.

    Args:
        model: the adapter.
        name: of the folder.
        base: what the text model is called.
        side: of the adapter's tower in the folder.
        card: as of `model_card`.
    """
    library, _, _, usage = ECOSYSTEMS["query-document"]
    facts = {
        "Kind": "text encoder: a base as it was, and an adapter of its vectors",
        "Format": library,
        "Base": base,
        "Adapter": model.tower(side).describe() + ("" if model.shares_weights else f"; the {side} tower"),
        "Vector size": str(model.dim),
    }
    if not model.shares_weights:
        usage = _ONE_TEXT
    example = usage.format(name=_quoted(name), role="query" if side == "left" else "document")
    return _card("query-document", name, facts, {library: example}, card)


def _card(
    ecosystem: str, name: str, facts: Mapping[str, str], examples: Mapping[str, str], card: Mapping[str, Any]
) -> str:
    """Front matter, facts, what the caller knows, and examples by library."""
    from huggingface_hub import ModelCardData

    library, pipeline, tags, _ = ECOSYSTEMS[ecosystem]
    told: dict[str, Any] = {key: card.get(key) for key in FRONT if key != "results"}
    if results := eval_results(card.get("results") or ()):
        told |= {"model_name": name, "eval_results": results}
    front_matter = ModelCardData(
        library_name=library,
        pipeline_tag=pipeline,
        tags=list(dict.fromkeys([library, *tags, "dualenc"])),
        **told,  # what is None is left out
    )
    parts = [
        f"---\n{front_matter.to_yaml()}\n---",
        f"# {_inline(name)}",
        "Trained with dualenc.",
        _table(["", ""], [[key, value] for key, value in facts.items()]),
    ]
    named = {**dict.fromkeys(SECTIONS), **{key: card[key] for key in card if key not in FRONT}}
    for key, value in named.items():
        if value is not None:
            title = SECTIONS.get(key, _inline(str(key).replace("_", " ").capitalize()))
            parts.append(f"## {title}\n\n{_metrics(value) if key == 'metrics' else _text(value)}")

    parts.append("## Use")
    parts += [f"With {tool}:\n\n```python\n{code}```" for tool, code in examples.items()]
    return "\n\n".join(parts) + "\n"


def eval_results(results: Iterable[Results]) -> list[EvalResult]:
    """The entries of a model-index, one for each metric, rounded to five places as MTEB does."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type=TASKS[each.task][0],
            task_name=TASKS[each.task][1],
            dataset_type=re.sub(r"\W+", "-", each.data).strip("-").lower() or "unknown",
            dataset_name=each.data,
            dataset_split=each.split,
            metric_type=METRIC_TYPES.get(name, name.replace("@", "_at_")),
            metric_name=name,
            metric_value=round(float(value), 5),
        )
        for each in results
        for name, value in each.metrics.items()
        if math.isfinite(value)
    ]


def with_results(readme: str, name: str, results: Iterable[Results]) -> str:
    """A model card with further results in its model-index; of a metric that stood there before, the new value counts.

    Args:
        readme: text of the card.
        name: of the model, where the card has no model-index yet.
        results: what was measured.

    Raises:
        DualencError: the front matter cannot be read.
    """
    from huggingface_hub import ModelCard

    try:
        card = ModelCard(readme)
        data: Any = card.data
    except Exception as error:  # of YAML and of the card's own checks, of many kinds
        why = " ".join(str(error).split())[:200]
        raise DualencError(f"README.md: its front matter cannot be read ({why}); mend or remove it") from error
    known = [*(data.eval_results or []), *eval_results(results)]
    # What one result says but its value
    latest = {(*each.unique_identifier, each.metric_type, each.metric_name): each for each in known}
    data.eval_results, data.model_name = list(latest.values()), data.model_name or name
    return str(card)


def _quoted(name: str) -> str:
    """What stands between the quotes of a literal."""
    return json.dumps(name)[1:-1]


def _metrics(value: Any) -> str:
    """A table with one row per metric, and one column per name in nested mappings."""
    if not isinstance(value, Mapping):
        return _text(value)
    nested = {metric: v if isinstance(v, Mapping) else {"value": v} for metric, v in value.items()}
    columns = list(dict.fromkeys(column for row in nested.values() for column in row))
    rows = []
    for metric, row in nested.items():
        numbers = [row.get(column) for column in columns]
        rows.append([metric, *(f"{v:.4f}" if isinstance(v, float) else "" if v is None else str(v) for v in numbers)])
    return _table(["metric", *map(str, columns)], rows)


def _text(value: Any) -> str:
    if isinstance(value, str):
        lines = (_inline(line.rstrip()) for line in value.strip().splitlines())
        # What begins a heading, a fence or a rule
        return "\n".join(re.sub(r"^\s*(?=#|~~~|--|==)", r"\\", line) for line in lines)
    if not isinstance(value, Code):
        value = Code("json", json.dumps(value, indent=2, ensure_ascii=False, default=str))
    longest = max(map(len, re.findall("`+", value.text)), default=0)
    fence = "`" * max(3, longest + 1)
    lines = (_visible(line) for line in value.text.rstrip().split("\n"))
    return "\n".join([f"{fence}{value.language}", *lines, fence])


def _table(header: list[str], rows: list[list[str]]) -> str:
    cells = [[_inline(str(cell)) for cell in row] for row in (header, *rows)]
    lines = [cells[0], ["---"] * len(header), *cells[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _inline(text: str) -> str:
    """One line of plain text in Markdown: no tag, link, code or table cell begins in it, and nothing is invisible."""
    escaped = _visible(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`\[\]|])", r"\\\1", escaped)


def _visible(line: str) -> str:
    return "".join(character if character.isprintable() else " " for character in line)
