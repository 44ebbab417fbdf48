"""`dualenc evaluate convergence` as a user runs it: checkpoints of a training, folders of models, pairs of texts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.cli import main
from dualenc.data import ImageFolderViews
from dualenc.data.views import SimCLR
from dualenc.encoders import load_model
from dualenc.encoders.image import ImageEncoder
from dualenc.errors import DualencError
from dualenc.evaluation.images import random_rows
from dualenc.evaluation.run_models import find_models
from dualenc.evaluation.tasks import convergence as evaluate_convergence
from dualenc.training.loader import augmentation_seeds
from tests.commands.image_models import replace_images, save_classes, save_image_model


@pytest.fixture
def data(classes: Path) -> Path:
    return classes


@pytest.fixture
def run(short_run: Path) -> Path:
    return short_run


def evaluate(*words: object) -> int:
    return main(["evaluate", "convergence", *map(str, words), "--device", "cpu"])


def failure(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """The line that a mistake prints."""
    capsys.readouterr()
    assert evaluate(*words) == 2
    return capsys.readouterr().err.strip().splitlines()[-1]


def points_of(folder: Path) -> dict[str, list[dict[str, float]]]:
    return json.loads((folder / "metrics.json").read_text())["runs"]


def plain_loss_and_norm(model: ImageEncoder, data: Path, count: int, tau: float) -> tuple[float, float]:
    """The loss of two stored SimCLR views of each image, with one autograd graph over everything."""
    views = ImageFolderViews(data)
    chosen = random_rows(len(views), count).tolist()
    augment, pixels = SimCLR(32), []
    for side in ("left", "right"):
        seeds = augmentation_seeds(0, 0, chosen, side)
        pixels += [augment(views.item("left", i), seed) for i, seed in zip(chosen, seeds)]
    mean, std = (torch.tensor(model.data_config[key]).view(3, 1, 1) for key in ("mean", "std"))
    embeddings = model("left", {"image": (torch.stack(pixels) - mean) / std})
    similarities = embeddings @ embeddings.T / tau
    image = torch.arange(2 * count) % count
    negatives = similarities.masked_fill(image[:, None] == image, -torch.inf)
    positives = similarities.diagonal(count).repeat(2)
    loss = (torch.logsumexp(negatives, 1) - positives).mean()
    loss.backward()
    return loss.item(), sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
def test_every_checkpoint_is_measured_exactly(run: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(run, data, "--out", tmp_path, "--temperature", "0.2", "--pairs", "12") == 0
    points = points_of(tmp_path)["short"]
    assert [point["step"] for point in points] == [2, 4, 6]
    assert len({point["loss"] for point in points}) == 3
    loss, norm = plain_loss_and_norm(load_model(str(run / "model")), data, 12, 0.2)
    assert points[-1]["loss"] == pytest.approx(loss, rel=1e-4), "the model folder holds the last checkpoint's weights"
    assert points[-1]["squared_gradient_norm"] == pytest.approx(norm, rel=1e-3)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<figure>") == 6 + 2


@pytest.mark.slow
def test_folders_of_models_and_several_runs(run: Path, data: Path, tmp_path: Path) -> None:
    for number in (2, 10):
        save_image_model(tmp_path / "folders" / f"model-{number}", seed=number)
    assert evaluate(tmp_path / "folders", data, run / "model", "--out", tmp_path / "out", "--pairs", "8") == 0
    points = points_of(tmp_path / "out")
    assert {name: [point["step"] for point in own] for name, own in points.items()} == {
        "folders": [2, 10],
        "short": [0],
    }
    alone = tmp_path / "alone"
    assert evaluate(tmp_path / "folders" / "model-10", data, "--out", alone, "--pairs", "8") == 0
    assert points_of(alone)["model-10"][0] == points["folders"][1] | {"step": 0}


@pytest.mark.slow
def test_pairs_of_texts_with_shared_documents(toy_text: Path, tmp_path: Path) -> None:
    rows = [{"query": f"ant {i} bee", "document": f"cat dog {i // 2} eel"} for i in range(10)]
    table = tmp_path / "pairs.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert evaluate(toy_text, table, "--out", tmp_path / "out") == 0
    (point,) = points_of(tmp_path / "out")["toy-text"]
    model = load_model(str(toy_text))
    left = model("left", model.left.prepare([row["query"] for row in rows]))
    right = model("right", model.right.prepare([row["document"] for row in rows]))
    similarities = (left @ right.T / 0.07).double()
    document = torch.arange(10) // 2
    negatives = similarities.masked_fill(document[:, None] == document, -torch.inf)
    losses = [torch.logsumexp(matrix, 1) - similarities.diagonal() for matrix in (negatives, negatives.T)]
    assert point["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-5)
    assert point["positive_cosine"] == pytest.approx((left * right).sum(1).mean().item(), abs=1e-5)


@pytest.mark.slow
def test_models_are_found_in_the_order_of_their_numbers(run: Path, data: Path, tmp_path: Path) -> None:
    assert [place.step for place in find_models(str(run))] == [2, 4, 6]
    assert [(place.step, place.path.name) for place in find_models(str(run / "model"))] == [(0, "model")]
    for name in ("b", "a"):
        save_image_model(tmp_path / name)
    assert [(place.step, place.path.name) for place in find_models(str(tmp_path))] == [(0, "a"), (1, "b")]
    with pytest.raises(DualencError, match="no checkpoints and no model folders"):
        find_models(str(data))


@pytest.mark.slow
def test_mistakes_are_one_line(
    run: Path, data: Path, toy_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert "--pairs is 1; it must be at least 2" in failure(capsys, run, data, "--out", out, "--pairs", "1")
    message = "--temperature is 0.0; it must lie"
    assert message in failure(capsys, run, data, "--out", out, "--temperature", "0", "--pairs", "4")
    assert "model's left tower takes text" in failure(capsys, toy_text, captioned(tmp_path), "--out", out)
    unfinished = tmp_path / "unfinished"
    (unfinished / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "step-00000002").rename(unfinished / "checkpoints" / "step-00000002")
    try:
        assert "no model folder yet" in failure(capsys, unfinished, data, "--out", out)
        save_image_model(unfinished / "model", image_size=32)
        other = load_model(str(toy_text))
        other.save(unfinished / "text")
        (unfinished / "model").rename(tmp_path / "gone")
        (unfinished / "text").rename(unfinished / "model")
        table = tmp_path / "pairs.jsonl"
        table.write_text('{"query": "ant", "document": "bee"}\n{"query": "cat", "document": "dog"}\n')
        assert "does not fit the model folder of its run" in failure(capsys, unfinished, table, "--out", out)
    finally:
        (unfinished / "checkpoints" / "step-00000002").rename(run / "checkpoints" / "step-00000002")
    assert not out.exists()


def captioned(folder: Path) -> Path:
    """Images with captions, which a text model cannot take."""
    pictures = save_classes(folder / "captioned", per_class=1)
    for image in pictures.rglob("*.png"):
        image.with_suffix(".txt").write_text("a picture")
    return pictures


@pytest.mark.slow
def test_the_numbers_do_not_depend_on_how_many_models_are_measured(run: Path, data: Path, tmp_path: Path) -> None:
    assert evaluate(run, data, "--out", tmp_path / "a", "--pairs", "8") == 0
    assert evaluate(run, data, run / "model", "--out", tmp_path / "b", "--pairs", "8") == 0
    ours, theirs = points_of(tmp_path / "a"), points_of(tmp_path / "b")
    # Two of one name are called by their paths.
    assert ours["short"] == theirs[str(run)]
    assert np.isclose(theirs[str(run / "model")][0]["loss"], ours["short"][-1]["loss"])


@pytest.mark.slow
def test_what_was_measured_before_an_interruption_is_not_measured_again(
    run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = (run, data, "--pairs", "8")
    assert evaluate(*given, "--out", tmp_path / "whole") == 0
    measured, at_once = [], evaluate_convergence.measure_model

    def interrupted(*arguments: object) -> dict[str, object]:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(found := at_once(*arguments))  # type: ignore[arg-type]
        return found

    monkeypatch.setattr(evaluate_convergence, "measure_model", interrupted)
    assert evaluate(*given, "--out", tmp_path / "twice") != 0
    measured.clear()
    assert evaluate(*given, "--out", tmp_path / "twice") == 0
    assert len(measured) == 1
    assert points_of(tmp_path / "twice") == points_of(tmp_path / "whole")


@pytest.mark.slow
def test_weights_replaced_under_the_same_names_and_times_are_measured_anew(data: Path, tmp_path: Path) -> None:
    losses = []
    for seed in (1, 2):
        save_image_model(tmp_path / "encoder", seed=seed)
        for file in (tmp_path / "encoder").rglob("*"):
            os.utime(file, (1e9, 1e9))
        assert evaluate(tmp_path / "encoder", data, "--out", tmp_path / "out", "--pairs", "8") == 0
        losses.append(points_of(tmp_path / "out")["encoder"][0]["loss"])
    assert losses[0] != losses[1]


@pytest.mark.slow
def test_images_replaced_under_the_same_names_are_measured_anew(image_model: Path, tmp_path: Path) -> None:
    data = save_classes(tmp_path / "data", per_class=3)
    given = (image_model, data, "--pairs", "8", "--out")
    assert evaluate(*given, tmp_path / "out") == 0
    replace_images(data)
    assert evaluate(*given, tmp_path / "out") == 0
    assert evaluate(*given, tmp_path / "fresh") == 0
    assert points_of(tmp_path / "out") == points_of(tmp_path / "fresh")


@pytest.mark.slow
def test_texts_replaced_in_the_same_table_are_measured_anew(toy_text: Path, tmp_path: Path) -> None:
    table = tmp_path / "pairs.jsonl"
    for document in ("cat", "dog"):
        rows = [{"query": f"ant {i} bee", "document": f"{document} {i} eel"} for i in range(6)]
        table.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert evaluate(toy_text, table, "--out", tmp_path / "out") == 0
    assert evaluate(toy_text, table, "--out", tmp_path / "fresh") == 0
    assert points_of(tmp_path / "out") == points_of(tmp_path / "fresh")
