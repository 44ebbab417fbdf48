"""Searches that answer by candidates while `dualenc migrate` is at work, stopped or over."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from dualenc.data import Corpus
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import read_judged_queries
from dualenc.encoders import load_model
from dualenc.errors import DualencError
from dualenc.search import Embeddings, Index
from dualenc.search.embed import encode
from dualenc.search.lexical import Lexical
from dualenc.search.migration.migration_folder import candidates_plan, read_plan
from dualenc.search.migration.vector_cache import VectorCache
from dualenc.search.searcher import Searcher
from dualenc.workflows import migrate_model
from tests.helpers import toy
from tests.helpers.folder_contents import contents
from tests.helpers.in_process import failure, found, run
from tests.helpers.waiting import wait_for

pytestmark = pytest.mark.slow

DOCUMENTS, DEPTH = 300, 40
FORK = multiprocessing.get_context("fork")
QUERIES = ("wing flow", "shock heat plate", "cone drag", "jet lift stream slip", "layer")


class Stopped(Exception):
    """Ends a migration at a stage."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models, a collection with years, the old model's index, and the vectors of both."""
    folder = tmp_path_factory.mktemp("candidates")
    toy.write_beir(folder / "beir", documents=DOCUMENTS, queries=40)
    lines = (folder / "beir" / "corpus.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"year": 2000 + i % 7} for i, line in enumerate(lines)]
    (folder / "beir" / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--factory", "Flat", "--columns", "year")
    for seed, name in enumerate(("old", "new")):
        toy.text_model(folder / name, seed)
        run("index", folder / name, folder / "beir", "--out", folder / f"{name}-index", *words)
    run("index", folder / "old-index", "--texts", "--bm25")
    return folder


@pytest.fixture
def index(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the old index, which candidates serve best."""
    monkeypatch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", 30)
    monkeypatch.setattr("dualenc.search.migration.candidates.NUM_CANDIDATES", DEPTH)
    monkeypatch.setattr(
        "dualenc.evaluation.migration_measures.best_meanwhile", lambda _: "candidates"
    )
    return Path(shutil.copytree(made / "old-index", tmp_path / "index"))


def stop_at(
    monkeypatch: pytest.MonkeyPatch, index: Path, model: Path, stop: int, **options: Any
) -> None:
    """Migrate until the documents up to a number are to be embedded."""
    embed = migrate_model._Steps._embed_documents

    def stopped(steps: Any, rows: Any, name: str, bar: str) -> Any:
        if name == f"embeddings-{stop}":
            raise Stopped
        return embed(steps, rows, name, bar)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(migrate_model._Steps, "_embed_documents", stopped)
        migrate_model.migrate(str(index), str(model), progress=False, **options)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the items that models encode in this process, also of queries."""
    ids: list[str] = []
    method = encode._Encoder._encoded

    def watch(self: Any, rows: Any, bar: Any) -> Any:
        ids.extend(self.corpus.ids[row] for row in rows)
        return method(self, rows, bar)

    monkeypatch.setattr(encode._Encoder, "_encoded", watch)
    return ids


def cache_of(index: Path) -> VectorCache:
    [path] = Path(f"{index}.migration").glob("candidates-*.sqlite")
    return VectorCache(path, Index.open(index).dim)


def vectors(folder: Path) -> np.ndarray:
    return Index.open(folder).faiss.reconstruct_n(0, DOCUMENTS).astype(np.float64)


def embedded_query(model: Path, text: str) -> np.ndarray:
    tower = load_model(model).left
    return np.asarray(encode.embed(tower, Corpus(["q"], [text]), progress=False).vectors)[0]


def expected(
    made: Path,
    query: str,
    k: int,
    allowed: set[int] | None = None,
    to_old: dict[str, np.ndarray] | None = None,
) -> list[tuple[str, float]]:
    """The best candidates by loops: the old model's first DEPTH, in the order of the new scores;
    or the first DEPTH of the mapped query."""
    old_query, new_query = (embedded_query(made / name, query) for name in ("old", "new"))
    if to_old is not None:
        old_query = new_query @ to_old["weight"] + to_old["bias"]
    old, new = vectors(made / "old-index"), vectors(made / "new-index")
    rows = [row for row in range(DOCUMENTS) if allowed is None or row in allowed]
    rows.sort(key=lambda row: -float(np.dot(old[row], old_query)))
    scores = {row: float(np.dot(new[row], new_query)) for row in rows[:DEPTH]}
    best = sorted(scores, key=lambda row: -scores[row])[:k]
    return [(f"d{row}", scores[row]) for row in best]


def check(results: list[Any], wanted: list[tuple[str, float]]) -> None:
    """The same ids and scores, where equal scores may be in any order."""
    np.testing.assert_allclose(
        [hit.score for hit in results], [score for _, score in wanted], atol=1e-5
    )
    # Copies of a text have the same score and may be cut off at the last place.
    last = wanted[-1][1] + 1e-5
    assert {hit.id for hit in results if hit.score > last} == {
        name for name, score in wanted if score > last
    }


def test_results_are_those_of_a_loop(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(monkeypatch, index, made / "new", 60)
    searcher = Searcher.open(index)
    assert searcher.candidates is not None
    for query in QUERIES:
        check(searcher.search(query, 7), expected(made, query, 7))
    # Candidates are found under the conditions.
    allowed = {row for row in range(DOCUMENTS) if row % 7 >= 4}
    conditions = ["year>=2004"]
    check(
        searcher.search("wing flow", 9, where=conditions), expected(made, "wing flow", 9, allowed)
    )
    assert searcher.search("wing flow", 9, where=["year>=3000"]) == []
    # All documents are candidates if all of them are wanted.
    hits = searcher.search("wing flow", DOCUMENTS)
    new = vectors(made / "new-index") @ embedded_query(made / "new", "wing flow")
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(new)[::-1], atol=1e-5)
    # Named, the old model answers by its own vectors.
    assert Searcher.open(index, str(made / "old")).candidates is None
    results = found(capsys, index, "wing flow", "-k", 7)
    check(searcher.search("wing flow", 7), [(hit["id"], hit["score"]) for hit in results])


@pytest.fixture
def gone(index: Path, tmp_path: Path) -> Path:
    """The index after its model was removed."""
    name_model(index, tmp_path / "removed")
    with pytest.raises(DualencError, match="is gone"):
        Searcher.open(index)
    return index


def name_model(index: Path, model: Path) -> None:
    meta = json.loads((index / "meta.json").read_text())
    (index / "meta.json").write_text(json.dumps(meta | {"model": str(model)}))


def test_mapped_queries_find_candidates_if_the_old_model_is_gone(
    made: Path, gone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(monkeypatch, gone, made / "new", 60)
    work = Path(f"{gone}.migration")
    to_old = load_file(work / "to_old.safetensors")
    # The least squares of the sample, up to its penalty: no other linear map is much nearer.
    sample = Embeddings.open(work / "sample")
    old = vectors(made / "old-index")[[int(name[1:]) for name in sample.ids]]
    new = np.asarray(sample.vectors[:], np.float64)
    left = new @ to_old["weight"] + to_old["bias"] - old
    assert np.square(left).sum() < 0.8 * np.square(old - old.mean(axis=0)).sum()
    searcher = Searcher.open(gone)
    for query in QUERIES:
        check(searcher.search(query, 7), expected(made, query, 7, to_old=to_old))
    allowed = {row for row in range(DOCUMENTS) if row % 7 >= 4}
    wanted = expected(made, "wing flow", 9, allowed, to_old)
    check(searcher.search("wing flow", 9, where=["year>=2004"]), wanted)
    assert len(searcher.search("cone drag", 5, hybrid="rrf")) == 5
    results = found(capsys, gone, "wing flow", "-k", 7)
    check(searcher.search("wing flow", 7), [(hit["id"], hit["score"]) for hit in results])
    migrate_model.migrate(str(gone), str(made / "new"), progress=False)
    np.testing.assert_allclose(vectors(gone), vectors(made / "new-index"), atol=1e-5)
    assert {path.name for path in gone.parent.iterdir()} == {"index", "index.migration.html"}


def test_the_report_without_the_old_model_is_that_of_a_loop(
    made: Path, gone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sample is everything, so that candidates are those of a search."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dualenc.search.migration.stages.MIN_SAMPLE", DOCUMENTS)
        patch.setattr("dualenc.workflows.migration_questions.NUM_CANDIDATES", DEPTH)
        run("migrate", gone, made / "new", "--report-only")
    printed = capsys.readouterr().out
    to_old = load_file(Path(f"{gone}.migration") / "to_old.safetensors")
    queries, qrels = read_judged_queries(made / "beir", "test", names(), BadRows(made))
    old, gains = vectors(made / "old-index"), {"mapped": [], "candidates": []}  # type: ignore
    for row, name in enumerate(queries.ids):
        relevant = set(qrels[name])
        # A document with the id of the query is not a result, unless it is judged.
        allowed = set(range(DOCUMENTS)) - ({int(name[1:])} - {int(own[1:]) for own in relevant})
        ranked = expected(made, queries[row], DEPTH, None, to_old)
        mapped = embedded_query(made / "new", queries[row]) @ to_old["weight"] + to_old["bias"]
        nearest = sorted(allowed, key=lambda own: -float(old[own] @ mapped))[:10]
        found_ids = {
            "mapped": [f"d{own}" for own in nearest],
            "candidates": [own for own, _ in ranked if int(own[1:]) in allowed][:10],
        }
        for way, ids in found_ids.items():
            # One document is relevant.
            own = [1 / np.log2(2 + place) for place, each in enumerate(ids) if each in relevant]
            gains[way].append(sum(own))
    report = json.loads((Path(f"{gone}.migration") / "report.json").read_text())
    systems = {row["system"]: row for row in report["systems"]}
    assert "old model, old vectors" not in systems
    labels = {
        "mapped": "new model, mapped queries, old vectors",
        "candidates": "new model, candidates of its mapped queries",
    }
    for way, label in labels.items():
        # Copies of a text are in any order.
        assert systems[label]["ndcg@10"][0] == pytest.approx(np.mean(gains[way]), abs=0.02), way
    assert systems[labels["mapped"]]["ndcg@10 - old"] == [0, 0, 0]
    assert "its own queries, mapped into the old vectors (nDCG@10" in printed
    assert "than its queries mapped into the old vectors (nDCG@10" in printed


def names() -> list[str]:
    return [f"d{row}" for row in range(DOCUMENTS)]


def test_killed_without_the_old_model_it_answers_and_goes_on(
    made: Path, gone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed = migrate_model._Steps._embed_documents

    def slow(steps: Any, rows: Any, name: str, bar: str) -> Any:
        if name.startswith("embeddings"):
            time.sleep(600)
        return embed(steps, rows, name, bar)

    with monkeypatch.context() as patch:
        patch.setattr(migrate_model._Steps, "_embed_documents", slow)
        process = FORK.Process(target=run, args=("migrate", gone, made / "new"))
        process.start()
        wait_for(lambda: candidates_plan(gone) is not None)
    to_old = load_file(Path(f"{gone}.migration") / "to_old.safetensors")
    wanted = expected(made, "wing flow", 7, to_old=to_old)
    check(Searcher.open(gone).search("wing flow", 7), wanted)
    process.kill()
    process.join()
    check(Searcher.open(gone).search("wing flow", 7), wanted)
    run("migrate", gone, made / "new")
    np.testing.assert_allclose(vectors(gone), vectors(made / "new-index"), atol=1e-5)


def test_an_old_model_that_is_back_finds_candidates_itself(
    made: Path, gone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("migrate", gone, made / "new", "--report-only")
    work = Path(f"{gone}.migration")
    (work / "report.json").unlink()  # as if it was killed before
    for folder in (gone, work / "old"):
        name_model(folder, made / "old")
    stop_at(monkeypatch, gone, made / "new", 60)
    assert not (work / "to_old.safetensors").exists()
    check(Searcher.open(gone).search("wing flow", 7), expected(made, "wing flow", 7))


def test_a_corrupt_map_of_queries_is_one_line(
    made: Path, gone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_at(monkeypatch, gone, made / "new", 60)
    path = Path(f"{gone}.migration") / "to_old.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    assert "is gone" in failure(capsys, "search", gone, "wing flow")


def test_hybrid_search_fuses_candidates_with_bm25(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, index, made / "new", 60)
    monkeypatch.setattr("dualenc.search.searcher.FUSION_DEPTH", DEPTH)
    searcher = Searcher.open(index)
    dense = [name for name, _ in expected(made, "cone drag", DEPTH)]
    lexical = Lexical.open(index, Index.open(index).items_checksum)
    names = [f"d{row}" for row, _ in lexical.search("cone drag", DEPTH)]
    fused = {
        name: sum(1 / (60 + r.index(name) + 1) for r in (dense, names) if name in r)
        for name in {*dense, *names}
    }
    hits = searcher.search("cone drag", 5, hybrid="rrf")
    best = sorted(fused.values(), reverse=True)[:5]
    # Half of each ranking by the default weight.
    ratio = hits[0].score / best[0]
    np.testing.assert_allclose([hit.score for hit in hits], np.multiply(best, ratio), rtol=0.02)


def test_what_searches_embed_is_not_embedded_again(
    made: Path, index: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, index, made / "new", 60)
    assert len(encoded) > DOCUMENTS / 20, "nothing was embedded"
    before = {name for name in encoded if name.startswith("d")}
    del encoded[:]
    searcher = Searcher.open(index)
    for query in QUERIES:
        searcher.search(query)
    own = list(encoded)
    assert len(own) == len(set(own)) > 0
    assert set(own) == cache_of(index).ids()
    del encoded[:]
    for query in QUERIES:  # warm: by this searcher and by another one
        searcher.search(query)
        Searcher.open(index).search(query)
    assert not encoded
    migrate_model.migrate(str(index), str(made / "new"), progress=False)
    # Sampled and judged documents have the ids of queries, too, which are embedded before.
    assert not set(encoded) & set(own)
    assert set(encoded) | set(own) | before == {f"d{row}" for row in range(DOCUMENTS)}
    np.testing.assert_allclose(vectors(index), vectors(made / "new-index"), atol=1e-5)
    assert {path.name for path in index.parent.iterdir()} == {"index", "index.migration.html"}


def test_a_searcher_takes_what_the_migration_has_embedded(
    made: Path, index: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, index, made / "new", 60)
    searcher = Searcher.open(index)
    stop_at(monkeypatch, index, made / "new", DOCUMENTS)  # half of the documents are embedded now
    embedded = {name for name in encoded if name.startswith("d")}
    del encoded[:]
    for query in QUERIES:
        check(searcher.search(query, 7), expected(made, query, 7))
    new = set(encoded) - {"q"}
    assert new
    assert not new & (embedded - {f"d{row}" for row in range(40)})


def test_an_ended_migration_leaves_open_searchers_alone(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop_at(monkeypatch, index, made / "new", 60)
    early = Searcher.open(index)
    migrate_model.migrate(str(index), str(made / "new"), progress=False)
    caplog.clear()
    check(early.search("wing flow", 7), expected(made, "wing flow", 7))
    assert not caplog.records
    late = Searcher.open(index)
    assert late.candidates is None
    hits = late.search("wing flow", 3)
    new = vectors(made / "new-index") @ embedded_query(made / "new", "wing flow")
    np.testing.assert_allclose([hit.score for hit in hits], np.sort(new)[::-1][:3], atol=1e-5)
    assert {path.name for path in index.parent.iterdir()} == {"index", "index.migration.html"}


def test_a_rollback_keeps_what_searches_embedded_until_it_is_discarded(
    made: Path,
    index: Path,
    encoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = contents(index)
    stop_at(monkeypatch, index, made / "new", 15)
    searcher = Searcher.open(index)
    searcher.search("wing flow")
    cached = cache_of(index).ids()
    assert cached
    line = failure(capsys, "remove", index, made / "beir" / "queries.jsonl")
    assert "its model is being changed to" in line
    sampled = json.loads((Path(f"{index}.migration") / "report.json").read_text())["facts"][
        "sample"
    ]
    run("migrate", index, "--rollback")
    told = capsys.readouterr().out
    assert f"{sampled + len(cached)} vectors of {made / 'new'} stay in {index}.migration" in told
    assert contents(index) == before
    assert Searcher.open(index).candidates is None
    run("migrate", index, made / "new", "--report-only")
    assert Searcher.open(index).candidates is None, "a report changes no search"
    del encoded[:]
    stop_at(monkeypatch, index, made / "new", 60)
    assert Searcher.open(index).candidates is not None
    assert not set(encoded) & cached
    capsys.readouterr()
    run("migrate", index, "--rollback", "--discard")
    assert "removed: the measurements and" in capsys.readouterr().out
    assert not Path(f"{index}.migration").exists()
    searcher.search("cone drag")  # writes nothing any more
    assert not Path(f"{index}.migration").exists()
    assert contents(index) == before


def test_a_report_alone_changes_no_search(made: Path, index: Path) -> None:
    run("migrate", index, made / "new", "--report-only")
    assert Searcher.open(index).candidates is None


def test_texts_of_an_index_without_them_are_stored_beside_it(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(index / "texts")
    before = contents(index)
    stop_at(monkeypatch, index, made / "new", 60, data=str(made / "beir"))
    shutil.move(made / "beir", made / "away")
    try:
        check(Searcher.open(index).search("wing flow", 7), expected(made, "wing flow", 7))
    finally:
        shutil.move(made / "away", made / "beir")
    assert contents(index) == before
    migrate_model.migrate(str(index), str(made / "new"), progress=False)
    assert not (index / "texts").exists()


@pytest.mark.parametrize("kind", ["model", "gone", "index", "texts"])
def test_the_old_model_answers_if_candidates_cannot(
    made: Path,
    index: Path,
    tmp_path: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Path(shutil.copytree(made / "new", tmp_path / "model"))
    stop_at(monkeypatch, index, model, 60)
    if kind == "model":
        toy.text_model(tmp_path / "other", seed=5)
        shutil.rmtree(model)
        shutil.copytree(tmp_path / "other", model)
        told = "has other weights than when its vectors were made"
    elif kind == "gone":
        shutil.rmtree(model)
        told = "is gone"
    elif kind == "texts":
        shutil.rmtree(Path(f"{index}.migration") / "old" / "texts")
        told = "stores no texts"
    else:  # replaced by other means
        shutil.rmtree(index)
        shutil.copytree(made / "new-index", index)
        told = ""
    caplog.clear()
    searcher = Searcher.open(index)
    assert searcher.candidates is None
    assert len(searcher.search("wing flow")) == 10
    messages = [record.getMessage() for record in caplog.records]
    assert [told in message for message in messages] == ([True] if told else [])


def test_a_cache_that_cannot_be_used_is_said_once_and_vectors_stay_in_memory(
    made: Path,
    index: Path,
    encoded: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop_at(monkeypatch, index, made / "new", 15)
    cache_of(index).path.write_bytes(b"no database " * 100)
    searcher = Searcher.open(index)
    del encoded[:]
    for _ in range(2):
        check(searcher.search("wing flow", 7), expected(made, "wing flow", 7))
    own = [name for name in encoded if name != "q"]
    assert len(own) == len(set(own)) > 0
    assert sum("cannot be used" in record.getMessage() for record in caplog.records) == 1
    # The migration makes the file new, and goes on.
    migrate_model.migrate(str(index), str(made / "new"), progress=False)
    np.testing.assert_allclose(vectors(index), vectors(made / "new-index"), atol=1e-5)


@pytest.mark.parametrize(
    "entries", [{"name": 5}, {"name": None}, {"model": None}, {"texts": [1]}, {"serves": {}}]
)
def test_a_plan_of_another_shape_keeps_nothing_from_answering(
    made: Path, index: Path, entries: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, index, made / "new", 15)
    path = Path(f"{index}.migration") / "plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))
    assert len(Searcher.open(index).search("wing flow", 7)) == 7


def test_a_document_that_cannot_be_embedded_is_left_out(
    made: Path, index: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stop_at(monkeypatch, index, made / "new", 15)
    searcher = Searcher.open(index)
    assert searcher.candidates is not None
    first = searcher.search("wing flow", DEPTH)
    cached = cache_of(index)
    name = next(hit.id for hit in first if hit.id in cached.ids())
    row = int(name[1:])
    cached.path.unlink()
    cached.create()
    texts: list[Any] = list(searcher.candidates.items)
    texts[row] = None  # not a text
    searcher.candidates.items = texts
    for _ in range(2):
        hits = searcher.search("wing flow", DEPTH)
        assert [hit.id for hit in hits] == [hit.id for hit in first if hit.id != name]
    assert sum("left out of all results" in r.getMessage() for r in caplog.records) == 1


def search_all(index: Path, out: Path, queries: tuple[str, ...]) -> None:
    """Search in a process of its own."""
    searcher = Searcher.open(index)
    results = {query: [hit.id for hit in searcher.search(query, 7)] for query in queries}
    out.write_text(json.dumps(results))


def test_two_searchers_at_once(
    made: Path, index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at(monkeypatch, index, made / "new", 15)
    outs = [tmp_path / name for name in ("a.json", "b.json")]
    orders = (QUERIES, QUERIES[::-1])
    processes = [
        FORK.Process(target=search_all, args=(index, out, order))
        for out, order in zip(outs, orders)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (json.loads(out.read_text()) for out in outs)
    assert first == second
    check_cache(made, index)


def check_cache(made: Path, index: Path) -> set[str]:
    """All cached vectors are those of the new model."""
    cache, new = cache_of(index), vectors(made / "new-index")
    stored = cache.get(sorted(cache.ids()))
    assert stored.keys() == cache.ids()
    for name, vector in stored.items():
        np.testing.assert_allclose(vector, new[int(name[1:])], atol=1e-5)
    return set(stored)


def test_killed_searches_leave_a_cache_that_serves_on(
    made: Path, index: Path, tmp_path: Path, encoded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed at ten moments, between and within writes; nothing that is stored gets lost."""
    stop_at(monkeypatch, index, made / "new", 15)
    monkeypatch.setattr("dualenc.search.migration.candidates._EMBEDDED_AT_ONCE", 4)
    stored: set[str] = set()
    searcher = Searcher.open(index)
    for number in range(10):
        process = FORK.Process(target=keep_searching, args=(searcher, tmp_path / "sign"))
        process.start()
        wait_for((tmp_path / "sign").exists)
        time.sleep(0.02 * number)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        (tmp_path / "sign").unlink()
        now = check_cache(made, index)
        assert stored <= now
        stored = now
    assert stored
    del encoded[:]
    migrate_model.migrate(str(index), str(made / "new"), progress=False)
    assert not set(encoded) & stored
    np.testing.assert_allclose(vectors(index), vectors(made / "new-index"), atol=1e-5)


def keep_searching(searcher: Searcher, sign: Path) -> None:
    sign.touch()
    while True:
        for query in QUERIES:
            searcher.search(query, 7)


def results_of(searcher: Searcher) -> list[str]:
    return [hit.id for hit in searcher.search("wing flow", 7)]


def possible_results(made: Path) -> list[set[str]]:
    """What the old model, candidates and the new model find."""
    ids = [{name for name, _ in expected(made, "wing flow", 7)}]
    for name in ("old", "new"):
        ids.append(set(results_of(Searcher.open(made / f"{name}-index"))))
    return ids


def test_searchers_open_at_every_moment_of_a_migration(made: Path, index: Path) -> None:
    """Also while the new index is swapped in and the work folder is removed."""
    possible = possible_results(made)
    process = FORK.Process(target=run, args=("migrate", index, made / "new"))
    process.start()
    opened = []
    while process.is_alive():
        searcher = Searcher.open(index)
        opened.append(searcher.candidates is not None)
        assert set(results_of(searcher)) in possible
    process.join()
    assert process.exitcode == 0
    assert any(opened)
    assert Searcher.open(index).candidates is None
    assert {path.name for path in index.parent.iterdir()} == {"index", "index.migration.html"}


@pytest.mark.nightly
def test_migrations_killed_at_twenty_moments_answer_and_go_on(
    made: Path, index: Path, tmp_path: Path
) -> None:
    possible = possible_results(made)
    saved = Path(shutil.copytree(index, tmp_path / "saved"))
    seconds = 0.0
    for number in range(-1, 20):  # the first one is timed
        shutil.rmtree(index)
        shutil.copytree(saved, index)
        process = FORK.Process(target=run, args=("migrate", index, made / "new"))
        started = time.monotonic()
        process.start()
        if number >= 0:
            time.sleep(seconds * (number + 0.5) / 20)
            process.kill()
        process.join()
        seconds = max(seconds, time.monotonic() - started)
        assert set(results_of(Searcher.open(index))) in possible
        if number % 4 == 3 and "ended" not in (read_plan(index) or {"ended": True}):
            run("migrate", index, "--rollback")
            assert contents(index) == contents(saved)
        run("migrate", index, made / "new")
        np.testing.assert_allclose(vectors(index), vectors(made / "new-index"), atol=1e-5)
        assert not Path(f"{index}.migration").exists()
