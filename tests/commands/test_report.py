"""`dualenc report`: curves and settings of runs on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dualenc.cli import main
from dualenc.commands.report import read_run
from tests.training.runs import FixedEvaluator, train


def write_run(folder: Path, tau: float, scores: list[float]) -> Path:
    folder.mkdir()
    lines = [{"step": 0, "evaluation/ndcg@10": scores[0]}]
    for number, score in enumerate(scores[1:], start=1):
        lines.append(
            {"step": 10 * number, "epoch": 1, "loss": 3.0 / number, "learning_rate": 0.1, "gradient_norm": None}
        )
        lines.append({"step": 10 * number, "evaluation/ndcg@10": score})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(f"objective:\n  class_path: SogCLR\n  init_args:\n    temperature: {tau}\n")
    return folder


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a<b", 0.05, [0.1, 0.4, 0.3]), write_run(tmp_path / "other", 0.1, [0.1, 0.2, 0.25])]
    assert main(["report", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["a<b", "ndcg@10", "0.1000", "0.4000", "10", "0.3000"] in rows
    assert ["other", "ndcg@10", "0.1000", "0.2500", "20", "0.2500"] in rows
    assert ["objective.init_args.temperature", "0.05", "0.1"] in rows
    assert "class_path" not in printed
    page = (runs[0] / "report.html").read_text()
    assert "a&lt;b" in page
    assert "a<b" not in page
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert [caption.split(":")[0] for caption in captions] == ["ndcg@10", "loss", "learning_rate"]


def test_a_real_run(tmp_path: Path) -> None:
    train(tmp_path / "run", evaluator=FixedEvaluator(0.1, 0.3, 0.2, 0.4), evaluate_every=4)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "positive_similarity: mean cosine of pairs" in (tmp_path / "page.html").read_text()
    assert read_run(tmp_path / "run").curve("evaluation/score")[1][:2] == [0.1, 0.3]


def test_a_folder_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no metrics.jsonl with metrics in it; name the trainer.output of a run" in capsys.readouterr().err
