"""Model cards: the hub can parse them, and the examples in them run."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from dualenc.encoders import TextEncoder, load_model
from dualenc.errors import DualencError


def front_matter(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "library", "pipeline"),
    [
        ("query-document", "sentence-transformers", "sentence-similarity"),
        ("image-text", "open_clip", "zero-shot-image-classification"),
        ("image", "timm", "image-feature-extraction"),
    ],
)
def test_examples_run_beside_the_folder(
    build: Any,
    kind: str,
    library: str,
    pipeline: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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


def test_the_example_of_a_cut_model_ranks_as_the_model_does(
    text_encoder: Any, tmp_path: Path
) -> None:
    """sentence-transformers cuts behind the Normalize, so that lengths differ."""
    model = text_encoder(truncate_dim=4)
    model.save(tmp_path / "model")
    example = re.findall(
        r"```python\n(.*?)```", (tmp_path / "model" / "README.md").read_text(), flags=re.DOTALL
    )[0]
    example = example.replace('"model"', repr(str(tmp_path / "model")))
    exec(example.replace("print(", "scores = ("), known := {})
    expected = model.encode_query(["a question"]) @ model.encode_document(["a text"]).T
    assert known["scores"].numpy() == pytest.approx(expected, abs=1e-5)


def test_the_callers_facts_are_shown(build: Any) -> None:
    card = {
        "data": "Papers.",
        "recipe": {"epochs": 3},
        "metrics": {"ndcg@10": {"before": 0.1, "after": 0.51234}},
        "license": "apache-2.0",
        "base_model": "some/model",
        "known_limits": "English only.",
    }
    text = build("query-document").model_card("papers", card)
    assert front_matter(text)["license"] == "apache-2.0"
    assert front_matter(text)["base_model"] == "some/model"
    for part in (
        "# papers\n",
        "## Training data\n\nPapers.",
        '```json\n{\n  "epochs": 3\n}\n```',
        "| metric | before | after |",
        "| ndcg@10 | 0.1000 | 0.5123 |",
        "## Known limits\n\nEnglish only.",
        "| Kind | query-document dual encoder |",
    ):
        assert part in text


HOSTILE = "</td><script>alert(1)</script> ``` [a](javascript:b) ![](c) | & `d`"


def test_names_cannot_become_markup(build: Any) -> None:
    """Rendered with markdown-it as CommonMark with tables and raw HTML, as the hub does."""
    MarkdownIt = pytest.importorskip("markdown_it").MarkdownIt
    recipe = f"prompt: |\n  {HOSTILE}\n````\n<script>"
    card = {"data": HOSTILE, "recipe": recipe, "metrics": {HOSTILE: 0.5}, HOSTILE: {"a": HOSTILE}}
    text = build("query-document").model_card(HOSTILE, card)
    tokens = (
        MarkdownIt("commonmark", {"html": True}).enable("table").parse(text.split("\n---\n", 1)[1])
    )
    kinds = [inner.type for token in tokens for inner in [token, *(token.children or [])]]
    assert not {"html_block", "html_inline", "link_open", "image", "hr"} & set(kinds)
    assert kinds.count("heading_open") == 6  # name, data, recipe, metrics, the caller's own, use


@pytest.mark.slow
def test_a_card_names_the_base_model_and_its_license_but_no_path(
    build: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("query-document").save(tmp_path / "base")
    readme = tmp_path / "base" / "README.md"
    readme.write_text("---\nlicense: mit\nbase_model: /home/me/models/bert\n---\n# Base\n")
    recipe = (
        f"model:\n  name: {tmp_path / 'base'}\n  from: [~/a/b, '/data', hf://datasets/x, ./runs]\n"
    )
    card = {
        "recipe": recipe,
        "data": f"Pairs of {tmp_path}/pairs.csv, https://host/a/b and me/pairs.",
    }

    TextEncoder(str(tmp_path / "base")).save(tmp_path / "local", card=card)
    text = (tmp_path / "local" / "README.md").read_text()
    assert str(tmp_path) not in text
    assert "  name: base\n  from: [b, 'data', hf://datasets/x, ./runs]\n" in text
    assert "Pairs of pairs.csv, https://host/a/b and me/pairs." in text
    assert front_matter(text)["license"] == "mit"
    assert "base_model" not in front_matter(text), "a path of another machine"

    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path / "base")
    )
    TextEncoder("owner/name").save(tmp_path / "tuned")
    monkeypatch.undo()
    found = front_matter(load_model(tmp_path / "tuned").model_card("mine", {}))
    assert (found["base_model"], found["license"]) == ("owner/name", "mit")


def test_an_upload_names_the_repository(
    text_encoder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload_folder(repo_id: str, folder_path: str) -> Any:
        shutil.copytree(folder_path, tmp_path / repo_id)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}")

    model = text_encoder(shared=False)
    with pytest.raises(
        DualencError, match="me/mine: could not be uploaded"
    ):  # the tests are offline
        model.push_to_hub("me/mine")
    monkeypatch.setattr("huggingface_hub.create_repo", lambda repo, private, exist_ok: None)
    monkeypatch.setattr("huggingface_hub.upload_folder", upload_folder)
    assert model.push_to_hub("me/mine", {"license": "mit"}) == "https://hub/me/mine"
    text = (tmp_path / "me" / "mine" / "README.md").read_text()
    for line in ('SentenceTransformer("me/mine")', 'load_model("me/mine")', "\n# me/mine\n"):
        assert line in text
    assert ModelCard(text).data.license == "mit"
    assert load_model(tmp_path / "me" / "mine").kind == model.kind
