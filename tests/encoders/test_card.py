"""Model cards: the hub can parse them, and the examples in them run."""

from __future__ import annotations

import itertools
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import DualEncoder, ImageEncoder, ImageTextEncoder, TextEncoder, load_model
from dualenc.errors import DualencError

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


@pytest.mark.slow
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
    text = build("shared").model_card("papers", card)
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
        "| Kind | query-document dual encoder |",
    ):
        assert part in text


def test_flat_metrics_are_one_column_and_bars_do_not_break_tables(build: Build) -> None:
    text = build("image").model_card("net", {"metrics": {"a|b": 0.5}})
    assert "| metric | value |\n| --- | --- |\n| a\\|b | 0.5000 |" in text


HOSTILE = "</td><script>alert(1)</script> ``` [a](javascript:b) ![](c) | & `d`"


def test_names_prompts_and_paths_cannot_become_markup(build: Build, tokenizer: Any, bert: dict[str, Any]) -> None:
    """Rendered with markdown-it as CommonMark with tables and raw HTML, as the hub does."""
    MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
    model = TextEncoder(config=bert, tokenizer=tokenizer)
    card = {
        "task": HOSTILE,
        "data": HOSTILE,
        "recipe": f"prompt: |\n  {HOSTILE}\n````\n<script>",
        "metrics": {HOSTILE: {HOSTILE: 0.5}},
        "base_model": HOSTILE,
        HOSTILE: {"a": HOSTILE},
    }
    text = model.model_card(HOSTILE, card)
    assert front_matter(text)["base_model"] == HOSTILE
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text.split("\n---\n", 1)[1])
    kinds = [inner.type for token in tokens for inner in [token, *(token.children or [])]]
    assert not {"html_block", "html_inline", "link_open", "image", "hr"} & set(kinds)
    headings = [after.content for token, after in itertools.pairwise(tokens) if token.type == "heading_open"]
    assert len(headings) == 7  # name, task, data, recipe, metrics, the caller's own, use
    code = [token.content for token in tokens if token.type == "fence"]
    assert any(content.startswith("prompt: |") and content.endswith("<script>\n") for content in code)
    for example in code[-2:]:
        compile(example, "card", "exec")


def test_without_a_word_from_the_caller_nothing_is_empty(build: Build) -> None:
    text = build("image-text").model_card("clip", {})
    assert "None" not in text
    assert re.findall(r"^## .*", text, flags=re.MULTILINE) == ["## Use"]


@pytest.mark.slow
def test_a_card_names_the_base_model_and_its_license_but_no_path(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("shared").save(tmp_path / "base")
    readme = tmp_path / "base" / "README.md"
    readme.write_text("---\nlicense: mit\nbase_model: /home/me/models/bert\n---\n# Base\n")
    recipe = f"model:\n  name: {tmp_path / 'base'}\n  from: [~/a/b, '/data', hf://datasets/x, ./runs]\n"
    card = {"recipe": recipe, "data": f"Pairs of {tmp_path}/pairs.csv, https://host/a/b and me/pairs."}

    TextEncoder(str(tmp_path / "base")).save(tmp_path / "local", card=card)
    text = (tmp_path / "local" / "README.md").read_text()
    assert str(tmp_path) not in text
    assert "  name: base\n  from: [b, 'data', hf://datasets/x, ./runs]\n" in text
    assert "Pairs of pairs.csv, https://host/a/b and me/pairs." in text
    assert front_matter(text)["license"] == "mit"
    assert "base_model" not in front_matter(text), "a path of another machine"

    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "base"))
    TextEncoder("owner/name").save(tmp_path / "tuned")
    monkeypatch.undo()
    found = front_matter(load_model(tmp_path / "tuned").model_card("mine", {}))
    assert (found["base_model"], found["license"]) == ("owner/name", "mit")
    known = load_model(tmp_path / "tuned").model_card("mine", {"license": "apache-2.0", "base_model": "other/base"})
    assert [front_matter(known)[key] for key in ("base_model", "license")] == ["other/base", "apache-2.0"]
    assert not {"base_model", "license"} & front_matter(build("image").model_card("from-scratch", {})).keys()


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        ("shared", ['SentenceTransformer("me/mine")', 'load_model("me/mine")']),
        ("separate", ['SentenceTransformer(snapshot_download("me/mine") + "/query")', 'load_model("me/mine")']),
        ("image-text", ['open_clip.create_model_and_transforms("hf-hub:me/mine")', 'get_tokenizer("hf-hub:me/mine")']),
        ("image", ['timm.create_model("hf-hub:me/mine"', 'load_file(snapshot_download("me/mine") + "/model.safe']),
    ],
)
def test_an_upload_names_the_repository(
    build: Build, kind: str, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload_folder(repo_id: str, folder_path: str) -> Any:
        shutil.copytree(folder_path, tmp_path / repo_id)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")

    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo, private, exist_ok: None)
    monkeypatch.setattr("huggingface_hub.upload_folder", upload_folder)
    model = build(kind)
    if isinstance(model, ImageEncoder):
        model.small_image_stem = True
    assert model.push_to_hub("me/mine", {"license": "mit"}) == "https://hub/me/mine"
    text = (tmp_path / "me" / "mine" / "README.md").read_text()
    for line in (*lines, "\n# me/mine\n"):
        assert line in text
    assert ModelCard(text).data.license == "mit"
    for example in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        compile(example, "card", "exec")
        assert ("snapshot_download(" in example) == ("import snapshot_download" in example)
    if not isinstance(model, ImageEncoder):
        assert load_model(tmp_path / "me" / "mine").kind == model.kind


def test_a_refused_upload_is_one_line(build: Build) -> None:
    with pytest.raises(DualencError, match="me/mine: could not be uploaded"):  # the tests are offline
        build("image-text").push_to_hub("me/mine")
