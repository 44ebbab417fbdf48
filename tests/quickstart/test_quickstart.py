"""`dualenc quickstart` from end to end, at toy size and without a network."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dualenc.commands import quickstart as command
from dualenc.commands.quickstart import Docstring, write_collection
from dualenc.data import BeirPairs, read_beir
from dualenc.encoders import TextEncoder
from dualenc.errors import DualencError

ARGUMENTS = ["--max-docs", "400", "--test-docs", "50", "--steps", "12", "--vocab-size", "1500"]


def test_trains_indexes_searches_and_says_what_to_type_next(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    done = subprocess.run(
        [sys.executable, "-m", "dualenc", "quickstart", *ARGUMENTS],
        cwd=tmp_path,
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for words in ("untrained", "BM25", "trained", "Search: sort a list", "dualenc search quickstart-run/index"):
        assert words in done.stdout
    run = tmp_path / "quickstart-run"
    assert (run / "model" / "model.safetensors").exists()
    assert json.loads((run / "index" / "meta.json").read_text())["count"] == 400


def test_leaves_a_folder_of_something_else_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [sys.executable, "-m", "dualenc", "quickstart", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds something that is no quickstart" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("given", [{"max_docs": 0}, {"max_docs": -1}, {"test_docs": 0}, {"steps": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused_before_any_work(given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=f"--{next(iter(given)).replace('_', '-')} is"):
        command.quickstart(str(tmp_path / "out"), **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("step_seconds", "elapsed", "rest", "expected"),
    [
        (0.2, 30, 30, 600),  # two idle cores: all of them, though more would fit
        (0.5, 60, 80, 120),  # (240 - 60) / 1.25 is 144 seconds; 64 are left for the steps
        (0.33, 60, 80, 190),  # 193 steps, in tens
        (5.0, 200, 100, 20),  # hopeless: the fewest
        (0.5, 300, 0, 20),  # late already
    ],
)
def test_as_many_steps_as_end_within_four_minutes(step_seconds, elapsed, rest, expected) -> None:
    steps = command.affordable_steps(step_seconds, elapsed, rest)
    assert steps == expected
    if steps > command.FEWEST_STEPS:
        assert elapsed + command.MARGIN * (rest + steps * step_seconds) <= command.SECONDS


def test_the_machine_is_measured_by_the_clock_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    """A clock that moves on by two seconds whenever it is asked; the corpus is larger than the sample of it."""
    count = 1200
    names = [f"module_{n}.function_{n % 7}" for n in range(count)]
    docstrings = [Docstring(name, f"Compute thing number {n} of {n % 13}.", "More.") for n, name in enumerate(names)]
    write_collection(tmp_path, docstrings, 100, seed=0)
    pairs, collection = BeirPairs(tmp_path, "train"), read_beir(tmp_path, "test")
    model = command._new_model(pairs.corpus.items, 500)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clock = itertools.count(0, 2)
    step_seconds, rest = command.measure(model, pairs, collection, 0, clock=lambda: next(clock))
    assert step_seconds == 2
    assert rest == pytest.approx(3 * 2 * (count + 100) / 1000)
    assert isinstance(model, TextEncoder)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_steps_that_are_chosen_are_told(monkeypatch, tmp_path: Path, capsys) -> None:
    trained = []
    monkeypatch.setattr(command, "measure", lambda *_: (1.0, 40.0))
    monkeypatch.setattr(command, "_train", lambda *arguments: trained.append(arguments[3]) or (None, None))
    for name in ("_read", "_bm25", "_index", "_table", "_search"):
        monkeypatch.setattr(command, name, lambda *_: None)
    monkeypatch.setattr(command, "_start", lambda *_: (None, None))
    times = iter([1000.0, 1090.0, 1200.0])
    monkeypatch.setattr(command, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    command.quickstart(out=str(tmp_path / "run"))
    assert trained == [80]
    assert "A step takes 1.00 s on this machine now: 80 steps of 600, to end within four minutes" in (
        capsys.readouterr().out
    )
