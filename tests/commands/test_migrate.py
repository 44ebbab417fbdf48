"""`dualenc migrate` as a user types it, killed at any moment, against an index that is built with the new model."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.files import locked
from dualenc.search import Index
from dualenc.search.migrate import SHARES, Migration
from tests.commands import toy
from tests.commands.in_process import evaluated, failure, found, run

DOCUMENTS = 300
KILLS = 20


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a collection, and the index of either model."""
    folder = tmp_path_factory.mktemp("migrate")
    toy.text_model(folder / "old")
    toy.text_model(folder / "new", seed=1)
    toy.write_beir(folder / "beir", documents=DOCUMENTS, queries=40)
    for name in ("old", "new"):
        words = ("--factory", "Flat", "--texts", "--bm25")
        run("index", folder / name, folder / "beir", "--out", folder / f"{name}-index", *words)
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path) -> Path:
    """A copy of the old model's index."""
    return Path(shutil.copytree(made / "old-index", tmp_path / "index"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def vectors(folder: Path) -> np.ndarray:
    return Index.open(folder).faiss.reconstruct_n(0, DOCUMENTS)


def small_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 120 documents and the judged ones, so that others are left to embed."""
    monkeypatch.setattr("dualenc.search.migrate.MIN_SAMPLE", 120)


def test_report_comes_first_and_holds_the_numbers_of_evaluate(
    made: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(index)
    run("migrate", index, made / "new", "--report-only")
    printed = capsys.readouterr().out
    assert contents(index) == before
    report = json.loads((tmp_path / "index.migration" / "report.json").read_text())
    assert (report["sample"], report["queries"], report["judged"]) == (DOCUMENTS, 40, True)
    by_system = {row["system"]: row for row in report["systems"]}
    for model, system in (("old", "old model, old vectors"), ("new", "new model, new vectors")):
        metrics = evaluated("retrieval", tmp_path / model, made / model, made / "beir")["systems"][model]["mean"]
        for name in ("ndcg@10", "recall@10"):
            # The old vectors are in half precision, and those of this model are very near one another.
            tolerance = 1e-6 if model == "new" else 2e-3
            assert by_system[system][name][0] == pytest.approx(metrics[name], abs=tolerance)
            assert f"{by_system[system][name][0]:.3f} [" in printed
    page = (tmp_path / "index.migration.html").read_text()
    assert "new model, mapped vectors" in page
    assert "seconds of the others, estimated" in page


@pytest.mark.slow
def test_migrated_index_is_that_of_the_new_model(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_sample(monkeypatch)
    monkeypatch.setattr("dualenc.commands.migrate_index.served_shares", lambda _: list(SHARES))
    served = []
    swap = Migration.swap

    def watch(self: Migration, *arguments: Any) -> None:
        swap(self, *arguments)
        served.append((Index.open(index).meta["mapped"], vectors(index)))

    monkeypatch.setattr(Migration, "swap", watch)
    run("migrate", index, made / "new", "--batch-size", 16)
    expected = vectors(made / "new-index")
    assert [mapped for mapped, _ in served] == [300, 285, 240, 150, 0]
    is_new = [(np.abs(own - expected).max(axis=1) < 1e-5).sum() for _, own in served]
    assert is_new == [0, 15, 60, 150, 300]
    meta, of_new = Index.open(index).meta, Index.open(made / "new-index").meta
    assert meta["model"] == str(made / "new")
    same = ("model_checksum", "side", "kind", "data", "count", "dim", "metric", "factory", "recall_at_10")
    assert {name: meta[name] for name in same} == {name: of_new[name] for name in same}
    assert {path.name for path in index.parent.iterdir()} == {"index", "index.migration.html"}
    for words in ((), ("--hybrid", "rrf")):
        results = [found(capsys, folder, "wing flow", *words) for folder in (index, made / "new-index")]
        assert [hit["id"] for hit in results[0]] == [hit["id"] for hit in results[1]]
    run("migrate", index, made / "new")
    assert "all 300 vectors are of this model" in capsys.readouterr().out


@pytest.mark.slow
def test_without_judgements_neighbours_are_the_truth(
    made: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_sample(monkeypatch)
    (tmp_path / "past.jsonl").write_text("".join(json.dumps({"query": text}) + "\n" for text in toy.WORDS))
    moved = json.loads((index / "meta.json").read_text()) | {"data": "gone", "model": str(tmp_path / "gone")}
    (index / "meta.json").write_text(json.dumps(moved))
    run("migrate", index, made / "new", "--queries", tmp_path / "past.jsonl", "--report-only")
    assert "documents take the place of queries" in capsys.readouterr().out
    report = json.loads((tmp_path / "index.migration" / "report.json").read_text())
    assert (report["sample"], report["queries"], report["judged"]) == (120, 24, False)
    by_system = {row["system"]: row for row in report["systems"]}
    assert by_system["new model, new vectors"]["recall@10"] == [1, 1, 1]
    assert 0.1 < by_system["new model, mapped vectors"]["recall@10"][0] < 1


@pytest.mark.slow
def test_index_stays_the_old_one_while_mapped_vectors_find_less(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_sample(monkeypatch)
    monkeypatch.setattr("dualenc.commands.migrate_index.served_shares", lambda _: [0.5, 1.0])
    swap = Migration.swap

    def check(self: Migration, old: Any, new: Any, stop: int) -> None:
        if stop == 150:
            assert (vectors(index) == vectors(made / "old-index")).all()
        swap(self, old, new, stop)

    monkeypatch.setattr(Migration, "swap", check)
    run("migrate", index, made / "new")
    printed = capsys.readouterr().out
    assert "the index stays the old one until 50% of it are embedded anew" in printed
    assert [line.split()[0] for line in printed.splitlines() if "are of the new model" in line] == ["150", "300"]


@pytest.mark.parametrize("kind", ["engine", "vectors", "another model", "few", "lost", "twice", "model", "texts"])
def test_refusals_in_one_line(
    made: Path, index: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    meta = json.loads((index / "meta.json").read_text())
    words: list[Any] = ["migrate", index, made / "new"]
    expected = {
        "engine": "an engine does not migrate; migrate the embeddings and push again",
        "vectors": "holds vector, vector, right, embedding; only documents of a query-document model migrate",
        "another model": "a migration with another model is under way",
        "few": "are too few to learn maps from; build the index again with the new model",
        "lost": "7 of its vectors are mapped, and",
        "twice": "another dualenc process is writing",
        "model": "needs a model; name it",
        "texts": "keeps no texts, and its data gone is gone; name its documents by --data",
    }
    if kind == "engine":
        (index / "meta.json").write_text(json.dumps({"format": "dualenc engine", "version": 3}))
    elif kind == "vectors":
        (index / "meta.json").write_text(json.dumps(meta | {"kind": "vector", "modality": "vector"}))
    elif kind == "another model":
        run(*words, "--report-only")
        words[2] = toy.text_model(tmp_path / "third", seed=2)
    elif kind == "few":
        (tmp_path / "gone.txt").write_text("\n".join(f"d{row}" for row in range(201)))
        run("index", index, "--remove", tmp_path / "gone.txt")
    elif kind == "lost":
        (index / "meta.json").write_text(json.dumps(meta | {"mapped": 7}))
    elif kind == "model":
        words.pop()
    elif kind == "texts":
        shutil.rmtree(index / "texts")
        (index / "meta.json").write_text(json.dumps(meta | {"data": "gone"}))
    if kind == "twice":
        process = multiprocessing.get_context("fork").Process(target=hold, args=(index, tmp_path / "held"))
        process.start()
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
    line = failure(capsys, *words)
    if kind == "twice":
        process.kill()
        process.join()
    assert expected[kind] in line


def hold(index: Path, sign: Path) -> None:
    """Hold the lock of a migration until killed."""
    with locked(f"{index}.migration"):
        sign.touch()
        time.sleep(600)


def migrate(index: Path, model: Path) -> None:
    run("migrate", index, model)


@pytest.mark.nightly
@pytest.mark.parametrize("factory", ["Flat", "IVF8,PQ8x4"])
def test_killed_at_twenty_moments_it_answers_and_goes_on(
    made: Path, tmp_path: Path, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_sample(monkeypatch)
    monkeypatch.setattr("dualenc.commands.migrate_index.served_shares", lambda _: list(SHARES))
    saved = tmp_path / "saved"
    run("index", made / "old", made / "beir", "--out", saved, "--factory", factory, "--texts")
    folder = tmp_path / "index"
    # The first run imports what the second one need not.
    for _ in range(2):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(saved, folder)
        started = time.monotonic()
        migrate(folder, made / "new")
        seconds = time.monotonic() - started
    expected = contents(folder)["index.faiss"]
    states = []
    for number in range(KILLS):
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        process = multiprocessing.get_context("fork").Process(target=migrate, args=(folder, made / "new"))
        process.start()
        time.sleep(seconds * (number + 0.5) / KILLS)
        process.kill()
        process.join()
        index = Index.open(folder, verify=True)
        options = {} if factory == "Flat" else {"nprobe": 8}
        rows = index.search_rows(np.ones((1, index.dim), np.float32), DOCUMENTS, **options)[1]
        assert sorted(rows[0].tolist()) == list(range(DOCUMENTS))
        assert sorted(index.ids) == sorted(f"d{row}" for row in range(DOCUMENTS))
        states.append(index.meta.get("mapped"))
        is_under_way = (tmp_path / "index.migration" / "plan.json").exists()
        if number % 4 == 3 and is_under_way:
            run("migrate", folder, "--rollback")
            assert contents(folder) == contents(saved)
        migrate(folder, made / "new")
        assert contents(folder)["index.faiss"] == expected
        assert not (tmp_path / "index.migration").exists()
    assert len(set(states)) > 3, states
