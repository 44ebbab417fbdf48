"""Hard negatives: equal to a slow loop over a matrix of scores, read by every reader, resumable."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dualenc.data import MinedPairs, PairDataset, VectorPairs
from dualenc.errors import DualencError
from dualenc.search import Embeddings
from dualenc.search.exact_search import exact_search
from dualenc.search.mining import Report, Rule, mine_negatives

QUERIES, DOCUMENTS, DIM = 30, 60, 5


def unit(rows: int, seed: int) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(rows, DIM)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def collection(seed: int = 0, per_query: int = 2) -> tuple[Embeddings, Embeddings, PairDataset]:
    """Texts with vectors; the positives of a query are among its nearest, as of a model that has
    learned something."""
    queries, documents = unit(QUERIES, seed), unit(DOCUMENTS, seed + 1)
    generator = np.random.default_rng(seed + 2)
    nearest = np.argsort(-(queries @ documents.T), axis=1)[:, :8]
    left = np.repeat(np.arange(QUERIES), per_query)
    right = np.concatenate([generator.choice(row, per_query, replace=False) for row in nearest])
    pairs = PairDataset(
        [f"query {i}" for i in range(QUERIES)], [f"text {i}" for i in range(DOCUMENTS)], left, right
    )
    ids = [[str(i) for i in range(n)] for n in (QUERIES, DOCUMENTS)]
    return Embeddings(ids[0], queries), Embeddings(ids[1], documents), pairs


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def run(
    tmp_path: Path, rule: Rule, *, seed: int = 0, **how: Any
) -> tuple[list[dict[str, Any]], Report]:
    queries, documents, pairs = collection(seed)
    report = mine_negatives(
        queries, documents, pairs, tmp_path / "mined.jsonl", rule=rule, progress=False, **how
    )
    return rows_of(tmp_path / "mined.jsonl"), report


rules = st.builds(
    Rule,
    num_negatives=st.integers(1, 12),
    first_rank=st.integers(1, 10),
    last_rank=st.integers(10, 80),
    relative=st.none() | st.floats(0.2, 1.2),
)


@pytest.mark.slow
@given(rule=rules, seed=st.integers(0, 50))
def test_equals_a_slow_loop(
    tmp_path_factory: pytest.TempPathFactory, rule: Rule, seed: int
) -> None:
    queries, documents, pairs = collection(seed)
    scores = queries.vectors.astype(np.float64) @ documents.vectors.T.astype(np.float64)
    wanted, false_negatives, passed = {}, 0, 0
    for query in range(QUERIES):
        relevant = [int(d) for q, d in zip(pairs.left_id, pairs.right_id) if q == query]
        own = [scores[query, d] for d in relevant]
        base = sum(own) / len(own)
        limit = math.inf
        if rule.relative is not None:  # for a positive base this is relative * base
            limit = base - (1 - rule.relative) * abs(base)
        rank, negatives = 0, []
        for document in sorted(range(DOCUMENTS), key=lambda d: -scores[query, d]):
            if rank == rule.last_rank:
                break
            if document in relevant:
                passed += 1
                continue
            rank += 1
            if rank < rule.first_rank:
                continue
            if abs(scores[query, document] - limit) < 1e-6:
                return  # in float32 it may fall on either side
            if scores[query, document] > limit:
                false_negatives += 1
            elif len(negatives) < rule.num_negatives:
                negatives.append(str(document))
        if negatives:
            wanted[str(query)] = negatives
    rows, report = run(tmp_path_factory.mktemp("mine"), rule, seed=seed)
    assert {row["query_id"]: row["neg_id"] for row in rows} == wanted
    assert report.false_negatives == false_negatives
    assert report.known_positives == passed
    assert report.without_negatives == QUERIES - len(wanted)
    assert report.written == len(wanted)
    assert report.negatives == sum(map(len, wanted.values()))
    for row in rows:
        query = int(row["query_id"])
        for side in ("pos", "neg"):
            assert row[side] == [f"text {name}" for name in row[f"{side}_id"]]
            np.testing.assert_allclose(
                row[f"{side}_scores"], [scores[query, int(i)] for i in row[f"{side}_id"]], atol=2e-6
            )


def test_random_negatives_come_from_the_window_and_differ_by_seed(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, Rule(relative=None, num_negatives=40, last_rank=40))
    window = {row["query_id"]: row["neg_id"] for row in rows}
    rules = [
        Rule(relative=None, num_negatives=5, last_rank=40, pick="random", seed=seed)
        for seed in (0, 0, 1)
    ]
    drawn = [run(tmp_path, rule)[0] for rule in rules]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]
    places = []
    for row in drawn[0]:
        assert row["neg_scores"] == sorted(row["neg_scores"], reverse=True)
        places += [window[row["query_id"]].index(name) for name in row["neg_id"]]
    assert max(places) > 30, "the best alone would end at 5"


def test_copies_of_positives_and_of_the_query_are_no_negatives_and_others_stand_once(
    tmp_path: Path,
) -> None:
    texts = ["the answer", "the answer", "what is it?", "other", "other", "third"]
    vectors = np.array(
        [[1, 0], [1, 0], [0.99, 0.14], [0.9, 0.436], [0.9, 0.436], [0.5, 0.866]], np.float32
    )
    queries, documents = (
        Embeddings(["0"], vectors[:1]),
        Embeddings([str(i) for i in range(6)], vectors),
    )
    pairs = PairDataset(["what is it?"], texts, [0], [0])
    report = mine_negatives(
        queries, documents, pairs, tmp_path / "mined.jsonl", rule=Rule(relative=None)
    )
    assert rows_of(tmp_path / "mined.jsonl")[0]["neg"] == ["other", "third"]
    assert (report.known_positives, report.repeated, report.candidates) == (3, 1, 3)


@pytest.mark.parametrize("of_vectors", [False, True])
def test_queries_of_equal_contents_do_not_mine_each_others_positives(
    tmp_path: Path, of_vectors: bool
) -> None:
    queries, documents, pairs = collection()
    queries.vectors[1], queries.vectors[7] = queries.vectors[0], queries.vectors[0]
    items: Any = (
        ["one text" if i in (0, 1, 7) else f"query {i}" for i in range(QUERIES)],
        pairs.right_items,
    )
    how: dict[str, Any] = {}
    if of_vectors:
        items = queries.vectors, documents.vectors
        how = {"left_modality": "vector", "right_modality": "vector"}
    alike = PairDataset(*items, pairs.left_id, pairs.right_id, **how)
    rule = Rule(num_negatives=DOCUMENTS, last_rank=DOCUMENTS, relative=None)
    mine_negatives(queries, documents, alike, tmp_path / "mined.jsonl", rule=rule, progress=False)
    rows = {row["query_id"]: row for row in rows_of(tmp_path / "mined.jsonl")}
    theirs = {str(d) for q, d in zip(pairs.left_id, pairs.right_id) if q in (0, 1, 7)}
    everything = {str(i) for i in range(DOCUMENTS)}
    assert all(set(rows[query]["neg_id"]) == everything - theirs for query in ("0", "1", "7"))
    assert set(rows["2"]["neg_id"]) == everything - set(rows["2"]["pos_id"])


def test_an_item_without_a_vector_is_neither_asked_for_nor_found(tmp_path: Path) -> None:
    queries, documents, pairs = collection(per_query=1)
    lost = int(pairs.right_id[3])
    kept = [i for i in range(DOCUMENTS) if i != lost]
    fewer = Embeddings([str(i) for i in kept], documents.vectors[kept])
    report = mine_negatives(
        queries, fewer, pairs, tmp_path / "mined.jsonl", rule=Rule(relative=None), progress=False
    )
    rows = rows_of(tmp_path / "mined.jsonl")
    without = {str(q) for q, d in zip(pairs.left_id, pairs.right_id) if d == lost}
    assert report.without_vectors == len(without) > 0
    assert {row["query_id"] for row in rows} == {str(i) for i in range(QUERIES)} - without
    assert all(str(lost) not in row["neg_id"] for row in rows)


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dualenc.search.mining.QUERIES_PER_BLOCK", 10)
    searched: list[bytes] = []
    is_stopped = True

    def stopping(queries: np.ndarray, documents: np.ndarray, k: int, **_: Any) -> Any:
        if is_stopped and len(searched) == 20:
            raise KeyboardInterrupt
        searched.extend(query.tobytes() for query in queries)
        return exact_search(queries, documents, k)

    rule = Rule(last_rank=12)
    whole, expected_report = run(tmp_path, rule)
    (tmp_path / "mined.jsonl").unlink()
    monkeypatch.setattr("dualenc.search.mining.exact_search", stopping)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rule)
    assert not (tmp_path / "mined.jsonl").exists()
    is_stopped = False
    assert run(tmp_path, rule) == (whole, expected_report)
    assert len(searched) == len(set(searched)) == QUERIES, "nothing is searched twice"
    assert [path.name for path in tmp_path.iterdir()] == ["mined.jsonl"]


def test_unfinished_work_of_other_settings_is_not_taken_over(tmp_path: Path) -> None:
    work = tmp_path / ".mined.jsonl.mining"
    work.mkdir()
    (work / "settings.json").write_text('{"settings": "of another run"}')
    (work / "rows-00000.jsonl").write_text("{}")
    rows, _ = run(tmp_path, Rule(num_negatives=2))
    (tmp_path / "mined.jsonl").unlink()
    assert rows == run(tmp_path, Rule(num_negatives=2))[0]


def test_rows_are_what_flagembedding_documents_and_mined_pairs_reads(tmp_path: Path) -> None:
    rows, _ = run(tmp_path, Rule(relative=None, num_negatives=3))
    # FlagEmbedding loads the file so, and wants lists of texts, for distillation with numbers of
    # equal lengths.
    table = datasets.Dataset.from_json(str(tmp_path / "mined.jsonl"), cache_dir=str(tmp_path))
    for name in ("pos", "neg"):
        assert table.features[name] == datasets.List(datasets.Value("string"))
        assert table.features[f"{name}_scores"] == datasets.List(datasets.Value("float64"))
        assert all(len(row[name]) == len(row[f"{name}_scores"]) > 0 for row in table)
    assert table.features["query"] == datasets.Value("string")
    check_pairs(MinedPairs(tmp_path / "mined.jsonl"), rows)


def check_pairs(pairs: MinedPairs, rows: list[dict[str, Any]]) -> None:
    wanted = [
        (row["query"], positive, tuple(row["neg"])) for row in rows for positive in row["pos"]
    ]
    assert [(pair.left, pair.right, pair.negatives) for pair in pairs] == wanted
    assert pairs.skipped == 0


def test_of_vectors_the_rows_name_ids(tmp_path: Path) -> None:
    left, right = unit(20, 0), unit(20, 1)
    files = tmp_path / "q.npy", tmp_path / "d.npy"
    for file, vectors in zip(files, (left, right)):
        np.save(file, vectors)
    ids = [str(i) for i in range(20)]
    queries, documents = Embeddings(ids, left), Embeddings(ids, right)
    mine_negatives(
        queries, documents, VectorPairs(*files), tmp_path / "m.jsonl", rule=Rule(relative=None)
    )
    scores = left @ right.T
    for pair in MinedPairs(tmp_path / "m.jsonl", queries=files[0], documents=files[1]):
        row = int(np.argmax((left == pair.left).all(1)))
        np.testing.assert_array_equal(pair.right, right[row])
        best = [d for d in np.argsort(-scores[row]) if d != row][:8]
        np.testing.assert_array_equal(np.stack(pair.negatives), right[best])


@pytest.mark.parametrize(
    "options",
    [
        {"num_negatives": 0},
        {"first_rank": 5, "last_rank": 4},
        {"relative": math.nan},
        {"relative": math.inf},
        {"seed": -1},
    ],
)
def test_numbers_out_of_range(options: dict[str, Any]) -> None:
    name, value = next(iter(options.items()))
    with pytest.raises(DualencError, match=f"^{name} is {value}; give a number from"):
        Rule(**options)


def test_what_cannot_be_mined_is_told(tmp_path: Path) -> None:
    queries, documents, pairs = collection()
    other = Embeddings(documents.ids, np.ones((DOCUMENTS, DIM + 1), np.float32))
    with pytest.raises(DualencError, match="queries have dimension 5 and documents 6"):
        mine_negatives(queries, other, pairs, tmp_path / "x.jsonl")
    strangers = Embeddings([f"x{i}" for i in range(QUERIES)], queries.vectors)
    with pytest.raises(DualencError, match="no query and its positive both have a vector"):
        mine_negatives(strangers, documents, pairs, tmp_path / "x.jsonl", progress=False)
    with pytest.raises(DualencError, match="a score is not finite"):
        wrong = Embeddings(queries.ids, np.full((QUERIES, DIM), np.nan, np.float32))
        mine_negatives(wrong, documents, pairs, tmp_path / "x.jsonl", progress=False)
    assert not list(tmp_path.iterdir()), "nothing half-written"
    kind: Any = "vector"
    items = PairDataset(
        queries.vectors, documents.vectors, [0], [0], left_modality=kind, right_modality=kind
    )
    with pytest.raises(DualencError, match="sentence-transformers needs texts"):
        mine_negatives(
            queries, documents, items, tmp_path / "x.jsonl", form="sentence-transformers"
        )
