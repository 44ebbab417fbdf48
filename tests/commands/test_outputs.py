"""What commands write replaces neither folders of other files nor results of other weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dualenc.training.checkpoint import locked_run, mark_run
from tests.commands import toy
from tests.commands.in_process import failure, run


@pytest.fixture(scope="module")
def beir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_beir(tmp_path_factory.mktemp("data") / "toy")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of somebody's work."""
    folder = tmp_path / "thesis"
    (folder / "queries").mkdir(parents=True)
    (folder / "queries" / "meta.json").write_text('{"format": "something else"}')
    (folder / "chapter.txt").write_text("years of work")
    return folder


def run_folder(path: Path) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    return path


def as_it_was(folder: Path) -> None:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    assert files == ["chapter.txt", "queries/meta.json"]
    assert (folder / "chapter.txt").read_text() == "years of work"


WORDS: dict[str, Callable[[Path, Path, Path], list[Any]]] = {
    "report": lambda tmp, text, beir: ["report", run_folder(tmp / "run")],
    "retrieval": lambda tmp, text, beir: ["evaluate", "retrieval", text, beir],
    "objectives": lambda tmp, text, beir: ["evaluate", "objectives", text, beir, "--split", "test", "--batch-size", 4],
    "probe": lambda tmp, text, beir: ["evaluate", "probe", text, beir],
    "compare": lambda tmp, text, beir: ["evaluate", "compare", tmp / "a", tmp / "b"],
    "mine": lambda tmp, text, beir: ["mine", text, beir, "--split", "test"],
    "embed": lambda tmp, text, beir: ["embed", text, beir],
    "index": lambda tmp, text, beir: ["index", text, beir],
    "quickstart": lambda tmp, text, beir: ["quickstart"],
}


@pytest.mark.parametrize("command", WORDS)
def test_a_folder_of_other_files_stays_as_it_was(
    tmp_path: Path, toy_text: Path, beir: Path, folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    line = failure(capsys, *WORDS[command](tmp_path, toy_text, beir), "--out", folder)
    assert str(folder) in line
    as_it_was(folder)


@pytest.mark.parametrize("option", ["--embeddings", "--plot"])
def test_mining_writes_into_no_folder_of_other_files(
    tmp_path: Path, toy_text: Path, beir: Path, folder: Path, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    words = ("mine", toy_text, beir, "--split", "test", "--out", tmp_path / "mined.jsonl")
    target = folder if option == "--embeddings" else folder.rename(tmp_path / "thesis.svg")
    failure(capsys, *words, option, target)
    as_it_was(target)
    assert not (tmp_path / "mined.jsonl").exists()


@pytest.mark.parametrize("name", ["model", "checkpoints", "recipe.yaml"])
def test_a_training_replaces_what_trainings_have_written_only(folder: Path, name: str) -> None:
    mark_run(folder)
    (folder / name).mkdir()
    (folder / name / "notes.txt").write_text("years of work")
    with (
        pytest.raises(ValueError, match=f"{name}: was not written by a training"),
        locked_run(folder, resume=False, overwrite=True),
    ):
        pass
    assert (folder / name / "notes.txt").is_file()
    assert not (folder / ".lock").exists()


@pytest.mark.parametrize("command", WORDS)
def test_an_output_without_a_name_is_no_current_folder(
    tmp_path: Path,
    toy_text: Path,
    beir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    words = WORDS[command](tmp_path, toy_text, beir)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert "--out is empty; name a file or folder" in failure(capsys, *words, "--out", "")
    assert os.listdir() == []


def test_embed_refuses_a_folder_of_other_files_before_it_opens_model_and_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{folder}: exists and holds no embeddings" in failure(capsys, "embed", "/nope", "/nope", "--out", folder)
    assert "not a folder of embeddings" in failure(capsys, "embed", "/nope", "/nope", "--out", folder / "queries")


def test_the_current_folder_takes_an_index(
    tmp_path: Path, toy_text: Path, beir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    run("index", toy_text, beir, "--out", ".")
    assert (tmp_path / "empty" / "index.faiss").is_file()


def test_mining_into_the_current_folder_is_told(toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a folder" in failure(capsys, "mine", toy_text, beir, "--split", "test", "--out", ".")


FOREIGN: dict[str, tuple[str, str]] = {
    "report": ("report.html", "<html>mine</html>"),
    "retrieval": ("bm25/run.trec", "q1 Q0 d1 1 0.5 mine"),
    "compare": ("comparison.json", '{"mine": true}'),
}


@pytest.mark.parametrize("command", FOREIGN)
def test_files_of_the_names_of_results_stay(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    name, content = FOREIGN[command]
    path = tmp_path / "mine" / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    out = path if command == "report" else tmp_path / "mine"
    assert "exists and " in failure(capsys, *WORDS[command](tmp_path, toy_text, beir), "--out", out)
    assert path.read_text() == content
    assert [file for file in (tmp_path / "mine").rglob("*") if file.is_file()] == [path]


@pytest.mark.parametrize("command", ["report", "retrieval", "mine", "embed", "index", "quickstart"])
def test_a_nul_in_a_path_is_told(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    line = failure(capsys, *WORDS[command](tmp_path, toy_text, beir), "--out", f"{tmp_path}/a\0b")
    assert "--out" in line
    assert "NUL" in line


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models of other weights in runs/first/model and runs/second/model, of which the working directory is above."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("first", "second")):
        toy.text_model(tmp_path / "runs" / name / "model", seed=seed)
    return ["runs/first/model", "runs/second/model"]


@pytest.mark.slow
def test_evaluations_are_named_by_run(two_runs: list[str], beir: Path) -> None:
    for model in two_runs:
        run("evaluate", "retrieval", model, beir)
    folders = sorted(Path("evaluations/retrieval").iterdir())
    assert [folder.name.rpartition("-")[0] for folder in folders] == ["first-toy", "second-toy"]
    for folder, name in zip(folders, ("first", "second")):
        assert list(json.loads((folder / "metrics.json").read_text())["systems"]) == [name]


@pytest.mark.slow
def test_data_sets_of_one_name_have_folders_of_their_own(two_runs: list[str], beir: Path) -> None:
    shutil.copytree(beir, Path("copy") / beir.name)
    for data in (beir, Path("copy") / beir.name, f"copy/../copy/{beir.name}"):
        run("evaluate", "retrieval", two_runs[0], data)
    assert len(os.listdir("evaluations/retrieval")) == 2


@pytest.mark.slow
def test_other_weights_do_not_overwrite_an_evaluation(
    two_runs: list[str], beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("evaluate", "retrieval", two_runs[0], beir, "--out", "out")
    run("evaluate", "retrieval", two_runs[0], beir, "--out", "out", "--bm25")
    before = Path("out/metrics.json").read_bytes()
    words = ("evaluate", "retrieval", two_runs[1], beir, "--out", "out")
    told = "out: holds an evaluation of other weights than runs/second/model has now; choose another --out, or remove"
    assert told in failure(capsys, *words)
    assert Path("out/metrics.json").read_bytes() == before


@pytest.mark.slow
def test_an_evaluation_of_another_task_is_left_alone(
    two_runs: list[str], beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("evaluate", "retrieval", two_runs[0], beir, "--out", "out")
    words = ("evaluate", "objectives", two_runs[0], beir, "--split", "test", "--batch-size", 4, "--out", "out")
    assert "out: exists and holds no evaluation of objectives" in failure(capsys, *words)
