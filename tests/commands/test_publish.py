"""`dualenc push-model` and `push-data`: what the hub's client is asked for."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import numpy as np
import pytest

from dualenc.cli import main
from dualenc.data.corpus import Corpus
from dualenc.encoders import VectorEncoder
from dualenc.reading import read_json
from dualenc.search.embed import embed
from tests.commands.toy import write_beir, write_captioned, write_classes


class Hub:
    """Stands for the hub's client: keeps what it is asked for, by the signatures of the real one."""

    asked: list[tuple[str, dict[str, Any]]]

    def __init__(self) -> None:
        Hub.asked = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            import inspect

            bound = inspect.signature(getattr(huggingface_hub.hf_api.HfApi, name)).bind(None, *args, **kwargs)
            Hub.asked.append((name, {key: value for key, value in bound.arguments.items() if key != "self"}))
            return SimpleNamespace(commit_url="https://hub/commit/1")

        return call


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> type[Hub]:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return Hub


def test_a_model_is_private_unless_told(tmp_path: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    VectorEncoder(8, tower="linear", dim=4).save(folder)
    assert main(["push-model", str(folder), "me/mine"]) == 0
    (created, repo), (uploaded, files) = hub.asked
    assert (created, uploaded) == ("create_repo", "upload_folder")
    assert (repo["repo_id"], repo["private"], repo["exist_ok"]) == ("me/mine", True, True)
    assert (files["repo_id"], files["folder_path"], files["repo_type"]) == ("me/mine", folder, "model")
    assert "https://hub/commit/1" in capsys.readouterr().out
    assert main(["push-model", str(folder), "me/mine", "--public", "--revision", "next"]) == 0
    assert [name for name, _ in hub.asked] == ["create_repo", "create_branch", "upload_folder"]
    assert hub.asked[0][1]["private"] is False
    assert hub.asked[2][1]["revision"] == "next"


def test_the_card_names_the_repository_and_the_license(
    tmp_path: Path, hub: type[Hub], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    VectorEncoder(8, tower="linear", dim=4).save(folder)
    before = (folder / "README.md").read_text()
    assert main(["push-model", str(folder), "me/mine", "--license", "apache-2.0"]) == 0
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    assert card.data.license == "apache-2.0"
    assert card.text.lstrip().startswith("# me/mine\n")
    assert 'load_model("me/mine")' in card.text
    assert '"model"' not in card.text
    # Without a repository, the card stays as it was.
    (folder / "README.md").write_text(before)
    monkeypatch.undo()
    assert main(["push-model", str(folder), "me/mine", "--license", "mit"]) == 2
    assert "could not be uploaded" in capsys.readouterr().err
    assert (folder / "README.md").read_text() == before


def test_embeddings_become_a_data_set(tmp_path: Path, hub: type[Hub]) -> None:
    tower = VectorEncoder(8, tower="linear", dim=4).left
    embed(tower, Corpus(["a", "b"], np.eye(8, dtype=np.float32)[:2], "vector"), tmp_path / "emb", progress=False)
    assert main(["push-data", str(tmp_path / "emb"), "me/vectors"]) == 0
    assert {asked["repo_type"] for _, asked in hub.asked} == {"dataset"}


@pytest.mark.slow
def test_results_of_evaluations_go_into_the_card(
    toy_text: Path, toy_clip: Path, tmp_path: Path, hub: type[Hub], capsys: pytest.CaptureFixture[str]
) -> None:
    texts, clip = shutil.copytree(toy_text, tmp_path / "texts"), shutil.copytree(toy_clip, tmp_path / "clip")
    data = [write_beir(tmp_path / "one"), write_beir(tmp_path / "two", seed=1)]
    assert main(["evaluate", "retrieval", str(texts), *map(str, data), "--bm25", "--out", str(tmp_path / "r")]) == 0
    measured = read_json(tmp_path / "r" / "metrics.json")["systems"]["texts"]["datasets"]
    assert main(["push-model", str(texts), "me/mine", "--results", str(tmp_path / "r")]) == 0
    assert [name for name, _ in hub.asked] == ["create_repo", "upload_folder"]
    found = {(r.dataset_name, r.metric_type): r.metric_value for r in results_of(texts)}
    assert len(found) == 10
    for name, own in measured.items():
        assert found[name, "ndcg_at_10"] == round(own["metrics"]["ndcg@10"], 5)

    captioned = write_captioned(tmp_path / "captioned")
    assert main(["evaluate", "image-text", str(clip), str(captioned), "--out", str(tmp_path / "it")]) == 0
    classes = write_classes(tmp_path / "classes")
    assert main(["evaluate", "zero-shot", str(clip), str(classes), "--out", str(tmp_path / "zs")]) == 0
    words = ["push-model", str(clip), "me/clip", "--results", str(tmp_path / "it"), "--results", str(tmp_path / "zs")]
    assert main(words) == 0
    kinds = {(r.task_type, r.dataset_name, r.dataset_split) for r in results_of(clip)}
    assert kinds == {
        ("image-text-retrieval", "captioned", "test"),
        ("zero-shot-image-classification", "classes", "test"),
    }
    before = (clip / "README.md").read_text()
    for results, message in [("r", "is not about the weights"), ("one", "has no metrics.json")]:
        assert main(["push-model", str(clip), "me/clip", "--results", str(tmp_path / results)]) == 2
        assert message in capsys.readouterr().err
    assert (clip / "README.md").read_text() == before


def results_of(folder: Path) -> list[huggingface_hub.EvalResult]:
    found: list[huggingface_hub.EvalResult] = huggingface_hub.ModelCard.load(folder / "README.md").data.eval_results
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["push-model", "{tmp}", "me/mine"], "holds no model"),
        (["push-data", "{tmp}", "me/mine"], "{tmp}"),
        (["push-model", "{tmp}/model", "mine"], "give owner/name"),
        (["push-model", "{tmp}/model", "me/mine"], "could not be uploaded"),  # the tests are offline
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    VectorEncoder(8, tower="linear", dim=4).save(tmp_path / "model")
    assert main([argument.format(tmp=tmp_path) for argument in arguments]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert message.format(tmp=tmp_path) in errors[0]
