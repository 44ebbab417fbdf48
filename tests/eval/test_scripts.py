"""Experiments and benchmarks run, in small, and print numbers that are known beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.data import Corpus, PairDataset, RetrievalSet
from dualenc.encoders import VectorEncoder
from tests.eval.scripts import load_script


@pytest.mark.slow
def test_estimator_bias_prints_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("estimator_bias.py")
    script.main(num_pairs=16, batch_size=8, epochs=8, warm_up=1, out=tmp_path / "drawn" / "bias.png")
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.OBJECTIVES)
    # The oracle has neither bias nor error.
    assert printed.split("ExactGlobal")[1].split()[:4] == ["0.0000"] * 4
    assert (tmp_path / "drawn" / "bias.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["both roles", "both roles, corrected"])
def test_both_roles_have_no_error_while_embeddings_stand_still(name: str) -> None:
    script = load_script("moving_embeddings.py")

    def measured(drift: float) -> dict[str, float]:
        path = script.Drift(num_pairs=24, dimension=4, drift=drift)
        return script.measure(path, name, temperature=0.1, batch_size=8, warm_up=1, runs=3)

    still, moving = measured(0.0), measured(0.3)
    assert max(still["step error"], still["epoch error"]) < 1e-5
    assert min(moving["step error"], moving["epoch error"]) > 0.05


@pytest.mark.slow
def test_objectives_are_timed_against_info_nce(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("bench/objectives.py")
    script.main(encoder="resnet18", batch_sizes=[4], num_items=50, image_size=32, repeats=1, device="cpu")
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.OBJECTIVES)
    assert printed.split("InfoNCE")[1].split()[3] == "1.0000"


@pytest.mark.parametrize("name", ["InfoNCE", "NegativeCache"])
def test_memory_counts_the_inputs_of_a_batch_and_of_out_of_batch_items(name: str) -> None:
    options = {"encoder": "linear", "size": 8, "layers": 1, "chunk_size": 4, "steps": 2, "num_items": 20}
    found = load_script("bench/memory.py").measure({**options, "device": "cpu", "objective": name, "batch_size": 6})
    num_items = found["inputs"] * 2**20 / (8 * 4)
    assert num_items == pytest.approx(round(num_items))
    assert num_items == pytest.approx(2 * 6) if name == "InfoNCE" else num_items > 2 * 6
    assert found["peak"] > found["inputs"]


def test_an_objective_that_memory_does_not_know_is_named() -> None:
    with pytest.raises(SystemExit, match="InfoNEC not known; choose from InfoNCE"):
        load_script("bench/memory.py").main(objectives=["InfoNEC"])


def test_a_training_step_is_timed_by_the_difference_of_two_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("bench/training.py")
    clock = [0.0]

    def train(steps: int) -> None:
        clock[0] += 100 + 2 * steps

    monkeypatch.setattr("common.in_turn.__defaults__", (0, lambda: clock[0]))
    assert script.seconds_per_step({"a": train}, few=3, steps=5, repeats=2) == {"a": [2.0, 2.0]}


@pytest.mark.slow
def test_training_steps_of_two_tools_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("bench/training.py")
    out = tmp_path / "steps.jsonl"
    rows = ["InfoNCE", "InfoNCE+not_deterministic", "rival"]
    settings = {"batch_size": 4, "steps": 1, "repeats": 1, "chunk_size": 2, "out": out, "profile": tmp_path / "traces"}
    script.main(task="text", text_length=8, rows=rows, **settings)
    assert "no row InfoNCE+not_deterministic: deterministic changes nothing without a GPU" in capsys.readouterr().out
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["row"] for row in found] == ["InfoNCE", "rival"]
    assert found[0]["× InfoNCE"] == 1
    assert found[1]["× rival"] == 1
    assert all(row["launches"] > 100 and row["limit, ms"] > 0 for row in found)
    names = ["text-InfoNCE.json.gz", "text-InfoNCE.txt"]
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == names


def test_a_row_that_training_does_not_know_is_named() -> None:
    with pytest.raises(SystemExit, match=r"rows InfoNEC not known; choose from InfoNCE"):
        load_script("bench/training.py").main(rows=["InfoNEC"])


@pytest.mark.parametrize("repeats", [0, 1])
def test_index_finds_as_much_as_raw_faiss(capsys: pytest.CaptureFixture[str], repeats: int) -> None:
    settings = {"vectors": 1000, "dim": 16, "queries": 20, "seconds": 0, "factories": ["Flat"]}
    load_script("bench/index.py").main(repeats=repeats, **settings)
    printed = capsys.readouterr().out
    assert "dualenc 1.0000, faiss 1.0000" in printed
    assert printed.count("ratio") == 2 + repeats


def test_exact_searches_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("bench/exact_search.py")
    script.main(documents=300, dim=16, queries=20, k=7, repeats=1)
    assert sum(line.startswith(("| FAISS", "| torch")) for line in capsys.readouterr().out.splitlines()) >= 2
    scores, columns = np.array([[0.9, 0.5, 0.1]], np.float32), np.array([[4, 2, 7]])
    assert script.check_alike((scores, columns), (scores, columns)) == (0, 0)
    with pytest.raises(AssertionError, match="scores differ"):
        script.check_alike((scores + 1e-5, columns), (scores, columns))
    with pytest.raises(AssertionError, match="another document"):
        script.check_alike((scores, columns[:, [1, 0, 2]]), (scores, columns))


@pytest.mark.slow
def test_prefixes_are_judged_by_exact_search() -> None:
    script = load_script("matryoshka.py")
    rng = np.random.default_rng(0)
    names = [str(row) for row in range(30)]
    vectors = rng.standard_normal((30, 6)).astype(np.float32)
    noisy = vectors + 0.5 * rng.standard_normal((30, 6)).astype(np.float32)
    queries = Corpus([f"q{name}" for name in names], noisy, "vector")
    qrels = {f"q{name}": {name: 1} for name in names}
    test = script.Retrieval(RetrievalSet(queries, Corpus(names, vectors, "vector"), qrels))
    found = script.qualities(VectorEncoder(6, tower="identity"), test, [2, 3, 6])
    for dim, score in found.items():
        a, b = (v[:, :dim] / np.linalg.norm(v[:, :dim], axis=1, keepdims=True) for v in (queries.items, vectors))
        own = a @ b.T
        rank = (own > own.diagonal()[:, None]).sum(axis=1)
        expected = np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean()
        assert score == pytest.approx(expected, abs=1e-6)
    assert found[2] < found[6]


@pytest.mark.slow
def test_mined_negatives_and_scores_stand_with_the_pairs_of_their_query(tmp_path: Path) -> None:
    rows = [
        {"query_id": "1", "pos_id": ["0", "2"], "neg_id": ["3"], "pos_scores": [0.9, 0.8], "neg_scores": [0.5]},
        {"query_id": "0", "pos_id": ["1"], "neg_id": ["0", "3"], "pos_scores": [0.7], "neg_scores": [0.6, 0.4]},
    ]
    (tmp_path / "mined.jsonl").write_text("\n".join(map(json.dumps, rows)))
    vectors = np.eye(4, dtype=np.float32)
    kinds = {"left_modality": "vector", "right_modality": "vector"}
    pairs = PairDataset(vectors, vectors, [0, 1, 1, 2], [1, 0, 2, 3], **kinds)  # nothing was mined for query 2
    found = load_script("hard_negatives.py").with_negatives(pairs, tmp_path / "mined.jsonl")
    assert found.negatives.values.tolist() == [0, 3, 3, 3]
    assert found.negatives.lengths.tolist() == [2, 1, 1, 0]
    np.testing.assert_allclose(found.scores, [0.7, 0.9, 0.8, np.nan])
    np.testing.assert_allclose(found.negative_scores, [0.6, 0.4, 0.5, 0.5])


def test_filtered_searches_are_exact_where_everything_is_compared(capsys: pytest.CaptureFixture[str]) -> None:
    script = load_script("bench/filtered.py")
    script.main(vectors=500, dim=8, queries=5, factories=("Flat", "HNSW8"), shares=(0.5, 0.05))
    flat, hnsw = capsys.readouterr().out.split("HNSW8")
    assert flat.count("recall@10 1.000") == 2
    assert "5.0% kept: recall@10 1.000" in hnsw


def test_finetuning_tunes_past_the_edge_and_fills_its_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take two seconds; quality is best at τ = 0.05 and four times the first rate."""
    script = load_script("finetuning.py")
    trained: list[int] = []

    class Model:
        def __init__(self, settings: dict[str, float]) -> None:
            self.distance = abs(settings["temperature"] - 0.05) + abs(settings["rate"] - 4 * script.RATES[0])

        def eval(self) -> dict[str, float]:
            return {"ndcg@10": -self.distance}

    def train(task: object, row: object, settings: dict[str, float], steps: int) -> tuple[Model, float]:
        trained.append(steps)
        return Model(settings), 2.0 * steps

    monkeypatch.setattr(script, "train", train)
    task = script.Task(None, lambda quality: quality, lambda quality: quality, None)
    kept = script.Results(tmp_path / "runs.jsonl")
    trainings = script.Trainings(task, script.Row("InfoNCE"), {"row": "InfoNCE"}, kept)
    assert trainings.tune(20, script.RATES) == (0.05, 4 * script.RATES[0])
    assert trainings.tune(20, [1e-5]) == (0.05, 1e-5), "a single rate is taken as it is"
    assert set(trained[2:]) == {10}
    found = trainings.measure(60, 0.05, script.RATES[0], 1, tuning=False)
    assert (found["steps"], found["seconds"]) == (30, 60)
    before = len(trained)
    assert script.Results(tmp_path / "runs.jsonl").find({"budget": 60})["steps"] == 30
    assert trainings.measure(60, 0.05, script.RATES[0], 1, tuning=False) == found
    assert len(trained) == before
