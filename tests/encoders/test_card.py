"""Model cards: the hub can parse them, and the examples in them run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import DualEncoder, ImageEncoder, ImageTextEncoder, TextEncoder
from dualenc.encoders.card import model_card

Build = Callable[[str], DualEncoder]


@pytest.fixture
def build(bert: dict[str, Any], clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Build:
    makers: dict[str, Callable[[], DualEncoder]] = {
        "shared": lambda: TextEncoder(config=bert, tokenizer=tokenizer, query_prompt="ask: "),
        "separate": lambda: TextEncoder(config=bert, tokenizer=tokenizer, shared=False),
        "image-text": lambda: ImageTextEncoder(config=clip),
        "image": lambda: ImageEncoder("test_resnet", image_size=32),
    }
    return lambda kind: makers[kind]()


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize(
    ("kind", "library", "pipeline"),
    [
        ("shared", "sentence-transformers", "sentence-similarity"),
        ("separate", "sentence-transformers", "sentence-similarity"),
        ("image-text", "open_clip", "zero-shot-image-classification"),
        ("image", "timm", "image-feature-extraction"),
    ],
)
def test_examples_run_beside_the_folder(
    build: Build, kind: str, library: str, pipeline: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(kind).save(tmp_path / "my model")
    card = (tmp_path / "my model" / "README.md").read_text()
    assert front_matter(card)["library_name"] == library
    assert front_matter(card)["pipeline_tag"] == pipeline
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        code = example.replace("\n# ", "\n")  # commented lines need an image
        exec(code, {"image": Image.new("RGB", (40, 40)), "images": [Image.new("RGB", (40, 40))]})
    assert not os.path.isabs(front_matter(card).get("base_model", ""))


def test_what_the_caller_knows_is_told(build: Build) -> None:
    card = {
        "task": "Find the abstract of a title.",
        "data": "Papers.",
        "recipe": {"epochs": 3},
        "metrics": {"ndcg@10": {"before": 0.1, "after": 0.51234}, "queries": {"after": 300}},
        "license": "apache-2.0",
        "base_model": "some/model",
        "known_limits": "English only.",
    }
    text = model_card(build("shared"), "papers", card)
    assert front_matter(text)["license"] == "apache-2.0"
    assert front_matter(text)["base_model"] == "some/model"
    for part in (
        "# papers\n",
        "## Task\n\nFind the abstract of a title.",
        "## Training data\n\nPapers.",
        '```json\n{\n  "epochs": 3\n}\n```',
        "| metric | before | after |",
        "| ndcg@10 | 0.1000 | 0.5123 |",
        "| queries |  | 300 |",
        "## Known limits\n\nEnglish only.",
        "| Query prompt | 'ask: ' |",
        "| Towers | shared |",
    ):
        assert part in text


def test_flat_metrics_are_one_column_and_bars_do_not_break_tables(build: Build) -> None:
    text = model_card(build("image"), "net", {"metrics": {"a|b": 0.5}})
    assert "| metric | value |\n| --- | --- |\n| a\\|b | 0.5000 |" in text


def test_without_a_word_from_the_caller_nothing_is_empty(build: Build) -> None:
    text = model_card(build("image-text"), "clip", {})
    assert "None" not in text
    assert re.findall(r"^## .*", text, flags=re.MULTILINE) == ["## Use"]
