"""`dualenc report`: curves and settings of runs on one page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dualenc.cli import main
from dualenc.evaluation.run_report import label, read_run
from dualenc.objectives import ISIR
from dualenc.training import RetrievalEvaluator
from tests.commands.in_process import failure
from tests.training.fakes import tiny_pairs
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


@pytest.mark.slow
def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / "a<b", 0.05, [0.1, 0.4, 0.3]), write_run(tmp_path / "other", 0.1, [0.1, 0.2, 0.25])]
    assert main(["report", *map(str, runs)]) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    assert ["a<b", "nDCG@10", "0.1000", "0.4000", "10", "0.3000"] in rows
    assert ["other", "nDCG@10", "0.1000", "0.2500", "20", "0.2500"] in rows
    assert ["objective.temperature", "0.05", "0.1"] in rows
    assert "class_path" not in printed
    page = (runs[0] / "report.html").read_text()
    assert "a&lt;b" in page
    assert "a<b" not in page
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert [caption.split(":")[0] for caption in captions] == [
        "nDCG@10 on held-out data",
        "training loss",
        "learning rate",
    ]


@pytest.mark.slow
def test_one_run_shows_curves_then_metrics_and_all_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "mine", 0.05, [0.1, 0.4, 0.3])
    (run / "recipe.yaml").write_text(
        "data: {class_path: dualenc.data.TablePairs, init_args: {path: 'https://user:secret@host/a.csv?token=secret'}}\n"
        "objective: {class_path: dualenc.objectives.SogCLR, init_args: {temperature: 0.05, gamma: null}}\n"
        "trainer: {batch_size: 32}\n"
    )
    assert main(["report", str(run)]) == 0
    assert "batch_size" not in capsys.readouterr().out
    page = (run / "report.html").read_text()
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings == ["Plots", "Metrics on held-out data", "Settings"]
    settings = dict(re.findall(r'<tr><td class="">([^<]*)</td><td class="">([^<]*)</td></tr>', page))
    assert settings == {
        "data": "TablePairs",
        "data.path": "https://host/a.csv",
        "objective": "SogCLR",
        "objective.temperature": "0.05",
        "objective.gamma": "–",
        "trainer.batch_size": "32",
    }
    assert "secret" not in page


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("evaluation/ndcg@10", "nDCG@10 on held-out data"),
        ("evaluation/sci/fact/mrr@10", "MRR@10 on sci/fact"),
        ("evaluation/image_to_text_recall@5", "image-to-text recall@5 on held-out data"),
        ("evaluation/knn_accuracy", "nearest-neighbour accuracy on held-out data"),
        ("evaluation/my_score", "my_score on held-out data"),
        ("loss", "training loss"),
        ("state/my_table", "state/my table"),
    ],
)
def test_quantities_have_plain_labels(name: str, expected: str) -> None:
    assert label(name) == expected


@pytest.mark.slow
def test_a_real_run(tmp_path: Path) -> None:
    train(tmp_path / "run", evaluator=FixedEvaluator(0.1, 0.3, 0.2, 0.4), evaluate_every=4)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / "page.html")]) == 0
    assert "similarity of training pairs: mean cosine" in (tmp_path / "page.html").read_text()
    assert read_run(tmp_path / "run").curve("evaluation/score")[1][:2] == [0.1, 0.3]


GARBAGE = {
    "metrics.jsonl": [
        b"\x00\xff\xfe",
        b"null",
        b"[1, 2]",
        b'"text"',
        b"{}",
        b'{"step": "a"}',
        b'{"step": 1e400}',
        b'{"step": 1, "loss": {"a": 1}}',
        b'{"step": 1, "loss": "x"}',
        b'{"step": 1, "loss": ' + b"9" * 400 + b"}",
        b'{"step": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
    ],
    "evaluations.jsonl": [
        b"\xff",
        b"[" * 100_000,
        b'{"step": 1, "similarities": 5}',
        b'{"step": 1, "similarities": {"positives": [0], "negatives": [0], "positive_mean": 1, "negative_mean": 1}}',
        b'{"step": 1, "similarities": {"positives": [1, 2], "negatives": [1], "positive_mean": 1, "negative_mean": 1}}',
        b'{"step": 1, "queries": {"scores": {"q": "x"}}}',
    ],
    "recipe.yaml": [b"\xff", b"a: [", b"x: " + b"[" * 3000, b"a: 2020-13-45", b"&a {b: *a}", b"a: " + b"9" * 5000],
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "garbage"), [(name, each) for name, all_of in GARBAGE.items() for each in all_of])
def test_garbage_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, garbage: bytes
) -> None:
    run = write_run(tmp_path / "run", 0.1, [0.1, 0.2])
    (run / name).write_bytes(garbage + b"\n")
    assert name in failure(capsys, "report", run)
    assert not (run / "report.html").exists()


def write_observed(folder: Path, before: dict[str, float], after: dict[str, float]) -> None:
    histogram = {"positives": [0] * 49 + [3], "negatives": [4] + [0] * 49, "positive_mean": 0.9, "negative_mean": -0.9}
    lines = [
        {
            "step": step,
            "similarities": histogram,
            "queries": {"metric": "ndcg@10", "scores": scores, "texts": {"q1": "<script>alert('q1')</script>\x1b[31m"}},
        }
        for step, scores in ((0, before), (20, after))
    ]
    (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.slow
def test_queries_and_similarities_of_two_runs_side_by_side(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", 0.05, [0.1, 0.4, 0.3]), write_run(tmp_path / "two", 0.1, [0.1, 0.2, 0.25])]
    scores = {f"q{number}": number / 100 for number in range(30)}
    write_observed(runs[0], scores, {name: 0.5 - score for name, score in scores.items()})
    write_observed(runs[1], scores, dict.fromkeys(scores, 0.7))
    assert main(["report", *map(str, runs)]) == 0
    page = (runs[0] / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(&#39;q1&#39;)&lt;/script&gt;\\x1b[31m" in page
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert [heading for heading in headings if "queries" in heading] == [
        f"{name}: best and worst queries {when}, by nDCG@10"
        for name in ("one", "two")
        for when in ("before training", "after step 20")
    ]
    table = page.split("one: best and worst queries before training")[1].split("</table>")[0]
    rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table)[1:]]
    assert rows[0] == ["best", "q29", "", "0.2900", "0.2100", "0.2900", "0.7000"]
    assert [row[1] for row in rows] == [f"q{number}" for number in (*range(29, 19, -1), *range(10))]
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert [caption for caption in captions if "cosines of held-out pairs" in caption] == [
        f"{name}: cosines of held-out pairs, and of their items with one another; overlap 0.000 → 0.000"
        for name in ("one", "two")
    ]


def test_a_broken_record_of_evaluations_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", 0.05, [0.1, 0.2])
    (run / "evaluations.jsonl").write_text('{"step": 0, "similarities": {"positives": 1}}\n')
    assert main(["report", str(run)]) == 2
    assert "evaluations.jsonl:1: no record of an evaluation" in capsys.readouterr().err


@pytest.mark.slow
def test_a_retrieval_run_tells_similarities_queries_and_chains(tmp_path: Path) -> None:
    pairs = tiny_pairs()
    objective = ISIR(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.2).double()
    evaluator = RetrievalEvaluator(pairs=tiny_pairs(12))
    train(tmp_path / "run", objective=objective, evaluator=evaluator, evaluate_every=4)
    found = read_run(tmp_path / "run")
    assert list(found.observed) == [0, 4, 8, 12]
    last = found.observed[12]
    assert last.similarities is not None
    assert last.similarities.positives.sum() == 12
    assert sum(last.scores.values()) / len(last.scores) == pytest.approx(
        found.curve("evaluation/ndcg@10")[1][-1], abs=1e-4
    )
    assert len(last.texts) == 12
    steps, moved = found.curve("state/chains_moved")
    assert steps == [3, 6, 9, 12]
    assert all(0 <= share <= 1 for share in moved)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "share of chains that left their item" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.slow
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
    assert [caption.split(":")[0] for caption in captions] == [
        "training loss",
        "selection of batches, loss",
        "training loss, by source",
    ]


def test_a_folder_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no metrics.jsonl with metrics in it; name the trainer.output of a run" in capsys.readouterr().err
