"""`dualenc quickstart`: docstrings, the collection, the steps, and all of it at toy size and
without a network."""

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

from dualenc.data import BeirPairs, read_beir
from dualenc.errors import DualencError
from dualenc.workflows import run_quickstart
from dualenc.workflows.run_quickstart import Docstring, read_docstrings, write_collection


@pytest.mark.slow
def test_trains_indexes_searches_and_says_what_to_type_next(tmp_path: Path) -> None:
    offline = {
        "HF_HUB_OFFLINE": "1",
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }
    words = [
        sys.executable,
        "-m",
        "dualenc",
        "quickstart",
        "--max-docs",
        "400",
        "--test-docs",
        "50",
        "--steps",
        "12",
    ]
    words += ["--out", "a run"]
    environment = {**os.environ, **offline}
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for shown in (
        "untrained",
        "BM25",
        "trained",
        "sort a list of numbers",
        "dualenc search 'a run'/index",
    ):
        assert shown in done.stdout
    assert (tmp_path / "a run" / "model" / "model.safetensors").exists()
    assert json.loads((tmp_path / "a run" / "index" / "meta.json").read_text())["count"] == 400


def test_documents_that_leave_no_batch_to_train_on_are_refused_before_any_work(
    tmp_path: Path,
) -> None:
    with pytest.raises(DualencError, match="--max-docs is 177; it must be at least 178"):
        run_quickstart.quickstart(out=str(tmp_path / "out"), max_docs=177, test_docs=50)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "expected"), [(0.01, 600), (1, 130), (100, 20)])
def test_steps_follow_the_speed_of_the_machine_and_the_model_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int
) -> None:
    """A clock that moves on by the time of a step whenever it is read."""
    write_collection(
        tmp_path, [Docstring(f"f{n}", f"Compute number {n}.", "More.") for n in range(300)], 50
    )
    pairs = BeirPairs(tmp_path, "train")
    model = run_quickstart.new_model(pairs.corpus.items)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clock = itertools.count(0, seconds)
    monkeypatch.setattr(run_quickstart, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert run_quickstart.affordable_steps(model, pairs, 0) == expected
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


SOURCE = '''
raise RuntimeError("this module must not be imported")

class Stack:
    """A pile of things to take from the top.

    The last thing put on is the first that is taken off, as with plates in a cupboard,
    and so on and so forth.
    """

    def push(self, item):
        """Put one thing on top of the pile.

        Args: item is whatever you like; the pile keeps a reference to it
        and never looks inside it at all.
        """

    def short(self):
        """Has no more than a summary line."""
'''


def test_names_summaries_and_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"__init__.py": "", "stack.py": SOURCE, "broken.py": "def (:", "test_stack.py": SOURCE}
    (tmp_path / "plates").mkdir()
    for name, source in files.items():
        (tmp_path / "plates" / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "no-such-folder")})
    found = read_docstrings(10, packages=["plates"])
    assert [d.name for d in found] == ["plates.stack.Stack", "plates.stack.Stack.push"]
    assert found[0].summary == "A pile of things to take from the top."
    assert found[1].rest.startswith("Args: item is whatever you like; the pile keeps")
    assert not any(name.startswith("plates.") for name in sys.modules)


DOCSTRINGS = [
    Docstring(f"package.function_{i}", f"Summary number {i} here.", f"rest of docstring {i}")
    for i in range(20)
]


def test_reads_as_training_pairs_and_as_a_retrieval_set(tmp_path: Path) -> None:
    write_collection(tmp_path / "data", DOCSTRINGS, num_test=5)
    pairs, test = BeirPairs(tmp_path / "data", "train"), read_beir(tmp_path / "data", "test")
    assert len(pairs) == 15
    assert len(test.queries) == 5
    assert len(test.corpus) == 20
    held_out = {document for judged in test.qrels.values() for document in judged}
    trained = {test.corpus.ids[right_id] for right_id in pairs.right_id}
    assert not held_out & trained
    pair = pairs[0]
    assert pair.right.startswith("package.function_")
    assert pair.left.startswith("Summary number")


def test_too_few_docstrings(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="only 20 docstrings"):
        write_collection(tmp_path / "data", DOCSTRINGS, num_test=20)
    assert not (tmp_path / "data").exists()
