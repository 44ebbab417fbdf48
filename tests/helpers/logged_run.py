"""The log of a run, without the run."""

from __future__ import annotations

import json
from pathlib import Path


def write_run(folder: Path, scores: list[float]) -> Path:
    """A run folder with the metrics of one evaluation before and one after each ten steps."""
    folder.mkdir()
    lines = [{"step": 0, "evaluation/ndcg@10": scores[0]}]
    for number, score in enumerate(scores[1:], start=1):
        values = {"epoch": 1, "loss": 3.0 / number, "learning_rate": 0.1, "gradient_norm": None}
        lines.append({"step": 10 * number, **values})
        lines.append({"step": 10 * number, "evaluation/ndcg@10": score})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
