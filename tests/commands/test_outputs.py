"""What commands write replaces neither folders of other files nor results of other weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.training.checkpoint import locked_run
from tests.helpers import toy
from tests.helpers.in_process import failure, run


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
    return {
        path.relative_to(folder).as_posix(): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def recipe_file(path: Path, text: Path, beir: Path) -> Path:
    path.write_text(
        f"model: {{class_path: TextEncoder, init_args: {{name: {text}}}}}\n"
        f"data: {{class_path: BeirPairs, init_args: {{path: {beir}, split: test}}}}\n"
        "objective: {class_path: SogCLR}\n"
        f"trainer: {{output: {path.parent}/run}}\n"
    )
    return path


WORDS: dict[str, Callable[[Path, Path, Path], list[Any]]] = {
    "report": lambda tmp, text, beir: ["report", run_folder(tmp / "run")],
    "retrieval": lambda tmp, text, beir: ["evaluate", "retrieval", text, beir],
    "mine": lambda tmp, text, beir: ["mine", text, beir, "--split", "test"],
    "embed": lambda tmp, text, beir: ["embed", text, beir],
    "index": lambda tmp, text, beir: ["index", text, beir],
    "quickstart": lambda tmp, text, beir: ["quickstart"],
    "tune": lambda tmp, text, beir: ["tune", recipe_file(tmp / "mine.yaml", text, beir)],
}


@pytest.mark.parametrize("command", WORDS)
def test_a_folder_of_other_files_stays_as_it_was(
    tmp_path: Path,
    toy_text: Path,
    beir: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
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
    """Models of other weights in runs/first/model and runs/second/model, of which the working
    directory is above."""
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
    assert "out: holds an evaluation of other weights than runs/second/model" in failure(
        capsys, *words
    )
    words = ("evaluate", "image-text", two_runs[0], beir, "--out", "out")
    assert "out: already exists and holds no evaluation of image-text" in failure(capsys, *words)
    assert Path("out/metrics.json").read_bytes() == before


REPLACED = {
    "index": '{"format": "dualenc index"}',
    "embeddings": '{"format": "dualenc embeddings"}',
    "pushed embeddings": '{"format": "dualenc engine"}',
    "data of the quickstart": '{"format": "dualenc quickstart"}',
}


def marked(path: Path, content: str) -> Path:
    """A folder with this meta.json."""
    path.mkdir()
    (path / "meta.json").write_text(content)
    return path


INTO: dict[str, Callable[[Path, Path, Path], list[Any]]] = {
    **WORDS,
    "adapt": lambda tmp, text, beir: ["adapt", tmp, beir],
    "push": lambda tmp, text, beir: ["push", tmp, "postgresql://nobody@localhost/none"],
}


@pytest.mark.parametrize("command", INTO)
def test_outputs_do_not_lie_in_folders_that_are_replaced(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The next change of an index removes what is not of it."""
    words = INTO[command](tmp_path, toy_text, beir)
    for number, (what, content) in enumerate(REPLACED.items()):
        around = marked(tmp_path / f"{number}", content)
        before = files_in(around)
        link = tmp_path / f"link{number}"
        link.symlink_to(around)
        for out in (around / "out.jsonl", around / "a" / "b.jsonl", link / "x.jsonl"):
            line = failure(capsys, *words, "--out", out)
            assert f"{out}: lies in the {what} {around}, and would be lost" in line
        assert files_in(around) == before
        assert os.listdir(around) == ["meta.json"]


def test_a_run_has_room_beside_its_own_files(
    tmp_path: Path, toy_text: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_of = marked(tmp_path / "run", '{"format": "dualenc-run"}')
    words = ["embed", toy_text, beir, "--out"]
    for part in ("model", "checkpoints", "model/embeddings"):
        line = failure(capsys, *words, run_of / part)
        assert f"{run_of / part}: lies in {part.split('/')[0]} of the run {run_of}" in line
    run(*words, run_of / "embeddings")


def test_a_training_does_not_write_into_an_index(
    tmp_path: Path, beir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index = marked(tmp_path / "index", REPLACED["index"])
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: {{class_path: TextEncoder, init_args: {{name: {tmp_path}}}}}\n"
        f"data: {{class_path: BeirPairs, init_args: {{path: {beir}, split: test}}}}\n"
        "objective: {class_path: SogCLR}\n"
        f"trainer: {{output: {index}/run}}\n"
    )
    assert f"{index}/run: lies in the index" in failure(capsys, "train", recipe)
    with pytest.raises(DualencError, match="lies in the index"):
        locked_run(index / "run", resume=False, overwrite=False).__enter__()
    with pytest.raises(DualencError, match="lies in the index"):
        Index.build(np.eye(4, dtype=np.float32), ["a", "b", "c", "d"]).save(index / "mine")
    assert os.listdir(index) == ["meta.json"]
