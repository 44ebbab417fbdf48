"""What commands write replaces neither folders of other files nor results of other weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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


def files_in(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


WORDS: dict[str, Callable[[Path, Path, Path], list[Any]]] = {
    "report": lambda tmp, text, beir: ["report", run_folder(tmp / "run")],
    "retrieval": lambda tmp, text, beir: ["evaluate", "retrieval", text, beir],
    "mine": lambda tmp, text, beir: ["mine", text, beir, "--split", "test"],
    "embed": lambda tmp, text, beir: ["embed", text, beir],
    "index": lambda tmp, text, beir: ["index", text, beir],
    "quickstart": lambda tmp, text, beir: ["quickstart"],
}


@pytest.mark.parametrize("command", WORDS)
def test_a_folder_of_other_files_stays_as_it_was(
    tmp_path: Path, toy_text: Path, beir: Path, folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    before = files_in(folder)
    line = failure(capsys, *WORDS[command](tmp_path, toy_text, beir), "--out", folder)
    assert str(folder) in line
    assert files_in(folder) == before


FOREIGN = {"report": "report.html", "retrieval": "bm25/run.trec"}


@pytest.mark.parametrize("command", FOREIGN)
def test_files_of_the_names_of_results_stay(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    path = tmp_path / "mine" / FOREIGN[command]
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    out = path if command == "report" else tmp_path / "mine"
    assert "exists and " in failure(capsys, *WORDS[command](tmp_path, toy_text, beir), "--out", out)
    assert files_in(tmp_path / "mine") == {FOREIGN[command]: "{}"}


@pytest.fixture
def two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models of other weights in runs/first/model and runs/second/model, of which the working directory is above."""
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("first", "second")):
        toy.text_model(tmp_path / "runs" / name / "model", seed=seed)
    return ["runs/first/model", "runs/second/model"]


@pytest.mark.slow
def test_evaluations_are_named_by_run_and_data(two_runs: list[str], beir: Path) -> None:
    shutil.copytree(beir, Path("copy") / beir.name)
    cases = [(two_runs[1], beir), (two_runs[0], beir), (two_runs[0], Path("copy") / beir.name)]
    for model, data in [*cases, (two_runs[0], f"copy/../copy/{beir.name}")]:
        run("evaluate", "retrieval", model, data)
    names = [name.rpartition("-")[0] for name in sorted(os.listdir("evaluations/retrieval"))]
    assert names == ["first-toy", "first-toy", "second-toy"]


@pytest.mark.slow
def test_other_weights_or_another_task_do_not_overwrite_an_evaluation(
    two_runs: list[str], beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("evaluate", "retrieval", two_runs[0], beir, "--out", "out")
    run("evaluate", "retrieval", two_runs[0], beir, "--out", "out", "--bm25")
    before = Path("out/metrics.json").read_bytes()
    words = ("evaluate", "retrieval", two_runs[1], beir, "--out", "out")
    assert "out: holds an evaluation of other weights than runs/second/model" in failure(capsys, *words)
    words = ("evaluate", "image-text", two_runs[0], beir, "--out", "out")
    assert "out: exists and holds no evaluation of image-text" in failure(capsys, *words)
    assert Path("out/metrics.json").read_bytes() == before
