"""Adapting queries to frozen vectors: held-out and mined documents, and the docs' table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.eval_scripts import load_script

spread = load_script("frame.py").spread
DOCS = Path(__file__).parents[2] / "docs" / "results.md"
COLUMNS = [("medquad", "all"), ("medquad", "new"), ("papers", "new")]
COLUMNS += [("scifact", group) for group in ("all", "seen", "new")]


def test_documents_are_held_out_and_mined_ones_are_near_and_no_positives(tmp_path: Path) -> None:
    script = load_script("adapting.py")
    pairs = np.stack([np.arange(100), [*range(60), *range(20), *range(60, 80)]], axis=1)
    documents = np.random.default_rng(0).standard_normal((80, 6))
    splits = {"train": pairs[:80], "test": pairs[80:]}
    task = script.write_task(tmp_path, documents, documents[pairs[:, 1]], splits)
    new = set().union(*task.held_out["new"].qrels.values())
    assert new | task.trained == {f"c{row}" for row in range(60)}
    assert new.isdisjoint(task.trained)
    both = script.Task(tmp_path / "data", tmp_path / "vectors", "toy", hold_known=True)
    known = both.held_out["known"].qrels
    assert set().union(*known.values()) <= both.trained
    assert (len(task.pairs), len(both.pairs)) == (72, 72 - len(known))
    settings = {"method": "InfoNCE, mined", "map": "dense", "temperature": 0.1, "rate": 1e-3}
    training = script.Training(task, {**settings, "seed": 0, "steps": 1})
    training.mine()
    for query, own in task.pairs.tolist():
        scores = (task.documents @ task.queries[query]).tolist()
        near = [d for d in range(80) if d != own and scores[d] <= 0.95 * scores[own]]
        expected = sorted(near, key=lambda d: -scores[d])[:8]
        assert [d for d in training.mined[query].tolist() if d >= 0] == expected


def test_the_table_of_the_docs_can_be_derived_from_the_store() -> None:
    script = load_script("adapting.py")
    derived = set()
    for runs in script.frame.by_seed(script.Store(script.STORE).runs):
        for group in {"all", "seen", "new"} & runs[0].outcome.keys():
            values = [each.outcome[group] for each in runs]
            if len(values) > 1:
                task = runs[0].settings["task"]
                derived.add((task, group, script.frame.spread(values)))
    section = DOCS.read_text("utf-8").split("## Adapting queries to an index")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|")[1:] for line in section.splitlines() if "±" in line]
    cells = [(*at, cell.strip()) for row in rows for at, cell in zip(COLUMNS, row) if "±" in cell]
    assert len(cells) == 33
    assert set(cells) <= derived
