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


def test_the_sources_of_a_mixture_share_a_plot_and_have_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, last in (("a", 1.0), ("b", 1.5)):
        (tmp_path / name).mkdir()
        values = (
            {"loss": 3.0, "loss/one": 2.0, "selection/loss": 4.0},
            {"loss": 2.0, "loss/one": last, "loss/two": 5.0},
        )
        lines = [json.dumps({"step": 10 * number, **of}) for number, of in enumerate(values, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["report", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "one", "2.0000", "1.0000"] in rows
    assert ["b", "one", "2.0000", "1.5000"] in rows
    assert ["b", "two", "5.0000", "5.0000"] in rows
    assert not any("selection/loss" in row or "loss" in row[1:2] for row in rows)
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", (tmp_path / "a" / "report.html").read_text())
    assert [caption.split(":")[0] for caption in captions] == ["loss", "selection/loss", "loss by source"]


def test_a_folder_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no metrics.jsonl with metrics in it; name the trainer.output of a run" in capsys.readouterr().err
