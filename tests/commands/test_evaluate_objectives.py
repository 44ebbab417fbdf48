"""`dualenc evaluate objectives` as a user runs it: two towers with shared positives, and views of images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.commands.evaluate_objectives import PairSet, embed_pairs, open_set
from dualenc.commands.options import ColumnOptions
from dualenc.encoders import load_model
from tests.commands import toy
from tests.commands.in_process import evaluated

QUICK = ("--warm-up", "1", "--max-epochs", "1", "--device", "cpu")


def evaluate(out: Path, *words: Any) -> dict[str, Any]:
    return evaluated("objectives", out, *words, *QUICK)


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
    found = evaluate(tmp_path / "out", toy_text, pairs, "--batch-size", 4, "--objectives", "InfoNCE,ISIR")
    printed = capsys.readouterr().out
    assert found["task"] == "objectives"
    assert found["pairs"] == 12, "in whole batches"
    assert found["temperature"] == 0.07
    assert list(found["objectives"]) == ["InfoNCE", "ISIR"]
    assert {"bias", "bias_error", "bias_limit", "biased", "step_error"} <= set(found["objectives"]["ISIR"])
    assert found["objectives"]["InfoNCE"]["encodes_per_pair"] == 0 < found["objectives"]["ISIR"]["encodes_per_pair"]
    assert found["advice"].startswith("at B=4 InfoNCE misses")
    assert printed.strip().endswith(found["advice"])


@pytest.mark.slow
def test_views_of_images_are_measured(image_model: Path, classes: Path, tmp_path: Path) -> None:
    words = ("--batch-size", 6, "--objectives", "DCL,ISIR", "--temperature", 0.5)
    found = evaluate(tmp_path, image_model, classes, *words)
    assert (found["kind"], found["pairs"], found["temperature"]) == ("image", 18, 0.5)
    assert found["objectives"]["DCL"]["bias"] > found["objectives"]["ISIR"]["bias"]


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
