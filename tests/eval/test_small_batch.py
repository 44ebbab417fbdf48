"""Small batches compared: tuned alike, every run kept, counted in pairs and in passes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.eval.scripts import load_script

WORDS = [f"word{number}" for number in range(50)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty queries, each with three words of its document; no dev.tsv."""
    draw, path = np.random.default_rng(0), tmp_path / "toy"
    (path / "qrels").mkdir(parents=True)
    documents = [draw.choice(WORDS, 12, replace=False) for _ in range(40)]
    for name, texts in (("corpus", documents), ("queries", [words[:3] for words in documents])):
        rows = [json.dumps({"_id": f"{name[0]}{i}", "text": " ".join(words)}) for i, words in enumerate(texts)]
        (path / f"{name}.jsonl").write_text("\n".join(rows))
    for split, rows in (("train", range(30)), ("test", range(30, 40))):
        lines = [f"q{i}\tc{i}\t1" for i in rows]
        (path / "qrels" / f"{split}.tsv").write_text("\n".join(["query-id\tcorpus-id\tscore", *lines]))
    return path


@pytest.mark.slow
def test_runs_are_tuned_kept_and_reported(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("small_batch.py")
    tasks = sys.modules["comparison_tasks"]
    monkeypatch.setattr(tasks, "HELD_OUT", 6)
    for module in (script, sys.modules["comparison_table"]):
        monkeypatch.setattr(module, "ORDINARY_BATCH", 4)
    monkeypatch.setattr(script, "BEYOND_EDGE", 0)
    script.TASKS["few"] = lambda path, model: tasks.on_features(*tasks.beir_parts(path), 1e-3, dim=8)
    results = tmp_path / "results.jsonl"
    how = {"objectives": ["InfoNCE", "ISIR"], "batch_sizes": [4], "epochs": 2, "seeds": 2, "results": results}
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
        alike = [of for of in chosen if all(of["settings"][k] == own[k] for k in ("rate", "temperature", "seed"))]
        assert own["pairs_seen"] == round(48 / (1 + alike[0]["extra_encodes"] / 2))
    script.run("few", folder, **how, equal="seconds")
    longer = [json.loads(line)["settings"] for line in results.read_text().splitlines()[len(lines) + len(added) :]]
    assert longer
    assert all(own["equal"] == "seconds" and own["pairs_seen"] > 48 for own in longer)
    # Of the quicker objective two lengths were tried.
    assert len({own["pairs_seen"] for own in longer if own["seed"] == 0}) == 2
    monkeypatch.setattr(script, "BEYOND_EDGE", 2)
    script.run("few", folder, **how)
    runs = [json.loads(line) for line in results.read_text().splitlines()]
    alike = {"seed": 0, "equal": "pairs", "objective": "InfoNCE", "rate": 1.0}
    quality = {o["settings"]["temperature"]: o["validation"] for o in runs if alike.items() <= o["settings"].items()}
    best = max(sorted(quality), key=quality.__getitem__)
    assert best not in (min(quality), max(quality)) or len(quality) == 5
    capsys.readouterr()
    script.report(results, figures=tmp_path / "figures", samples=100)
    printed = capsys.readouterr().out
    assert "InfoNCE" in printed
    assert "ISIR" in printed
    assert {file.name for file in (tmp_path / "figures").iterdir()} == {
        "few_toy_48_pairs.svg",
        "few_toy_48_seconds.svg",
    }


def test_held_out_queries_are_not_trained_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("comparison_tasks.py")
    monkeypatch.setattr(script, "HELD_OUT", 6)
    pairs, validation, test = script.beir_parts(folder)
    assert len(pairs) == 24
    assert validation.queries.ids == [f"q{i}" for i in range(24, 30)]
    assert test.queries.ids == [f"q{i}" for i in range(30, 40)]
    assert not {pairs.left_items[i] for i in range(24)} & {validation.queries.items[i] for i in range(6)}


@pytest.mark.slow
def test_settings_are_tuned_once_for_other_numbers_of_pairs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = load_script("small_batch.py")
    monkeypatch.setattr(script, "BEYOND_EDGE", 0)
    tasks = sys.modules["comparison_tasks"]
    script.TASKS["few"] = lambda path, model: tasks.on_features(*tasks.beir_parts(path), 1e-3, dim=8)
    results = tmp_path / "results.jsonl"
    how = {"objectives": ["InfoNCE"], "batch_sizes": [4], "seeds": 2, "rates": [1.0], "results": results}
    script.run("few", folder, **how, pairs=12, epochs=4)
    script.run("few", folder, **how, pairs=6, epochs=8, tune_pairs=12, tune_epochs=4)
    found = [json.loads(line)["settings"] for line in results.read_text().splitlines()]
    assert [own["task"] for own in found] == ["few toy, 12 pairs"] * 4 + ["few toy, 6 pairs"] * 2
    assert {own["pairs_seen"] for own in found} == {48}


def test_a_part_of_the_pairs_has_only_its_own_items() -> None:
    script = load_script("comparison_tasks.py")
    whole = script.PairDataset(list("abcd"), list("uvwx"), [0, 1, 2, 3, 3], [0, 0, 1, 2, 3])
    part = script.some_of(whole, 3)
    assert len(part) == 3
    known = {(pair.left, pair.right) for pair in (whole[i] for i in range(5))}
    assert {(pair.left, pair.right) for pair in (part[i] for i in range(3))} <= known
    assert (part.num_left, part.num_right) == (len(set(part.left_id.tolist())), len(set(part.right_id.tolist())))


def test_bodies_of_functions_are_found_by_their_signatures(tmp_path: Path) -> None:
    script = load_script("functions.py")
    assert script.words("readHTTPHeader_2 __init") == ["read", "http", "header", "init"]
    names = [f"alpha{letter} beta{letter} gamma{letter}".split() for letter in "bcdefghi"]
    for number, own in enumerate(names):
        body = "\n".join(f"    {one} = {two}.{three}(key={one})" for one in own for two in own for three in own)
        (tmp_path / f"file{number}.py").write_text(f'def find{own[0]}(where):\n    """Never read."""\n{body}\n')
    (tmp_path / "wrong.py").write_text("def (")
    script.main(tmp_path / "out", held_out=2, roots=[tmp_path])
    parts = {split: script_parts(tmp_path / "out", split) for split in ("train", "dev", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 4, "dev": 2, "test": 2}
    texts = [json.loads(line)["text"] for line in (tmp_path / "out" / "corpus.jsonl").read_text().splitlines()]
    assert len(texts) == 8
    assert not any("never" in text or "findalpha" in text for text in texts)


def script_parts(folder: Path, split: str) -> list[str]:
    """The rows of a split's judgements."""
    return (folder / "qrels" / f"{split}.tsv").read_text().splitlines()[1:]
