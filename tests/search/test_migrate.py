"""A migration's samples, orders, mixed vectors, swapped indexes and intervals, against slow and
plain computations."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dualenc.data.store.vector_shards import ShardedVectors
from dualenc.errors import DualencError
from dualenc.evaluation import migration_measures as measured
from dualenc.search import Embeddings, Index
from dualenc.search.documents import open_documents
from dualenc.search.index import change
from dualenc.search.lexical import Lexical
from dualenc.search.migration import stages as migrate
from dualenc.search.migration.maps import fit
from dualenc.search.migration.migration_folder import (
    is_replaced,
    new_shards,
    read_plan,
    remove_work,
)
from dualenc.search.migration.replacement import mixed_vectors
from dualenc.search.migration.rollback import roll_back
from dualenc.search.texts import TextStore, add_texts
from tests.helpers.clusters import search_ids
from tests.helpers.fake_towers import corpus
from tests.helpers.folder_contents import contents
from tests.helpers.started_migration import (
    ABOUT,
    COUNT,
    INPUTS,
    new_vectors,
    old_vectors,
    started,
)


@pytest.mark.parametrize("metric", ["cosine", "ip"])
@pytest.mark.parametrize(
    "factory", ["Flat", "HNSW8", "IVF8,Flat", "IVF8,PQ8x4,Refine(SQfp16)", "a file that refines"]
)
def test_swapped_indexes_are_of_the_same_kind_and_hold_what_was_asked(
    tmp_path: Path, factory: str, metric: Any
) -> None:
    memory = 20_000 if factory == "a file that refines" else None
    factory = factory if memory is None else "IVF8,SQ8,Refine(SQfp16)"
    migration = started(tmp_path, factory, metric, memory)
    names = [f"doc {row}" for row in range(COUNT)]
    old = open_documents(migration.work / "old", migration.work)
    new = Embeddings(names[350:], new_vectors()[350:])
    mapped = fit(old_vectors(), new_vectors())(np.asarray(old.vectors[:], np.float32))
    for stop in (0, 350):
        assert migration.is_ahead(stop)
        migration.swap(old, [new], stop)
        assert not migration.is_ahead(stop)
        index = Index.open(tmp_path / "index", verify=True)
        assert list(index.ids) == names
        assert index.hit(9, 0.0).snippet == "text 9"
        about = {"factory": factory, "metric": metric, "mapped": COUNT - stop, "data": "d", **ABOUT}
        assert index.provenance.difference(about) is None
        assert (index.dim, index.provenance.target_recall) == (8, 0.95)
        assert ((tmp_path / "index" / "refine.faiss").exists()) == (memory is not None)
        expected = mapped.copy()
        expected[COUNT - stop :] = new_vectors()[COUNT - stop :]
        options = (
            {"nprobe": 8} if "IVF" in factory else {"ef_search": 200} if "HNSW" in factory else {}
        )
        results = search_ids(index, expected[::50], 1, **options)[1][:, 0]
        assert (
            np.mean([name == f"doc {row}" for name, row in zip(results, range(0, COUNT, 50))]) > 0.9
        )
        everything = search_ids(index, expected[:1], COUNT, **options)[1][0]
        if "HNSW" not in factory and "Refine" not in factory:
            assert sorted(everything) == sorted(names)
        if factory == "Flat":
            np.testing.assert_allclose(index.faiss.reconstruct_n(0, COUNT), expected, atol=1e-6)


def test_a_next_index_that_a_killed_process_has_half_removed_is_replaced(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    (migration.work / "next").mkdir()
    shutil.copyfile(migration.work / "old" / "meta.json", migration.work / "next" / "meta.json")
    documents = open_documents(migration.work / "old", migration.work)
    migration.swap(documents, [Embeddings(["doc 0"], new_vectors()[:1])], 1)
    assert Index.open(tmp_path / "index", verify=True).provenance.mapped == COUNT - 1
    assert not (migration.work / "next").exists()


def test_bm25_and_texts_stay_and_a_rollback_gives_the_same_bytes(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    texts = corpus(COUNT)
    texts.ids = [f"doc {row}" for row in range(COUNT)]
    texts.text = lambda row: f"text {row}"  # type: ignore[method-assign]
    add_texts(tmp_path / "index", texts, bm25=True, whole=True)
    before = contents(tmp_path / "index")
    new = Embeddings(["doc 0"], new_vectors()[:1])
    migration.swap(open_documents(migration.work / "old", migration.work), [new], 0)
    index = Index.open(tmp_path / "index")
    store = TextStore(tmp_path / "index", index.items_checksum)
    assert dict(zip(store.ids, store.texts))["doc 3"] == texts[3]
    assert Lexical.open(tmp_path / "index", index.items_checksum).count == COUNT
    with pytest.raises(DualencError, match="its model is being changed to new model, in"):
        change.remove(tmp_path / "index", ["doc 3"])
    roll_back(tmp_path / "index")
    assert contents(tmp_path / "index") == before
    assert not migration.work.exists()
    with pytest.raises(DualencError, match="no migration is under way"):
        roll_back(tmp_path / "index")


@pytest.mark.parametrize("name", ["model_checksum", "texts", "queries", "items"])
def test_another_plan_is_refused_once_documents_are_embedded(tmp_path: Path, name: str) -> None:
    migration = started(tmp_path, "Flat")
    if name == "items":
        change.remove(tmp_path / "index", ["doc 3"])
    (migration.work / "embeddings-20").mkdir()
    changed = [
        {key: "another" if key == name else value for key, value in one.items()}
        for one in (ABOUT, INPUTS)
    ]
    with pytest.raises(
        DualencError,
        match=r"is under way; resume it with them, or end it: dualenc migrate .* --rollback",
    ):
        migrate.Migration(tmp_path / "index", *changed)
    roll_back(tmp_path / "index")
    assert len(Index.open(tmp_path / "index")) == COUNT - (name == "items")


def test_another_plan_takes_the_place_of_one_that_has_only_measured(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    (migration.work / "report.json").write_text("{}")
    other = migrate.Migration(tmp_path / "index", {**ABOUT, "model_checksum": "another"}, INPUTS)
    assert other.report is None
    assert not is_replaced(tmp_path / "index")


def test_after_a_finished_migration_another_one_may_follow(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    documents = open_documents(migration.work / "old", migration.work)
    migration.swap(
        documents, [Embeddings([f"doc {row}" for row in range(COUNT)], new_vectors())], COUNT
    )
    assert is_replaced(tmp_path / "index")
    remove_work(tmp_path / "index")
    assert not is_replaced(tmp_path / "index")
    # What a kill leaves of a work folder whose plan is gone is no obstacle.
    (migration.work / "embeddings-20").mkdir(parents=True)
    other = migrate.Migration(tmp_path / "index", {**ABOUT, "model_checksum": "another"}, INPUTS)
    assert not (other.work / "embeddings-20").exists()


def test_stages_leave_out_the_sample(tmp_path: Path) -> None:
    migration = started(tmp_path, "Flat")
    stages = migration.stages(np.array([698, 0, 500]))
    assert [(stage.share, stage.stop) for stage in stages] == [
        (0, 0),
        (0.05, 35),
        (0.2, 140),
        (0.5, 350),
        (1, 700),
    ]
    assert stages[1].rows.tolist() == [699, *range(697, 664, -1)]
    assert sorted(np.concatenate([stage.rows for stage in stages])) == sorted(
        set(range(COUNT)) - {698, 0, 500}
    )


def test_order_is_by_hits_then_by_row() -> None:
    # 12 documents on a circle: a query finds all but the two that are farthest away.
    angles = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    # Between 0 and 1 (misses 6 and 7), between 1 and 2 (misses 7 and 8), between 2 and 3 (misses 8
    # and 9).
    queries = np.stack([circle[0] + circle[1], circle[1] + circle[2], circle[2] + circle[3]])
    order = migrate.order_by_hits(Index.build(circle, factory="Flat"), queries)
    assert order.tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 6, 9, 7, 8]


def test_sample_has_the_judged_documents_and_two_in_a_hundred() -> None:
    assert migrate.sample_rows(900, np.array([3])).tolist() == list(range(900))
    rows = migrate.sample_rows(200_000, np.array([7, 199_999]))
    assert 4000 <= len(rows) <= 4002
    assert {7, 199_999} <= set(rows.tolist())
    assert (np.diff(rows) > 0).all()
    assert len(migrate.sample_rows(50_000, np.zeros(0, int))) == 2000
    assert [migrate.embedded_at(share, 101) for share in migrate.SHARES] == [0, 6, 21, 51, 101]


def test_mixed_vectors_are_new_or_mapped() -> None:
    old, new = old_vectors(), new_vectors()
    to_new = fit(old, new)
    new_row = np.full(COUNT, -1)
    new_row[5], new_row[6], new_row[699] = 2, 3, 5
    vectors = ShardedVectors([new[3:6], ShardedVectors([new[6:7], new[698:]])])  # type: ignore[list-item]
    mixed = mixed_vectors(old, to_new, vectors, new_row)
    expected = to_new(old)
    expected[[5, 6, 699]] = new[[5, 6, 699]]
    assert mixed.shape == (COUNT, 8)
    np.testing.assert_allclose(mixed[0:COUNT], expected, atol=1e-6)
    np.testing.assert_allclose(mixed[np.array([699, 4, 5, 5])], expected[[699, 4, 5, 5]], atol=1e-6)


def test_intervals_are_those_of_a_slow_bootstrap() -> None:
    random = np.random.default_rng(0)
    scores = {name: {"recall@10": random.random(40)} for name in (measured.OLD, measured.NEW)}
    old, new = (scores[name]["recall@10"] for name in (measured.OLD, measured.NEW))
    row = measured.summarize(scores)[1]
    for name, values in (("recall@10", new), ("recall@10 - old", new - old)):
        means = [random.choice(values, 40).mean() for _ in range(20_000)]
        expected = [values.mean(), *np.quantile(means, [0.025, 0.975])]
        np.testing.assert_allclose(row[name], expected, atol=0.004)


def test_systems_are_scored_by_hand() -> None:
    eye = np.eye(12, dtype=np.float32)
    sample = measured.Sample(eye, eye[::-1].copy(), eye, np.arange(12)[::-1], 12)
    # The last half in the sample is first in the order.
    assert (sample.mixed(0.5)[6:] == sample.new[6:]).all()
    assert (sample.mixed(0.5)[:6] == sample.mapped[:6]).all()
    names = [f"d{row}" for row in range(12)]
    systems = {
        measured.OLD: (eye[:1] + 0.5 * eye[3:4], eye),
        measured.NEW: (eye[:1] + 0.5 * eye[3:4], eye[::-1].copy()),
    }
    scores = measured.judged_scores(systems, ["q"], names, {"q": {"d3": 1}})
    assert scores[measured.OLD]["ndcg@10"] == pytest.approx([1 / np.log2(3)])
    assert scores[measured.OLD]["recall@10"] == [1]
    # Here d11 and d8 are near; ties at zero are ordered by descending id, d9, d7, d6, d5, d4, d3.
    assert scores[measured.NEW]["ndcg@10"] == pytest.approx([1 / np.log2(9)])


def test_shares_that_are_significantly_below_are_not_served() -> None:
    highs = {0.0: -0.01, 0.05: 0.0, 0.2: -0.001, 0.5: 0.2, 1.0: -0.3}
    rows = [
        {
            "system": measured.mixed_name(share),
            "ndcg@10": [0, 0, 0],
            "ndcg@10 - old": [-1, -1, high],
        }
        for share, high in highs.items()
    ]
    assert measured.served_shares(rows) == [0.05, 0.5, 1.0]
    for row in rows:
        del row["ndcg@10"]
    assert measured.served_shares(rows) == [1.0], "nothing was judged"


def test_candidates_are_scored_by_hand() -> None:
    eye = np.eye(12, dtype=np.float32)
    names = [f"d{row}" for row in range(12)]
    queries = np.stack([eye[0] + 0.5 * eye[3], eye[5]])
    # The first query's best document is no candidate; the second has none in the sample.
    columns = np.array([[-1, 3, 7], [-1, -1, -1]])
    qrels = {"q": {"d3": 1, "d0": 1}, "r": {"d5": 1}}
    own = measured.judged_candidates((queries, eye), columns, ["q", "r"], names, qrels)
    assert own["recall@10"].tolist() == [0.5, 0]
    assert own["ndcg@10"] == pytest.approx([1 / (1 + 1 / np.log2(3)), 0])


def test_neighbours_among_candidates_are_those_of_a_loop() -> None:
    random = np.random.default_rng(0)
    old, new = random.normal(size=(2, 60, 8)).astype(np.float32)
    sample = measured.Sample(old, new, new, np.arange(60), 60)
    rows = np.array([3, 17, 59])
    expected = []
    for row in rows.tolist():
        others = [other for other in range(60) if other != row]
        truth = set(sorted(others, key=lambda i: -float(new[i] @ new[row]))[:10])
        candidates = sorted(others, key=lambda i: -float(old[i] @ old[row]))[:25]
        best = sorted(candidates, key=lambda i: -float(new[i] @ new[row]))[:10]
        expected.append(len(truth & set(best)) / 10)
    own = measured.neighbour_candidates(sample, old[rows], rows, depth=25)["recall@10"]
    assert own.tolist() == expected
    everything = measured.neighbour_candidates(sample, old[rows], rows, depth=200)["recall@10"]
    assert everything.tolist() == [1, 1, 1]


def scored(difference: float, seed: int) -> dict[str, np.ndarray]:
    """Scores of 100 queries that are this much above 0.5, with a spread of 0.1."""
    spread = 0.1 * np.random.default_rng(seed).normal(size=100)
    return {"ndcg@10": 0.5 + difference + spread, "recall@10": np.zeros(100)}


@pytest.mark.parametrize(
    ("mapped", "candidates", "best"),
    [(-0.2, 0.1, "candidates"), (0.1, 0.1, "index"), (-0.2, 0.0, "index"), (-0.2, -0.1, "index")],
)
def test_candidates_answer_where_they_are_significantly_best(
    mapped: float, candidates: float, best: str
) -> None:
    scores = {measured.OLD: scored(0, 0), measured.mixed_name(0): scored(mapped, 1)}
    scores[measured.CANDIDATES] = scored(candidates, 2)
    assert measured.best_meanwhile(scores) == best


@pytest.mark.parametrize(("mapped", "best"), [(-0.2, "candidates"), (0.0, "index")])
def test_without_the_old_model_candidates_answer_unless_mapped_vectors_are_level(
    mapped: float, best: str
) -> None:
    scores = {
        measured.MAPPED_QUERIES: scored(0.2, 0),  # no way to answer that a migration has
        measured.OF_MAPPED: scored(0, 1),
        measured.mixed_name(0): scored(mapped, 2),
        measured.NEW: scored(0.3, 3),
    }
    assert measured.best_meanwhile(scores) == best
    rows = measured.summarize(scores)
    assert rows[0]["ndcg@10 - old"] == [0, 0, 0]
    assert rows[3]["ndcg@10 - old"][0] == pytest.approx(0.1, abs=0.03)
    assert "significantly more than its queries mapped into" in measured.verdict(rows)
    told = measured.candidates_verdict(rows)
    assert told.startswith(f"nDCG@10 {rows[1]['ndcg@10'][0]:.3f}, its queries mapped into the old")


def test_a_rotation_is_chosen_where_it_is_significantly_better() -> None:
    for difference, best in ((0.1, "rotation"), (0.0, "ridge"), (-0.1, "ridge")):
        scores = {"ridge": scored(0, 0), "rotation": scored(difference, 1)}
        assert measured.best_map(scores) == best  # type: ignore[arg-type]


def test_work_folder_of_a_process_killed_while_it_wrote_its_plan_is_no_foreign_folder(
    tmp_path: Path,
) -> None:
    half = tmp_path / "index.migration" / ".plan.json.part"
    half.mkdir(parents=True)
    (half / "new-plan.json").write_text("{")
    assert read_plan(tmp_path / "index") is None
    (tmp_path / "index.migration" / "notes.txt").write_text("mine")
    with pytest.raises(DualencError, match="was not written by a migration"):
        read_plan(tmp_path / "index")


def test_a_folder_that_is_removed_meanwhile_has_no_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search may look for shards at the moment at which the migration ends."""
    for name in ("embeddings-1", "embeddings-2", "sample"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data-00000.arrow").touch()
    scandir = os.scandir

    def vanishing(path: Any) -> Any:
        if str(path).endswith("embeddings-2"):
            raise FileNotFoundError(path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanishing)
    found = [path.parent.name for path in new_shards(tmp_path)]
    assert found == ["embeddings-1", "sample"]
