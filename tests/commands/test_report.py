"""`dualenc report`: curves, metrics and settings of runs on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dualenc.commands.report import read_run
from dualenc.training import RetrievalEvaluator
from tests.commands.in_process import failure, run
from tests.training.fakes import tiny_pairs
from tests.training.runs import train


def write_run(folder: Path, tau: float, scores: list[float]) -> Path:
    folder.mkdir()
    lines = [{"step": 0, "evaluation/ndcg@10": scores[0]}]
    for number, score in enumerate(scores[1:], start=1):
        values = {"epoch": 1, "loss": 3.0 / number, "learning_rate": 0.1, "gradient_norm": None}
        lines.append({"step": 10 * number, **values})
        lines.append({"step": 10 * number, "evaluation/ndcg@10": score})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.yaml").write_text(
        "data: {class_path: dualenc.data.TablePairs, init_args: {path: 'https://user:secret@host/a.csv?token=secret'}}\n"
        f"objective: {{class_path: dualenc.objectives.SogCLR, init_args: {{temperature: {tau}, gamma: null}}}}\n"
    )
    return folder


@pytest.mark.slow
def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a<b", 0.05, [0.1, 0.4, 0.3]), write_run(tmp_path / "other", 0.1, [0.1, 0.2, 0.25])]
    scores = {f"q{number}": number / 100 for number in range(30)}
    texts = {"q1": "<script>alert('q1')</script>\x1b[31m"}
    with open(runs[0] / "evaluations.jsonl", "w") as file:
        for step, values in ((0, scores), (20, {name: 0.5 - score for name, score in scores.items()})):
            queries = {"metric": "ndcg@10", "scores": values, "texts": texts}
            file.write(json.dumps({"step": step, "queries": queries}) + "\n")
    run("report", *runs)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a<b", "ndcg@10", "0.1000", "0.4000", "10", "0.3000"] in rows
    assert ["other", "ndcg@10", "0.1000", "0.2500", "20", "0.2500"] in rows
    assert ["objective.temperature", "0.05", "0.1"] in rows
    page = (runs[0] / "report.html").read_text()
    assert "a&lt;b" in page
    assert "a<b" not in page
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;q1&#39;)&lt;/script&gt;\\x1b[31m" in page
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == ["evaluation/ndcg@10", "loss", "learning_rate"]
    table = page.split("best and worst queries after training")[1]
    cells = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    assert cells[0] == ["best", "q0", "0.5000", "0.0000", ""]
    assert [row[1] for row in cells] == [f"q{number}" for number in (*range(10), *range(29, 19, -1))]


@pytest.mark.slow
def test_one_run_has_all_its_settings_without_secrets(tmp_path: Path) -> None:
    run("report", write_run(tmp_path / "mine", 0.05, [0.1, 0.4, 0.3]), "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page)) == {
        "mine": "20 steps",
        "data": "TablePairs",
        "data.path": "https://host/a.csv",
        "objective": "SogCLR",
        "objective.temperature": "0.05",
        "objective.gamma": "–",
    }
    assert "secret" not in page


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    train(tmp_path / "run", evaluator=RetrievalEvaluator(pairs=tiny_pairs(12)), evaluate_every=4)
    records = read_run(tmp_path / "run")
    assert list(records.scores) == [0, 4, 8, 12]
    scores = records.scores[12].scores.values()
    assert sum(scores) / len(scores) == pytest.approx(records.curve("evaluation/ndcg@10")[1][-1], abs=1e-4)
    run("report", tmp_path / "run")


GARBAGE = [
    ("metrics.jsonl", b"\x00\xff\xfe"),
    ("metrics.jsonl", b'{"step": 1, "loss": {"a": 1}}'),
    ("metrics.jsonl", b'{"step": 1, "loss": ' + b"9" * 400 + b"}"),
    ("evaluations.jsonl", b'{"step": 1, "queries": {"scores": {"q": "x"}}}'),
    ("recipe.yaml", b"x: " + b"[" * 3000),
    ("recipe.yaml", b"&a {b: *a}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "garbage"), GARBAGE)
def test_garbage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, garbage: bytes) -> None:
    folder = write_run(tmp_path / "run", 0.1, [0.1, 0.2])
    (folder / name).write_bytes(garbage + b"\n")
    assert name in failure(capsys, "report", folder)
    assert not (folder / "report.html").exists()
