"""`dualenc migrate` as a user types it, killed at any moment, against an index that is built with
the new model."""

from __future__ import annotations

import json
import multiprocessing
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.encoders import load_model
from dualenc.io.files import locked
from dualenc.search import Index
from dualenc.search.migration.migration_folder import read_plan
from dualenc.search.migration.stages import SHARES, Migration
from tests.helpers import toy
from tests.helpers.folder_contents import contents
from tests.helpers.in_process import evaluated, failure, found, run

DOCUMENTS, KILLS = 300, 20
FORK = multiprocessing.get_context("fork")
SERVED = "dualenc.evaluation.migration_measures.served_shares"
MEANWHILE = "dualenc.evaluation.migration_measures.best_meanwhile"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a collection, and the index of either model."""
    folder = tmp_path_factory.mktemp("migrate")
    toy.write_beir(folder / "beir", documents=DOCUMENTS, queries=40)
    for seed, name in enumerate(("old", "new")):
        model = toy.text_model(folder / name, seed)
        words = ("--factory", "Flat", "--texts", "--bm25")
        run("index", model, folder / "beir", "--out", folder / f"{name}-index", *words)
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old model's index; samples are of 120 documents and the judged ones, so that
    others are left."""
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", 120)
    return Path(shutil.copytree(made / "old-index", tmp_path / "index"))


def vectors(folder: Path) -> np.ndarray:
    return Index.open(folder).faiss.reconstruct_n(0, DOCUMENTS)


def change_meta(index: Path, **entries: Any) -> None:
    (index / "meta.json").write_text(
        json.dumps(json.loads((index / "meta.json").read_text()) | entries)
    )


def report_of(index: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The facts of the report, and its systems by name."""
    report = json.loads((Path(f"{index}.migration") / "report.json").read_text())
    return report["facts"], {row["system"]: row for row in report["systems"]}


def test_report_comes_first_and_holds_the_numbers_of_evaluate(
    made: Path,
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", DOCUMENTS)
    before = contents(index)
    run("migrate", index, made / "new", "--report-only")
    printed = capsys.readouterr().out
    assert contents(index) == before
    facts, systems = report_of(index)
    assert (facts["sample"], facts["queries"], facts["relevant are"]) == (
        DOCUMENTS,
        40,
        "judged documents",
    )
    # The old vectors are in half precision, and those of this model are very near one another.
    for model, tolerance in (("old", 2e-3), ("new", 1e-6)):
        metrics = evaluated("retrieval", tmp_path / model, made / model, made / "beir")["systems"][
            model
        ]["mean"]
        row = systems[f"{model} model, {model} vectors"]
        for name in ("ndcg@10", "recall@10"):
            assert row[name][0] == pytest.approx(metrics[name], abs=tolerance)
            assert f" {row[name][0]:.3f} " in printed
    page = Path(f"{index}.migration.html").read_text()
    assert "new model, mapped vectors" in page
    assert "seconds for the others, estimated" in page


@pytest.mark.slow
@pytest.mark.parametrize("served", [list(SHARES), [0.5, 1.0]], ids=["all", "half"])
def test_migrated_index_is_that_of_the_new_model(
    made: Path,
    index: Path,
    served: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(SERVED, lambda _: served)
    expected, seen = vectors(made / "new-index"), []
    swap = Migration.swap

    def watch(self: Migration, *arguments: Any) -> None:
        assert seen or (vectors(index) == vectors(made / "old-index")).all()
        swap(self, *arguments)
        is_new = np.abs(vectors(index) - expected).max(axis=1) < 1e-5
        seen.append((Index.open(index).provenance.mapped, is_new.sum()))

    monkeypatch.setattr(Migration, "swap", watch)
    run("migrate", index, made / "new", "--batch-size", 16)
    assert ("the old index stays until 50% of it is re-embedded" in capsys.readouterr().out) == (
        served[0] > 0
    )
    assert seen == [(DOCUMENTS - share * DOCUMENTS, share * DOCUMENTS) for share in served]
    ours, theirs = (Index.open(folder).provenance for folder in (index, made / "new-index"))
    same = (
        "model",
        "model_checksum",
        "side",
        "kind",
        "data",
        "count",
        "metric",
        "factory",
        "recall_at_10",
    )
    assert ours.only(same) == theirs.only(same)
    assert {path.name for path in index.parent.iterdir()} == {"index", "index.migration.html"}
    for words in ((), ("--hybrid", "rrf")):
        results = [
            found(capsys, folder, "wing flow", *words) for folder in (index, made / "new-index")
        ]
        assert [hit["id"] for hit in results[0]] == [hit["id"] for hit in results[1]]
    run("migrate", index, made / "new")
    assert "all 300 vectors are of this model" in capsys.readouterr().out


@pytest.mark.slow
def test_a_model_that_finds_less_is_not_taken(
    made: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model to which all words are one ends with the report, and the index as it was; --anyway
    goes on."""
    blind = load_model(made / "new")
    for name, weight in blind.named_parameters():
        if "word_embeddings" in name:
            weight.data.zero_()
    blind.save(tmp_path / "blind")
    before = contents(index)
    words = ["migrate", index, tmp_path / "blind"]
    assert "significantly less" in failure(capsys, *words)
    assert contents(index) == before
    run("migrate", index, made / "new", "--report-only")  # another model in its place
    assert report_of(index)[0]["new model"] == str(made / "new")
    run("migrate", index, "--rollback")
    assert (
        "nothing had been replaced, the index is unchanged; removed: the measurements and"
        in capsys.readouterr().out
    )
    run(*words, "--anyway")
    assert Index.open(index).provenance.model == str(tmp_path / "blind")


SHAPES: dict[str, Any] = {
    "empty": lambda report: {},
    "a list": lambda report: [],
    "no systems": lambda report: report | {"systems": []},
    "texts for systems": lambda report: report | {"systems": ["old"]},
    "other systems": lambda report: report | {"systems": report["systems"][:2]},
    "a number for an interval": lambda report: (
        report | {"systems": [row | {"recall@10": 0.5} for row in report["systems"]]}
    ),
    "no columns": lambda report: report | {"systems": [{"system": "x"} for _ in report["systems"]]},
    "served by nobody": lambda report: report | {"meanwhile": "x"},
    "nothing served": lambda report: report | {"served": []},
    "served lists": lambda report: report | {"served": [[1]]},
    "nested facts": lambda report: report | {"facts": {"a": {}}},
}


def test_a_report_of_another_shape_is_one_line(
    made: Path,
    index: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["migrate", index, made / "new"]
    run(*words, "--report-only")
    path = Path(f"{index}.migration") / "report.json"
    report = json.loads(path.read_text())
    for name, shape in SHAPES.items():
        path.write_text(json.dumps(shape(report)))
        line = failure(capsys, *words)
        assert str(path) in line, name
        assert "the same command measures again" in line or "instead of an object" in line, name
    path.unlink()
    run(*words, "--report-only")
    path.write_text(json.dumps(report))
    run(*words)


@pytest.mark.slow
def test_without_judgements_neighbours_are_the_truth(
    made: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "past.jsonl").write_text(
        "".join(json.dumps({"query": text}) + "\n" for text in toy.WORDS)
    )
    change_meta(index, data="gone", model=str(tmp_path / "gone"))
    run("migrate", index, made / "new", "--queries", tmp_path / "past.jsonl", "--report-only")
    assert "queries of the new model, mapped, find documents" in capsys.readouterr().out
    facts, systems = report_of(index)
    assert (facts["sample"], facts["queries"], facts["queries that decide the order"]) == (
        120,
        24,
        len(toy.WORDS),
    )
    assert systems["new model, new vectors"]["recall@10"] == [1, 1, 1]
    assert 0.1 < systems["new model, mapped vectors"]["recall@10"][0] < 1


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--anyway",)])
def test_without_judgements_mapped_vectors_are_not_served_unasked(
    made: Path,
    index: Path,
    words: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the new model's neighbours the new model is best, whatever it finds."""
    # All documents are candidates here, which would be served instead.
    monkeypatch.setattr(MEANWHILE, lambda _: "index")
    run("migrate", index, made / "new", "--data", made / "beir", "--report-only")
    change_meta(index, data="gone")
    line = failure(capsys, "migrate", index, made / "new", *words)
    assert "a migration with other queries is under way; resume it with them, or end it" in line
    run("migrate", index, "--rollback")
    capsys.readouterr()
    run("migrate", index, made / "new", *words)
    printed = capsys.readouterr().out
    served = [line for line in printed.splitlines() if "vectors are of the new model" in line]
    assert len(served) == (len(SHARES) if words else 1)
    assert ("without judgements mapped vectors cannot be compared" in printed) == (not words)
    assert Index.open(index).provenance.mapped == 0


REFUSALS = {
    "engine": "lacks 'target'; run `dualenc push` again",
    "vectors": (
        "holds vector, vector, right, embedding; only documents of a query-document model, "
    ),
    "another model": "a migration with another model is under way",
    "few": "300 documents are too few to learn maps from; build the index again with the new model",
    "lost": "7 vectors are mapped, and its work folder is gone",
    "dimension": "factory 'PQ5' does not work for dimension 32",
    "length": "is 25,000 characters long, more than 256; try auto, Flat",
    "no factory": "lacks 'factory'; build the index again",
    "mistyped": "--data nope: no such file or folder; name a BEIR folder, or leave --data out",
    "twice": "another dualenc process is writing",
    "model": "needs a model; name it",
    "texts": "keeps no texts, and its data gone is gone; name it by --data",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_refusals_in_one_line(
    made: Path,
    index: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words: list[Any] = ["migrate", index, made / "new"]
    entries: dict[str, dict[str, Any]] = {
        "engine": {"format": "dualenc engine", "version": 3},
        "vectors": {"kind": "vector", "modality": "vector"},
        "lost": {"mapped": 7},
        "dimension": {"factory": "PQ5"},
        "length": {"factory": "Flat," * 5000},
        "texts": {"data": "gone"},
    }
    change_meta(index, **entries.get(kind, {}))
    holder = FORK.Process(target=hold, args=(index, tmp_path / "held"))
    if kind == "another model":
        run(*words, "--report-only")
        Path(f"{index}.migration", "embeddings-15").mkdir()
        words[2] = toy.text_model(tmp_path / "third", seed=2)
    elif kind == "few":
        monkeypatch.setattr("dualenc.workflows.migrate_model.MIN_DOCUMENTS", 301)
    elif kind == "twice":
        holder.start()
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
    elif kind == "model":
        words.pop()
    elif kind == "mistyped":
        words += ["--data", "nope"]
    elif kind == "no factory":
        meta = json.loads((index / "meta.json").read_text())
        (index / "meta.json").write_text(
            json.dumps({name: meta[name] for name in meta if name != "factory"})
        )
    elif kind == "texts":
        shutil.rmtree(index / "texts")
    try:
        assert REFUSALS[kind] in failure(capsys, *words)
    finally:
        if holder.pid is not None:
            holder.kill()
            holder.join()


@pytest.mark.slow
def test_data_without_judgements_is_said(
    made: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts come from the index, and judgements from nowhere."""
    shutil.copy(made / "beir" / "corpus.jsonl", tmp_path / "docs.jsonl")
    other = toy.write_beir(tmp_path / "other", documents=20, queries=4)
    judged = (other / "qrels" / "test.tsv").read_text()
    (other / "qrels" / "test.tsv").write_text(judged.replace("\td", "\tunknown"))
    for data in (tmp_path / "docs.jsonl", other):
        capsys.readouterr()
        run("migrate", index, made / "new", "--data", data, "--report-only")
        told = (
            f"{data}: lacks test judgements of these documents (qrels/test.tsv); "
            "measuring without them"
        )
        assert told in capsys.readouterr().out
        run("migrate", index, "--rollback")


@pytest.mark.slow
def test_a_text_that_was_edited_after_its_snippet_is_noticed(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    long = "wing flow " * 40
    for name, last in (("docs", "drag"), ("edited", "lift")):
        rows = [
            {"_id": f"d{i}", "text": f"title {i} {long}{last if i == 7 else ''}"}
            for i in range(120)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run("index", made / "old", tmp_path / "docs.jsonl", "--out", tmp_path / "index")
    words = ("migrate", tmp_path / "index", made / "new", "--report-only", "--data")
    line = failure(capsys, *words, tmp_path / "edited.jsonl")
    assert "the text of 'd7' in the data is not what was embedded" in line
    run(*words, tmp_path / "docs.jsonl")


@pytest.mark.slow
def test_the_last_line_is_the_verdict(
    made: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = made / "old", made / "new"

    def last_line(*words: Any) -> str:
        capsys.readouterr()
        run("migrate", index, new, *words)
        return capsys.readouterr().out.splitlines()[-1]

    line = last_line("--report-only")
    scores = report_of(index)[1]
    before, after = (
        scores[f"{name} model, {name} vectors"]["ndcg@10"][0] for name in ("old", "new")
    )
    found = (
        r"on the sample it finds (significantly more|neither significantly more nor less) "
        r"than the old one"
    )
    numbers = rf"\(nDCG@10 {before:.3f} → {after:.3f}, [+-]\d\.\d+ \[[+-]\d\.\d+, [+-]\d\.\d+\]\)"
    assert re.fullmatch(
        rf"{new}: {found} {numbers}; nothing is replaced; next: dualenc migrate {index} {new}", line
    )
    line = last_line()
    end = rf'the old index is removed, and no rollback is left; next: dualenc search {index} "…"'
    assert re.fullmatch(rf"{new} has replaced {old}: {found} {numbers}; {end}", line)


@pytest.mark.slow
def test_settings_stay_and_measurements_by_old_vectors_go_with_a_word(
    made: Path, index: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "workload.jsonl").write_text('{"filter": ""}\n')
    measure = ("evaluate", "engine", index, "--filters", tmp_path / "workload.jsonl")
    run(*measure)
    settings = Index.open(index).provenance.settings
    before = contents(index)
    run("migrate", index, made / "new")
    told = (
        "recall.json and queries.npy are of the old vectors and are dropped, the settings stay; "
        "measure again: dua"
    )
    assert capsys.readouterr().out.count(told) == 1
    assert {"recall.json", "queries.npy"} <= before.keys()
    assert {path.name for path in index.iterdir()}.isdisjoint({"recall.json", "queries.npy"})
    assert Index.open(index).provenance.settings == settings
    run(*measure)


def hold(index: Path, sign: Path) -> None:
    """Hold the lock of a migration until killed."""
    with locked(f"{index}.migration"):
        sign.touch()
        time.sleep(600)


def finish(process: Any) -> None:
    """Run a process to its end."""
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.nightly
@pytest.mark.parametrize("factory", ["Flat", "IVF8,PQ8x4"])
def test_killed_at_twenty_moments_it_answers_and_goes_on(
    made: Path, index: Path, tmp_path: Path, factory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SERVED, lambda _: list(SHARES))
    monkeypatch.setattr(MEANWHILE, lambda _: "index")
    saved, words = tmp_path / "saved", ("migrate", index, made / "new")
    run("index", made / "old", made / "beir", "--out", saved, "--factory", factory, "--texts")
    # The first run imports what processes need not; the second is timed where the others are
    # killed.
    for start in (run, lambda *words: finish(FORK.Process(target=run, args=words))):
        shutil.rmtree(index)
        shutil.copytree(saved, index)
        started = time.monotonic()
        start(*words)
        seconds = time.monotonic() - started
    expected = contents(index)["index.faiss"]
    states = []
    for number in range(KILLS):
        shutil.rmtree(index)
        shutil.copytree(saved, index)
        process = FORK.Process(target=run, args=words)
        process.start()
        time.sleep(seconds * (number + 0.5) / KILLS)
        process.kill()
        process.join()
        opened = Index.open(index, verify=True)
        options = {} if factory == "Flat" else {"nprobe": 8}
        rows = opened.search_rows(np.ones((1, opened.dim), np.float32), DOCUMENTS, **options)[1]
        assert sorted(rows[0].tolist()) == list(range(DOCUMENTS))
        assert sorted(opened.ids) == sorted(f"d{row}" for row in range(DOCUMENTS))
        states.append(opened.provenance.mapped)
        if number % 4 == 3 and "ended" not in (read_plan(index) or {"ended": True}):
            run("migrate", index, "--rollback")
            assert contents(index) == contents(saved)
        run(*words)
        assert contents(index)["index.faiss"] == expected
        assert not Path(f"{index}.migration").exists()
    assert len(set(states)) > 2, states
