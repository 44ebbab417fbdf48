"""Experiments and benchmarks run, in small, and print numbers that are known beforehand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dualenc.data import Corpus, RetrievalSet
from dualenc.encoders import VectorEncoder
from tests.helpers import toy
from tests.helpers.eval_scripts import load_script


@pytest.mark.slow
def test_estimator_bias_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("estimator_bias.py")
    script.main(
        num_pairs=16, batch_size=8, epochs=8, warm_up=1, out=tmp_path / "drawn" / "bias.png"
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.OBJECTIVES)
    # The oracle has neither bias nor error.
    assert printed.split("ExactGlobal")[1].split()[:4] == ["0.0000"] * 4
    assert (tmp_path / "drawn" / "bias.png").stat().st_size > 10_000


@pytest.mark.slow
def test_bias_of_the_sampled_sum_is_small_beside_that_of_the_nearest_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = load_script("frozen_bias.py")
    script.main(rows=2000, num_queries=32, batch_size=8, nearest=16, sampled=400, repeats=4)
    last = capsys.readouterr().out.split("0.1000")[1].split()
    bias, _, step_error, nearest_alone = (float(number) for number in last[:4])
    assert bias < 0.02 < step_error < nearest_alone


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
    script.main(
        encoder="resnet18", batch_sizes=[4], num_items=50, image_size=32, repeats=1, device="cpu"
    )
    printed = capsys.readouterr().out
    assert all(name in printed for name in script.OBJECTIVES)
    assert printed.split("InfoNCE")[1].split()[3] == "1.0000"


@pytest.mark.slow
def test_training_steps_of_two_tools_are_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("bench/training.py")
    out = tmp_path / "steps.jsonl"
    rows = ["InfoNCE", "InfoNCE+not_deterministic", "rival"]
    settings = {
        "batch_size": 4,
        "steps": 1,
        "repeats": 1,
        "chunk_size": 2,
        "out": out,
        "profile": tmp_path / "traces",
    }
    script.main(task="text", text_length=8, rows=rows, **settings)
    assert (
        "no row InfoNCE+not_deterministic: deterministic changes nothing without a GPU"
        in capsys.readouterr().out
    )
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["row"], row["repeats"]) for row in found] == [("InfoNCE", 1), ("rival", 1)]
    assert found[0]["× InfoNCE"] == 1
    assert found[1]["× rival"] == 1
    assert all(row["launches"] > 100 and row["limit, ms"] > 0 for row in found)
    names = ["text-InfoNCE.json.gz", "text-InfoNCE.txt"]
    assert sorted(file.name for file in (tmp_path / "traces").iterdir()) == names


def test_a_rival_that_is_not_installed_has_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("bench/training.py")
    monkeypatch.setitem(sys.modules, "lightly", None)
    options = script.Options(2, 1, 1, 0, "", 8, None, None, ["rival", "InfoNCE"], None)
    task = script.TASKS["views"](options, tmp_path)
    assert [row.name for row in script.rows_of(task, options)] == ["InfoNCE"]
    assert "views: no row rival: " in capsys.readouterr().out


def test_training_steps_of_a_stopped_run_are_in_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("bench/training.py")
    seconds = iter([0.1, 0.2])

    def seconds_per_step(*_: object) -> float:
        if (value := next(seconds, None)) is None:
            raise KeyboardInterrupt
        return value

    monkeypatch.setattr(script, "seconds_per_step", seconds_per_step)
    monkeypatch.setattr(script, "profile_row", lambda *_: {})
    monkeypatch.setattr(script, "limits", lambda *_: {"float32": 0.05})
    out = tmp_path / "steps.jsonl"
    out.write_text("{}\n")
    with pytest.raises(KeyboardInterrupt):
        script.main(task="views", batch_size=2, steps=1, rows=["InfoNCE"], out=out)
    earlier, row = map(json.loads, out.read_text().splitlines())
    assert earlier == {}
    assert (row["repeats"], row["lowest"], row["highest"]) == (2, 100, 200)


def test_clock_reads_between_two_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    profiling = load_script("bench/profiling.py")
    clock = profiling.StepClock(skipped=1, steps=2)
    times = iter([10.0, 13.0])
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    for _ in range(5):
        clock()
    assert clock.seconds_per_step == 1.5


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
        a, b = (
            v[:, :dim] / np.linalg.norm(v[:, :dim], axis=1, keepdims=True)
            for v in (queries.items, vectors)
        )
        own = a @ b.T
        rank = (own > own.diagonal()[:, None]).sum(axis=1)
        expected = np.where(rank < 10, 1 / np.log2(rank + 2), 0).mean()
        assert score == pytest.approx(expected, abs=1e-6)
    assert found[2] < found[6]


@pytest.mark.slow
def test_migrating_to_a_linear_image_of_a_model_loses_little(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script("migrating.py")
    model = toy.text_model(tmp_path / "old" / "model")
    collection = toy.write_beir(tmp_path / "beir", documents=300, queries=40)
    script.project(str(model), tmp_path / "new" / "model", dim=48)
    script.measure(str(model), str(tmp_path / "new" / "model"), collection, tmp_path / "work")
    printed = capsys.readouterr().out.split("beir, map of")[1]
    lines = [line for line in printed.splitlines() if line.strip().startswith(("old", "new"))]
    assert len(lines) == 7
    # The last column is what a system finds of the new model's ten: of mapped documents nearly all.
    assert all(float(line.split()[-1]) > 0.9 for line in lines[2:])
    assert lines[-1].split()[-2:] == ["1.0000", "1.0000"]
