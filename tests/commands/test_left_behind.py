"""Folders and files beside an output: those of somebody else stay, and what a kill has left is
finished or removed."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.cli import main
from dualenc.errors import DualencError
from dualenc.search import Index
from dualenc.search.documents import open_documents
from dualenc.search.migration.stages import Migration
from tests.helpers import toy
from tests.helpers.folder_contents import contents
from tests.helpers.in_process import failure, run
from tests.helpers.index_changes import changes

DOCUMENTS = 200
FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a collection, its embeddings and its index, what to add and to remove."""
    folder = tmp_path_factory.mktemp("left")
    toy.write_beir(folder / "beir", documents=DOCUMENTS, queries=40)
    toy.write_beir(folder / "train", documents=60, queries=20, split="train")
    for seed, name in enumerate(("old", "new")):
        toy.text_model(folder / name, seed)
    run("embed", folder / "old", folder / "beir", "--out", folder / "emb")
    run("index", folder / "emb", "--out", folder / "index", "--factory", "Flat")
    run("index", folder / "index", "--texts")
    rows = [{"_id": f"n{i}", "text": f"wing flutter {i}"} for i in range(5)]
    (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "gone.txt").write_text("d1\nd2\n")
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", 80)
    return Path(shutil.copytree(made / "index", tmp_path / "index"))


def notes(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def own_plan(path: Path) -> None:
    path.mkdir()
    (path / "plan.json").write_text('{"monday": "rest"}')
    (path / "report.json").write_text('{"mine": 1}')


def own_sample(path: Path) -> None:
    (path / "sample").mkdir(parents=True)
    (path / "sample" / "voice.wav").write_bytes(b"mine")


def file(path: Path) -> None:
    path.write_text("mine")


def link(path: Path) -> None:
    notes(path.with_name("elsewhere"))
    path.symlink_to("elsewhere", target_is_directory=True)


@pytest.mark.parametrize("make", [notes, own_plan, own_sample, file, link])
def test_a_strangers_folder_beside_an_index_stays(
    made: Path, index: Path, make: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    work = Path(f"{index}.migration")
    make(work)
    before = contents(index.parent)
    for words in (
        (made / "new",),
        (made / "new", "--report-only"),
        ("--rollback",),
        ("--rollback", "--discard"),
    ):
        line = failure(capsys, "migrate", index, *words)
        assert line == f"{work}: exists and was not written by a migration; move it away"
        assert contents(index.parent) == before
        assert os.path.lexists(work)
    run("migrate", index, made / "old")  # nothing to do, and nothing to clean up
    assert contents(index.parent) == before
    run(*changes(made, index)["remove"])
    assert len(Index.open(index)) == DOCUMENTS - 2


def test_a_strangers_page_beside_an_index_stays(
    made: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(f"{index}.migration.html")
    page.write_text("<h1>my own page</h1>")
    line = failure(capsys, "migrate", index, made / "new", "--report-only")
    assert line == f"{page}: already exists and is not a dualenc report; move it away"
    assert page.read_text() == "<h1>my own page</h1>"
    assert not Path(f"{index}.migration").exists()
    page.unlink()
    for _ in range(2):
        run("migrate", index, made / "new", "--report-only")


def test_strangers_folders_beside_other_outputs_stay(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each derived name: of writers, of refining codes, of embeddings, of mining."""
    built = ("index", made / "old", made / "more.jsonl", "--out", tmp_path / "built")
    mined = ("mine", made / "old", made / "train", "--out", tmp_path / "mined.jsonl")
    cases: dict[str, tuple[Any, str]] = {
        ".built.part": (built, "holds 'notes.txt', which dualenc did not write; move it away"),
        ".built.embeddings": (built, "already exists and is not a folder of embeddings"),
        ".mined.jsonl.mining": (mined, "exists and was not left by mining; move it away"),
        ".mined.jsonl.part": (
            mined,
            "holds 'notes.txt', which dualenc did not write; move it away",
        ),
    }
    for name, (words, message) in cases.items():
        notes(tmp_path / name)
        assert message in failure(capsys, *words), name
        assert contents(tmp_path / name) == {"notes.txt": b"mine"}
        shutil.rmtree(tmp_path / name)
    (tmp_path / ".mined.jsonl.mining").mkdir()
    (tmp_path / ".mined.jsonl.mining" / "settings.json").write_text('{"mine": 1}')
    assert "was not left by mining" in failure(capsys, *mined)
    (tmp_path / ".mined.jsonl.mining" / "settings.json").unlink()
    run(*mined)
    # A user's own embeddings in the place of those of a build.
    shutil.copytree(made / "emb", tmp_path / ".built.embeddings")
    before = contents(tmp_path / ".built.embeddings")
    assert (
        "holds embeddings that were not left by a build of the index; move the folder away"
        in failure(capsys, *built)
    )
    assert contents(tmp_path / ".built.embeddings") == before
    shutil.rmtree(tmp_path / ".built.embeddings")
    run(*built)
    assert {path.name for path in tmp_path.iterdir()} == {
        "built",
        "mined.jsonl",
        "mined.jsonl-embeddings",
    }


def test_a_strangers_folder_in_the_place_of_a_build_stays(made: Path, tmp_path: Path) -> None:
    notes(tmp_path / ".built.building")
    vectors = np.random.default_rng(0).normal(size=(2000, 16)).astype(np.float32)
    options: dict[str, Any] = {"memory": 60_000, "recall_queries": 0, "folder": tmp_path / "built"}
    with pytest.raises(DualencError, match="was not left by the build of an index; move it away"):
        Index.build(vectors, None, "IVF8,SQ8,Refine(SQfp16)", **options)
    assert contents(tmp_path / ".built.building") == {"notes.txt": b"mine"}
    shutil.rmtree(tmp_path / ".built.building")
    Index.build(vectors, None, "IVF8,SQ8,Refine(SQfp16)", **options)
    assert (tmp_path / "built" / "refine.faiss").exists()


@pytest.mark.parametrize("name", ["documents.npy", "documents.json"])
def test_a_strangers_vectors_stay(made: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(DualencError, match=r"holds a documents\.npy that dualenc did not write"):
        open_documents(made / "index", tmp_path)
    assert contents(tmp_path) == {name: b'{"mine": 1}'}
    (tmp_path / name).unlink()
    for source in (made / "index", made / "index"):
        assert len(open_documents(source, tmp_path)) == DOCUMENTS


def test_a_strangers_page_in_an_evaluation_stays(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("evaluate", "retrieval", made / "old", made / "beir", "--out", tmp_path / "out")
    run(*words)
    (tmp_path / "out" / "report.html").write_text("my own page")
    assert "is not a dualenc report; name another --out" in failure(capsys, *words)
    assert (tmp_path / "out" / "report.html").read_text() == "my own page"


def killed_at(place: str, *words: Any) -> None:
    """Run a command in a process that dies where it would first remove the named file or folder."""

    def die(original: Callable[[Path], None], path: Path) -> None:
        if path.name == place and path.exists():
            os._exit(9)
        original(path)

    def start() -> None:
        import dualenc.io.files
        import dualenc.search.migration.migration_folder

        original = dualenc.io.files.remove
        dualenc.io.files.remove = lambda path: die(original, path)
        dualenc.search.migration.migration_folder.remove = dualenc.io.files.remove  # type: ignore[attr-defined]
        run(*words)

    process = FORK.Process(target=start)
    process.start()
    process.join()
    assert process.exitcode == 9


@pytest.mark.slow
@pytest.mark.parametrize("place", [".index.embeddings", "meta.json", "old-index"])
def test_an_append_whose_cleaning_up_was_killed_is_done(
    made: Path, index: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = changes(made, index)["append"]
    if place == "meta.json":
        # Half of the embeddings are gone.
        killed_at(".index.embeddings", *words)
        (index.with_name(".index.embeddings") / "data-00000.arrow").unlink()
    else:
        killed_at(place, *words)
    assert len(Index.open(index)) == DOCUMENTS + 5
    before = contents(index)
    run(*words)
    assert (
        f"these vectors were appended before a process was killed → {index}"
        in capsys.readouterr().out
    )
    assert contents(index) == before
    assert {path.name for path in index.parent.iterdir()} == {"index"}
    assert "already has an item 'n0'" in failure(capsys, *words)


@pytest.mark.slow
def test_an_append_of_embeddings_and_a_removal_that_were_killed_are_done(
    made: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(index / "texts")
    run("embed", made / "old", made / "more.jsonl", "--out", tmp_path / "more")
    for words in (
        ("append", index, tmp_path / "more"),
        changes(made, index)["remove"],
    ):
        killed_at("old-index", *words)
        before = contents(index)
        run(*words)
        assert contents(index) == before
        assert {path.name for path in tmp_path.iterdir()} == {"index", "more"}
        failure(capsys, *words)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["index.migration", "old", "sample"])
def test_a_migration_whose_cleaning_up_was_killed_is_done(
    made: Path, index: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Path(f"{index}.migration")
    killed_at(place, "migrate", index, made / "new", "--anyway")
    assert Index.open(index).provenance.mapped == 0
    assert work.exists()
    run(*changes(made, index)["remove"])  # the migration is over
    assert "no migration is under way; the old index of a finished one" in failure(
        capsys, "migrate", index, "--rollback"
    )
    assert not work.exists()
    run("migrate", index, made / "new")
    assert f"all {DOCUMENTS - 2} vectors are of this model" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("place", ["index.migration", "old", "sample"])
def test_a_rollback_whose_cleaning_up_was_killed_is_done(
    made: Path, index: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(index)
    run("migrate", index, made / "new", "--report-only")
    killed_at(place, "migrate", index, "--rollback")
    run("migrate", index, "--rollback")
    assert (
        "the rest of an ended migration is removed, the index is unchanged"
        in capsys.readouterr().out
    )
    assert contents(index) == before
    assert not Path(f"{index}.migration").exists()
    assert "no migration is under way" in failure(capsys, "migrate", index, "--rollback")


@pytest.mark.slow
def test_debris_without_a_plan_is_cleaned_up(
    made: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As an earlier version left it, which removed the plan first."""
    work = Path(f"{index}.migration")
    for words in (("--rollback",), (made / "new", "--report-only")):
        run("migrate", index, made / "new", "--report-only")
        (work / "plan.json").unlink()
        (work / "order.npy").unlink()
        run("migrate", index, *words)
    assert json.loads((work / "plan.json").read_text())["format"] == "dualenc migration"


@pytest.fixture
def mapped(made: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An index of mapped vectors, whose migration was interrupted when half were embedded."""
    swap = Migration.swap

    def interrupted(self: Migration, old: Any, new: Any, stop: int) -> None:
        if stop > DOCUMENTS // 2:
            raise DualencError("interrupted")
        swap(self, old, new, stop)

    with monkeypatch.context() as context:
        context.setattr(Migration, "swap", interrupted)
        context.setattr(
            "dualenc.evaluation.migration_measures.served_shares", lambda _: [0.0, 0.5, 1.0]
        )
        assert main(["migrate", str(index), str(made / "new")]) == 2
    assert Index.open(index).provenance.mapped == DOCUMENTS // 2
    return index


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["{}", "", '{"format": "dualenc migration"}', None])
def test_a_damaged_plan_blocks_nothing(
    made: Path, mapped: Path, plan: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(f"{mapped}.migration", "plan.json")
    path.unlink() if plan is None else path.write_text(plan)
    line = failure(capsys, "migrate", mapped, made / "new")
    assert "is under way" in line
    assert line.endswith(f"end it: dualenc migrate {mapped} --rollback")
    assert "its model is being changed" in failure(capsys, *changes(made, mapped)["remove"])
    run("migrate", mapped, "--rollback")
    assert "the old index is back" in capsys.readouterr().out
    assert contents(mapped) == contents(made / "index")
    assert "remove them" in failure(capsys, "migrate", mapped, made / "new")
    run("migrate", mapped, "--rollback", "--discard")
    run("migrate", mapped, made / "new", "--report-only")
    path.write_text("{}")  # of a report that has embedded its sample alone
    run("migrate", mapped, made / "new", "--report-only")
    path.write_text("{}")
    run("migrate", mapped, "--rollback")
    assert not path.parent.exists()
