"""Every example runs as it stands, and comes to what it promises."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def main(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The main function of the example that the test is named after."""
    monkeypatch.syspath_prepend(str(EXAMPLES))  # as for a script: its own folder comes first
    name = request.node.name.removeprefix("test_")
    return runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]


@pytest.mark.slow
def test_text(main: Callable[..., Any], tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    result = main(tmp_path)
    assert result.before["ndcg@10"] < 0.4
    assert result.metrics["ndcg@10"] > 0.9
    published = SentenceTransformer(str(result.model_folder), device="cpu")
    query, couch, lamp = published.encode(
        ["crimson timber sofa", "couch of wood in red", "lamp of glass in blue"]
    )
    assert query @ couch > query @ lamp


@pytest.mark.slow
def test_vectors(main: Callable[..., Any], tmp_path: Path) -> None:
    result = main(tmp_path)
    assert result.before["ndcg@10"] < 0.4
    assert result.metrics["ndcg@10"] > 0.8


@pytest.mark.nightly
def test_image_text(main: Callable[..., Any], tmp_path: Path) -> None:
    result = main(tmp_path)
    assert result.before["mean_recall"] < 0.1
    assert result.metrics["mean_recall"] > 0.6


@pytest.mark.nightly
def test_unimodal(main: Callable[..., Any], tmp_path: Path) -> None:
    result = main(tmp_path)
    assert result.metrics["knn_accuracy"] > result.before["knn_accuracy"] + 0.1


@pytest.mark.slow
def test_own_loop(main: Callable[..., Any]) -> None:
    before, after = main()
    assert after < before - 5


@pytest.mark.slow
def test_lora(main: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("peft", reason='LoRA needs pip install ".[lora]"')
    result = main(tmp_path)
    assert result.metrics["ndcg@10"] > result.before["ndcg@10"] + 0.5


@pytest.mark.slow
def test_index_and_search(main: Callable[..., Any], tmp_path: Path) -> None:
    assert main(tmp_path) == ["lamp-of-glass-in-blue", "couch-of-wood-in-black"]


@pytest.mark.slow
def test_open_clip_loop(main: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("open_clip_train")
    assert main(tmp_path)["image_to_text_R@5"] > 0.3  # chance is 0.06


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_lightly_loop(main: Callable[..., Any], tmp_path: Path) -> None:
    module = main(tmp_path)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert torch.equal(state["criterion.log_u"], module.criterion.log_u)
    assert state["criterion.log_u"].isfinite().any()


@pytest.mark.parametrize("library", ["open-clip", "lightly"])
def test_pages_show_the_examples(library: str) -> None:
    page = (EXAMPLES.parent / "docs" / f"from-{library}.md").read_text()
    shown = page.split("```python\n")[1].split("\n```")[0].split("\n\n\n")[0]
    assert shown in (EXAMPLES / f"{library.replace('-', '_')}_loop.py").read_text()
