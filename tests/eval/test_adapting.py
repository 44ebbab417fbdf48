"""Adapting queries to frozen vectors: what is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.helpers.eval_scripts import load_script


def test_queries_are_held_out_by_documents(tmp_path: Path) -> None:
    script = load_script("adapting_task.py")
    pairs = np.stack([np.arange(100), [*range(60), *range(20), *range(60, 80)]], axis=1)
    documents = np.random.default_rng(0).standard_normal((80, 6))
    splits = {"train": pairs[:80], "test": pairs[80:]}
    task = script.open_task(
        *script.write_judged(tmp_path, documents, documents[pairs[:, 1]], splits)
    )
    trained = script.ids_of(task.pairs, task.documents)
    new, known = (set().union(*task.held_out[kind].qrels.values()) for kind in ("new", "known"))
    assert new | trained == task.listed == {f"c{row}" for row in range(60)}
    assert new.isdisjoint(trained)
    assert known <= trained
    assert len(task.pairs) == 72 - len(task.held_out["known"].qrels)
    numbers = {"all queries": 20, "seen queries": 0, "new queries": 20}
    assert numbers.items() <= task.measure().items()
