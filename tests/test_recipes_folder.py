"""Every recipe of the repository names classes and arguments that exist."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from dualenc.cli import main
from dualenc.encoders import TextEncoder, load_model
from dualenc.recipe import read_recipe
from dualenc.training.log import read_metrics
from tests.commands import toy

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_is_valid_and_writes_to_a_folder_of_its_own_name(path: Path) -> None:
    settings = read_recipe(path).settings
    assert settings["trainer"]["output"] == f"runs/{path.stem}"
    assert path.read_text().startswith("# ")


@pytest.mark.slow
def test_recipes_for_fine_tuning_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they stand, on a small model and small data in place of those they name."""
    monkeypatch.chdir(tmp_path)
    model, data = toy.text_model(tmp_path / "model"), toy.write_beir(tmp_path / "beir", split="train")
    for split in ("dev", "test"):
        shutil.copy(data / "qrels" / "train.tsv", data / "qrels" / f"{split}.tsv")
    assert main(["mine", str(model), str(data), "--out", "mined.jsonl", "--relative", "null"]) == 0

    def train(name: str, *changes: str) -> dict[str, Any]:
        words = [f"model.name={model}", f"trainer.output={tmp_path / name}", "trainer.batch_size=4", *changes]
        assert main(["train", str(FOLDER / f"{name}.yaml"), *words, "trainer.progress=false"]) == 0
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        assert isinstance(load_model(tmp_path / name / "model"), TextEncoder)
        return {key: value for line in lines for key, value in line.items()}

    mined = ("data.path=mined.jsonl", "model.max_length=32", "trainer.mixed_precision=no")
    assert train("mined_negatives", *mined)["step"] == 2, "8 queries in batches of 4"
    there = (f"data.path={data}", f"evaluator.path={data}")
    assert "accuracy@8" in train("scifact_matryoshka", *there, "objective.dims=[8, 32]")
    changes = ("trainer.epochs=10", "trainer.evaluate_every=1", "trainer.learning_rate=1e-9")
    told = train("papers_careful", *there, *changes)
    assert told["step"] <= 8  # of 20: nothing gains at this rate, and the patience is 3
