"""`dualenc quickstart`: docstrings, the collection, the steps, and all of it at toy size and without a network."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dualenc.commands import quickstart as command
from dualenc.commands.quickstart import Docstring, read_docstrings, write_collection
from dualenc.data import BeirPairs, read_beir
from dualenc.encoders import TextEncoder
from dualenc.errors import DualencError

ARGUMENTS = ["--max-docs", "400", "--test-docs", "50", "--steps", "12", "--vocab-size", "1500"]


@pytest.mark.slow
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


@pytest.mark.nightly
def test_leaves_a_folder_of_something_else_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    command = [sys.executable, "-m", "dualenc", "quickstart", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds no quickstart" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("given", [{"max_docs": 0}, {"max_docs": -1}, {"test_docs": 0}, {"steps": 0}, {"seed": -1}])
def test_numbers_out_of_range_are_refused_before_any_work(given: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=f"--{next(iter(given)).replace('_', '-')} is"):
        command.quickstart(out=str(tmp_path / "out"), **given)
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
def test_as_many_steps_as_end_within_four_minutes(step_seconds, elapsed, rest, expected, capsys) -> None:
    steps = command.choose_steps(step_seconds, elapsed, rest)
    assert steps == expected
    assert f"A step takes {step_seconds:.2f} s on this machine now: {steps} steps" in capsys.readouterr().out
    if steps > command.MIN_STEPS:
        assert elapsed + command.MARGIN * (rest + steps * step_seconds) <= command.SECONDS


def test_few_steps_are_said_to_be_few_with_what_to_type() -> None:
    hint = command.few_steps_hint(20, "my run")
    assert hint.startswith("20 steps are too few to learn much.")
    assert hint.endswith(": dualenc quickstart --steps 300 --out 'my run'")
    assert command.few_steps_hint(100, "my run") == ""


@pytest.mark.slow
def test_the_machine_is_measured_by_the_clock_and_the_model_stays_as_it_is(tmp_path: Path) -> None:
    """A clock that moves on by two seconds whenever it is asked; the corpus is larger than the sample of it."""
    count = 1200
    names = [f"module_{n}.function_{n % 7}" for n in range(count)]
    docstrings = [Docstring(name, f"Compute thing number {n} of {n % 13}.", "More.") for n, name in enumerate(names)]
    write_collection(tmp_path, docstrings, 100, seed=0)
    pairs, collection = BeirPairs(tmp_path, "train"), read_beir(tmp_path, "test")
    model = command.new_model(pairs.corpus.items, 500)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    clock = itertools.count(0, 2)
    step_seconds, rest = command.measure(model, pairs, collection, 0, clock=lambda: next(clock))
    assert step_seconds == 2
    assert rest == pytest.approx(3 * 2 * (count + 100) / 1000)
    assert isinstance(model, TextEncoder)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


SOURCE = '''
raise RuntimeError("this module must not be imported")

class Stack:
    """A pile of things to take from the top.

    The last thing put on is the first that is taken off, as with plates in a cupboard, and so on and so forth.
    """

    def push(self, item):
        """Put one thing on top of the pile.

        Args: item is whatever you like; the pile keeps a reference to it and never looks inside it at all.
        """

    def short(self):
        """Has no more than a summary line."""
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "plates"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "stack.py").write_text(SOURCE)
    (folder / "broken.py").write_text("def (:\n")
    (folder / "test_stack.py").write_text(SOURCE.replace("plates", "dishes"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "no-such-folder")})
    return "plates"


def test_names_summaries_and_the_rest(package: str) -> None:
    found = read_docstrings(10, packages=[package])
    assert [d.name for d in found] == ["plates.stack.Stack", "plates.stack.Stack.push"]
    assert found[0].summary == "A pile of things to take from the top."
    assert found[1].rest.startswith("Args: item is whatever you like; the pile keeps")
    assert not any(name.startswith("plates.") for name in sys.modules)


def test_limit_and_unknown_packages(package: str) -> None:
    assert len(read_docstrings(1, packages=["no_such_package_here", package])) == 1


@pytest.mark.slow
def test_the_standard_library_has_enough_and_its_names_and_summaries_are_unique() -> None:
    found = read_docstrings(500, packages=[])
    assert len(found) == 500
    assert len({d.name for d in found}) == len({d.summary for d in found}) == 500


DOCSTRINGS = [
    Docstring(f"package.function_{i}", f"Summary number {i} here.", f"rest of docstring {i}") for i in range(20)
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


def test_the_split_depends_on_the_seed_alone(tmp_path: Path) -> None:
    splits = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_collection(tmp_path / name, DOCSTRINGS, num_test=5, seed=seed)
        splits.append((tmp_path / name / "qrels" / "test.tsv").read_text())
    assert splits[0] == splits[1] != splits[2]


def test_too_few_docstrings_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="20 docstrings were found on this machine, 40 are needed"):
        write_collection(tmp_path / "data", DOCSTRINGS, num_test=20)
    assert not (tmp_path / "data").exists()
