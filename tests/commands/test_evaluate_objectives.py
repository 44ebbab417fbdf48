"""`dualenc evaluate objectives` as a user runs it: two towers with shared positives, and views of images."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.cli import main
from dualenc.commands.evaluate_objectives import PairSet, embed_pairs, open_set, trained_temperature
from dualenc.commands.options import ColumnOptions
from dualenc.encoders import load_model
from tests.commands import toy

QUICK = ("--warm-up", "1", "--max-epochs", "1", "--device", "cpu")


def evaluate(*words: object) -> int:
    return main(["evaluate", "objectives", *map(str, words), *QUICK])


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Thirteen pairs; the first two share their document, the last two their query."""
    texts = list(dict.fromkeys(toy.texts(40)))[:26]
    rows = [{"query": query, "document": document} for query, document in zip(texts[:13], texts[13:])]
    rows[1]["document"], rows[12]["query"] = rows[0]["document"], rows[11]["query"]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_pairs_are_measured(toy_text: Path, pairs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(toy_text, pairs, "--out", tmp_path / "out", "--batch-size", 4, "--objectives", "InfoNCE,ISIR") == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert found["task"] == "objectives"
    assert found["pairs"] == 12, "in whole batches"
    assert found["temperature"] == 0.07
    assert list(found["objectives"]) == ["InfoNCE", "ISIR"]
    assert set(found["objectives"]["ISIR"]) == {
        "bias",
        "bias_error",
        "bias_limit",
        "biased",
        "step_error",
        "step_error_error",
        "encodes_per_pair",
        "state_bytes_per_pair",
        "epochs",
        "global_loss",
    }
    assert found["objectives"]["InfoNCE"]["encodes_per_pair"] == 0 < found["objectives"]["ISIR"]["encodes_per_pair"]
    assert 0 < found["softmax_share"]["mean"] < 1
    assert found["advice"].startswith("at B=4 InfoNCE misses")
    assert printed.strip().endswith(found["advice"])


@pytest.mark.slow
def test_views_of_images_are_measured(image_model: Path, classes: Path, tmp_path: Path) -> None:
    words = ("--out", tmp_path, "--batch-size", 6, "--objectives", "DCL,SigLIP", "--temperature", 0.5)
    assert evaluate(image_model, classes, *words) == 0
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert (found["kind"], found["pairs"], found["temperature"]) == ("image", 18, 0.5)
    assert [row["global_loss"] for row in found["objectives"].values()] == [True, False]


def test_items_are_embedded_once_and_keep_their_positives(toy_text: Path, pairs: Path) -> None:
    model = load_model(str(toy_text), device="cpu").eval()
    found = open_set(model, str(pairs), "train", ColumnOptions())
    frozen = embed_pairs(model, PairSet(found, np.arange(13)))
    assert (len(frozen.left), len(frozen.right), len(frozen)) == (12, 12, 13)
    rows = [found[row] for row in range(13)]
    for side in ("left", "right"):
        inputs = model.tower(side).prepare([getattr(row, side) for row in rows])
        with torch.no_grad():
            expected = model(side, inputs)
        items, ids = getattr(frozen, side), getattr(frozen, f"{side}_id")
        assert torch.allclose(items[ids], expected, atol=1e-5)
        documents = getattr(frozen, f"{'right' if side == 'left' else 'left'}_id")
        for row, listed in enumerate(getattr(frozen, f"{side}_positives").tolist()):
            assert set(listed) - {-1} == set(documents[ids == ids[row]].tolist())


@pytest.mark.slow
def test_temperature_of_the_training(short_run: Path, toy_text: Path, toy_clip: Path) -> None:
    assert trained_temperature(load_model(str(short_run / "model")), short_run / "model") == pytest.approx(0.2)
    assert trained_temperature(load_model(str(toy_text)), toy_text) is None
    clip = load_model(str(toy_clip))
    clip.set_temperature(0.04)
    assert trained_temperature(clip, toy_clip) == pytest.approx(0.04)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--batch-size", "1"), "--batch-size is 1; it must lie between 2 and"),
        (("--batch-size", "64"), "holds 13 pairs, fewer than a batch of 64; lower --batch-size"),
        (("--pairs", "8"), "--pairs is 8; it must be at least 32"),
        (("--temperature", "0"), "--temperature is 0.0; it must lie between 0.001 and"),
        (("--temperature", "warm"), "argument --temperature: invalid float value: 'warm'"),
        (("--objectives", "InfoNEC"), "there is no 'InfoNEC' (did you mean InfoNCE?); choose from InfoNCE, DCL"),
        (("--seed", "-1"), "--seed is -1"),
        (("--max-epochs", "0"), "--max-epochs is 0"),
    ],
    ids=["batch-1", "batch-64", "pairs", "cold", "warm", "unknown", "seed", "epochs"],
)
def test_bad_arguments_are_told_in_one_line(
    toy_text: Path,
    pairs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    message: str,
) -> None:
    quick = QUICK if "--max-epochs" not in words else ("--device", "cpu")
    line = ["evaluate", "objectives", str(toy_text), str(pairs), "--out", str(tmp_path / "out"), *words, *quick]
    assert main(line) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert message in told[-1]
    assert not (tmp_path / "out").exists()
