"""Two processes write what one writes: every command that shares its work, in one pair of
processes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main
from tests.helpers import toy
from tests.helpers.image_models import save_splits
from tests.helpers.processes import run_on_two

pytestmark = pytest.mark.nightly

Written = tuple[Path, Path, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory,
    toy_text: Path,
    image_model: Path,
) -> Written:
    """What one process wrote, what two wrote, and what the two said."""
    folder = tmp_path_factory.mktemp("two")
    beir = toy.write_beir(folder / "toy")
    toy.save_documents(folder / "docs.jsonl", 2100)
    mined: list[Any] = ["mine", toy_text, toy.write_beir(folder / "many", 900, 300, "train")]
    mined += ["--last-rank", 10, "--relative", "null"]
    splits = save_splits(folder / "splits", test=3)
    corrupted: list[Any] = [image_model, splits, "--corruptions", "gaussian_noise,fog,pixelate"]
    commands: dict[str, list[Any]] = {
        "embed": ["embed", toy_text, folder / "docs.jsonl"],
        "retrieval": ["evaluate", "retrieval", toy_text, beir, "--hybrid", "rrf"],
        "corrupted": ["evaluate", "corrupted", *corrupted, "--train", splits, "--num-workers", 0],
        "probe": ["evaluate", "probe", image_model, splits, "--num-workers", 0],
        "mined.jsonl": mined,
    }

    def into(out: Path) -> list[list[str]]:
        return [
            [*map(str, words), "--out", str(out / name), "--device", "cpu"]
            for name, words in commands.items()
        ]

    assert [main(words) for words in into(folder / "one")] == [0] * len(commands)
    return folder / "one", folder / "two", run_on_two(folder, *into(folder / "two"))


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("retrieval", ["run.trec", "per_query.ndjson", "metrics.json", "hybrid/run.trec"]),
        ("corrupted", ["metrics.json"]),
        ("probe", ["metrics.json"]),
    ],
)
def test_an_evaluation_finds_the_same(written: Written, command: str, names: list[str]) -> None:
    one, two, _ = written
    for name in names:
        assert (two / command / name).read_bytes() == (one / command / name).read_bytes(), name


def test_the_mined_negatives_are_the_same_file_and_nothing_else_is_left(written: Written) -> None:
    one, two, done = written
    name = "mined.jsonl"
    assert (two / name).read_bytes() == (one / name).read_bytes()
    asked = [
        int(json.loads(line)["query_id"].removeprefix("d"))
        for line in (two / name).read_text().splitlines()
    ]
    assert min(asked) < 256 <= max(asked)  # of both blocks
    assert sorted(path.name for path in two.iterdir()) == sorted(
        path.name for path in one.iterdir()
    )
    assert "256/256" in done.stderr, "the main process has the first block, the other the second"
    assert done.stdout.count("negatives → ") == 1, "only the first of the two says so"


def test_embeddings_are_the_same_files(written: Written) -> None:
    one, two, done = written
    assert "Traceback" not in done.stderr
    assert "destroy_process_group" not in done.stderr
    assert done.stdout.count("2,100 embeddings") == 1, "only the first of the two says so"
    names = sorted(path.name for path in (one / "embed").iterdir())
    assert sorted(path.name for path in (two / "embed").iterdir()) == names
    assert sum(name.endswith(".arrow") for name in names) > 1
    for name in names:
        assert (two / "embed" / name).read_bytes() == (one / "embed" / name).read_bytes(), name
