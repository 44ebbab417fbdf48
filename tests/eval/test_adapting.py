"""Adapting queries to frozen vectors: held-out documents, and the docs' table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.eval_scripts import load_script

spread = load_script("frame.py").spread
DOCS = Path(__file__).parents[2] / "docs" / "results.md"
COLUMNS = [("medquad", "all"), ("medquad", "new"), ("papers", "new")]
COLUMNS += [("scifact", group) for group in ("all", "seen", "new")]


def test_queries_are_held_out_by_documents_of_what_was_observed(tmp_path: Path) -> None:
    script = load_script("adapting.py")
    pairs = np.stack([np.arange(100), [*range(60), *range(20), *range(60, 80)]], axis=1)
    documents = np.random.default_rng(0).standard_normal((80, 6))
    splits = {"train": pairs[:80], "test": pairs[80:]}
    task = script.write_task(tmp_path, documents, documents[pairs[:, 1]], splits)
    trained = {task.index.ids[row] for row in task.pairs.right_id}
    new, known = (set().union(*task.held_out[kind].qrels.values()) for kind in ("new", "known"))
    assert new | trained == task.listed == {f"c{row}" for row in range(60)}
    assert new.isdisjoint(trained)
    assert known <= trained
    assert len(task.pairs) == 72 - len(task.held_out["known"].qrels)
    folders = tmp_path / "data", tmp_path / "vectors", "toy"
    half = script.open_task(*folders, observe=lambda pairs: pairs.take(np.arange(40)))
    assert half.listed == {f"c{row}" for row in range(40)}


def test_the_table_of_the_docs_can_be_derived_from_the_store() -> None:
    script = load_script("adapting.py")
    derived = set()
    for runs in script.frame.by_seed(script.Store(script.STORE).runs):
        for group in {"all", "seen", "new"} & runs[0].outcome.keys():
            values = [each.outcome[group] for each in runs]
            if len(values) > 1:
                task = runs[0].settings["task"]
                derived.add((task, group, script.frame.spread(values)))
    section = DOCS.read_text("utf-8").split("## Adapting queries to an index")[1].split("\n##")[0]
    rows = [line.strip("|").split("|")[1:] for line in section.splitlines() if "±" in line]
    cells = [(*at, cell.strip()) for row in rows for at, cell in zip(COLUMNS, row) if "±" in cell]
    assert len(cells) == 33
    assert set(cells) <= derived
