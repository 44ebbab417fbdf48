"""Small batches compared: tuned alike, every run kept, counted in pairs and in passes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from dualenc.errors import DualencError
from tests.helpers.eval_scripts import load_script

WORDS = [f"word{number}" for number in range(50)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty queries, each with three words of its document; no dev.tsv."""
    draw, path = np.random.default_rng(0), tmp_path / "toy"
    (path / "qrels").mkdir(parents=True)
    documents = [draw.choice(WORDS, 12, replace=False) for _ in range(40)]
    for name, texts in (("corpus", documents), ("queries", [words[:3] for words in documents])):
        rows = [
            json.dumps({"_id": f"{name[0]}{i}", "text": " ".join(words)})
            for i, words in enumerate(texts)
        ]
        (path / f"{name}.jsonl").write_text("\n".join(rows))
    for split, rows in (("train", range(30)), ("test", range(30, 40))):
        lines = [f"q{i}\tc{i}\t1" for i in rows]
        (path / "qrels" / f"{split}.tsv").write_text(
            "\n".join(["query-id\tcorpus-id\tscore", *lines])
        )
    return path


@pytest.mark.slow
def test_runs_are_tuned_kept_and_reported(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = load_script("small_batch.py")
    tasks = sys.modules["comparison_tasks"]
    monkeypatch.setattr(tasks, "HELD_OUT", 6)
    for module in (script, sys.modules["comparison_table"]):
        monkeypatch.setattr(module, "ORDINARY_BATCH", 4)
    monkeypatch.setattr(script, "BEYOND_EDGE", 0)
    script.TASKS["few"] = lambda path, model: tasks.on_features(
        *tasks.beir_parts(path), 1e-3, dim=8
    )
    results = tmp_path / "results.jsonl"
    how = {
        "objectives": ["InfoNCE", "ISIR"],
        "batch_sizes": [4],
        "epochs": 2,
        "seeds": 2,
        "results": results,
    }
    script.run("few", folder, **how)
    lines = results.read_text().splitlines()
    # Three temperatures, two more rates, and one more seed.
    assert len(lines) == 2 * 6
    for line in lines:
        found = json.loads(line)
        assert found["settings"]["pairs_seen"] == 2 * 24
        assert (found["extra_encodes"] > 0.5) == (found["settings"]["objective"] == "ISIR")
        assert found["curve"][0][0] == 0
        assert 43 <= found["curve"][-1][0] <= 60
    script.run("few", folder, **how)
    assert results.read_text().splitlines() == lines
    script.run("few", folder, **how, equal="passes")
    added = [json.loads(line) for line in results.read_text().splitlines()[len(lines) :]]
    chosen = [json.loads(line) for line in lines if '"ISIR"' in line]
    for one in added:
        own = one["settings"]
        assert (own["objective"], own["equal"]) == ("ISIR", "passes")
        alike = [
            of
            for of in chosen
            if all(of["settings"][k] == own[k] for k in ("rate", "temperature", "seed"))
        ]
        assert own["pairs_seen"] == round(48 / (1 + alike[0]["extra_encodes"] / 2))
    script.run("few", folder, **how, equal="seconds")
    longer = [
        json.loads(line)["settings"]
        for line in results.read_text().splitlines()[len(lines) + len(added) :]
    ]
    assert longer
    assert all(own["equal"] == "seconds" and own["pairs_seen"] > 48 for own in longer)
    # Of the quicker objective two lengths were tried.
    assert len({own["pairs_seen"] for own in longer if own["seed"] == 0}) == 2
    capsys.readouterr()
    script.report(results, figures=tmp_path / "figures", samples=100)
    printed = capsys.readouterr().out
    assert "InfoNCE" in printed
    assert "ISIR" in printed
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {
        "few_toy_48_pairs.svg",
        "few_toy_48_seconds.svg",
    }


@pytest.mark.slow
def test_a_loss_named_by_its_import_path_is_a_row(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = """
from pathlib import Path


class Attraction:
    def __init__(self, temperature):
        self.temperature = temperature

    def set_progress(self, fraction):
        with Path(__file__).with_name("progress.txt").open("a") as file:
            print(fraction, file=file)

    def __call__(self, left, right):
        return -(left * right).sum(dim=1).mean() / self.temperature
"""
    (tmp_path / "attraction_alone.py").write_text(loss)
    monkeypatch.syspath_prepend(str(tmp_path))
    script = load_script("small_batch.py")
    tasks = sys.modules["comparison_tasks"]
    monkeypatch.setattr(tasks, "HELD_OUT", 6)
    script.TASKS["few"] = lambda path, model: tasks.on_features(
        *tasks.beir_parts(path), 1e-3, dim=8
    )
    how = {
        "batch_sizes": [4],
        "pairs": 8,
        "epochs": 1,
        "seeds": 1,
        "temperatures": [0.1],
        "rates": [1.0],
    }
    results = tmp_path / "results.jsonl"
    script.run("few", folder, objectives=["attraction_alone.Attraction"], results=results, **how)
    (line,) = results.read_text().splitlines()
    found = json.loads(line)
    assert found["settings"]["objective"] == "attraction_alone.Attraction"
    # Two steps of four pairs, which move the held-out quality.
    assert found["curve"][-1][0] == 8
    assert found["curve"][-1][2] != found["curve"][0][2]
    assert (tmp_path / "progress.txt").read_text().split() == ["0.0", "0.5"]
    assert "attraction_alone.Attraction B=4: 0." in capsys.readouterr().out
    with pytest.raises(
        DualencError, match=r"attraction_alone\.Other: module .* has no attribute 'Other'; install"
    ):
        script.run(
            "few",
            tmp_path / "no data",
            objectives=["attraction_alone.Other"],
            results=results,
            **how,
        )
