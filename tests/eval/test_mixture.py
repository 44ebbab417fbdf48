"""One model of several sources against one for each: every way of mixing is trained and measured on
every source."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.eval_scripts import load_script


def write_source(folder: Path, words: list[str]) -> Path:
    """Forty queries, each with three words of its document."""
    draw = np.random.default_rng(0)
    (folder / "qrels").mkdir(parents=True)
    documents = [draw.choice(words, 12, replace=False) for _ in range(40)]
    for name, texts in (("corpus", documents), ("queries", [of[:3] for of in documents])):
        rows = [
            json.dumps({"_id": f"{name[0]}{i}", "text": " ".join(of)}) for i, of in enumerate(texts)
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    for split, rows in (("train", range(30)), ("test", range(30, 40))):
        (folder / "qrels" / f"{split}.tsv").write_text("\n".join(f"q{i}\tc{i}\t1" for i in rows))
    return folder


@pytest.mark.slow
def test_sources_together_take_as_many_steps_as_each_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        write_source(tmp_path / name, [f"{name}{i}" for i in range(30)]) for name in ("one", "two")
    ]
    load_script("mixture.py").main(folders, epochs=2, batch_size=4, seeds=1, words=16)
    table = capsys.readouterr().out.split("nDCG@10 on test queries")[1]
    rows = [row.split() for row in table.splitlines() if "±" in row]
    assert len(rows) == 5
    steps = [next(int(word) for word in row if word.isdigit()) for row in rows]
    # 24 pairs of each are trained on.
    assert steps == [12, 12, 24, 24, 24]
    assert all(0 <= float(word) <= 1 for row in rows for word in row if word.startswith("0."))
