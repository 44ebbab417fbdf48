"""`dualenc evaluate corrupted`: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from dualenc import distributed
from dualenc.commands.checks import MAX_SEED, MAX_WORKERS, check_range
from dualenc.commands.evaluation import Evaluation, display_name
from dualenc.data.sources import usual_split
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import (
    read_baseline,
)
from dualenc.evaluation.corrupted_parts import (
    Findings,
    Setup,
    add_plain,
    add_robustness,
    add_versions,
    contents_of,
    tested_labels,
)
from dualenc.evaluation.corruptions import (
    ALL,
    SEVERITIES,
    CleanImages,
    CorruptedImages,
    GeneratedCorruptions,
    is_corrupted_folder,
    read_corrupted,
)
from dualenc.evaluation.images import (
    labelled_features,
    open_image_tower,
    open_images,
    require_labels,
    simclr_prepare,
)
from dualenc.evaluation.probe import linear_probe
from dualenc.evaluation.report import Table

if TYPE_CHECKING:
    pass

TRAIN_BATCH = 256


def corrupted(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str | None = None,
    clean: str | None = None,
    corruptions: list[str] | None = None,
    severity: int = 1,
    train: str | None = None,
    train_split: str = "train",
    train_limit: int | None = None,
    severities: list[int] | None = None,
    baseline: str | None = None,
    label_column: str | None = None,
    augmentation: Literal["simclr", "model"] = "simclr",
    seed: int = 0,
    limit: int | None = None,
    num_workers: int = 2,
    device: str | None = None,
) -> None:
    """Find the other view of an image among its own corrupted versions, and among all images.

    Writes metrics.json and report.html. Finished images are kept below OUT: an interrupted evaluation resumes there.

    Args:
        model: model folder or name, of kind image or image-text.
        data: clean images, corrupted on the fly; or a CIFAR-C or Tiny-ImageNet-C folder.
        out: folder to write; by default evaluations/corrupted/MODEL-DATA-HASH.
        split: which split of the clean images, by default test; of a file a slice such as train[90%:], by default all.
        clean: with a CIFAR-C or Tiny-ImageNet-C folder: the images without corruption.
        corruptions: their names; by default all 19, or all that the folder has.
        severity: of the corruptions in retrieval, 1 to 5.
        train: labelled images to train a linear probe on; its accuracy is measured under every corruption.
        train_split: which split of them.
        train_limit: train on so many images, chosen at random.
        severities: of the corruptions in the robustness table; by default 1 to 5.
        baseline: metrics.json of another model's evaluation, to divide the corruption errors by.
        label_column: of a table; by default `label`.
        augmentation: SimCLR's, or the training augmentation that the model folder knows.
        seed: of corruptions and augmentation.
        limit: use so many images, chosen at random.
        num_workers: processes that corrupt and augment.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(1, math.inf, limit=limit, train_limit=train_limit)
    check_range(0, MAX_WORKERS, num_workers=num_workers)
    check_range(0, MAX_SEED, seed=seed)
    for value in [severity, *(severities or [])]:
        if value not in SEVERITIES:
            raise DualencError(f"severity {value}: choose from 1, 2, 3, 4, 5")

    split = split or usual_split(clean or data, "test")
    evaluation = Evaluation("corrupted", model, data, out, device)
    source, images = _open(data, split, clean, corruptions or [], seed, label_column)
    tested_severities = severities or list(SEVERITIES)
    if train is not None:
        training = open_images(train, train_split, label_column=label_column, limit=train_limit)
        labels = require_labels(training, f"{train} ({train_split})", for_training=True)
        # Classes that the training images lack are an error before hours of encoding.
        tested_labels(source, training.class_names)
    baseline_errors = None
    if baseline is not None:
        baseline_errors = read_baseline(baseline, source.corruptions, tested_severities)
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    facts: dict[str, Any] = {"data": data, "split": split, "augmentation": augmentation, "seed": seed}
    setup = Setup(
        tower,
        simclr_prepare(tower.prepare) if augmentation == "simclr" else tower.prepare,
        source,
        images,
        limit,
        evaluation.folder / "finished",
        {**facts, **contents_of(tower, source, images)},
        seed,
        num_workers,
    )
    found = Findings()
    add_versions(found, setup, severity)
    if images is not None:
        add_plain(found, setup, images)
    if train is not None:
        fitted = labelled_features(tower, training, labels, setup.out / "train-features", TRAIN_BATCH, num_workers)
        classifier = linear_probe(fitted.features, fitted.labels).classifier if distributed.is_main() else None
        # Processes may fit slightly different ones, and their results are put together.
        classifier = distributed.broadcast_object(classifier)
        add_robustness(found, setup, classifier, tested_severities, training.class_names, baseline_errors)
    if distributed.is_main():
        evaluation.conclude(
            f"Corrupted images: {display_name(model)} on {data}",
            {"model": model, **facts},
            found.metrics,
            [Table("Retrieval of the other view", found.retrieval), *found.tables],
            figures=found.figures,
            galleries=found.galleries,
        )
    distributed.barrier()


def _open(
    data: str, split: str, clean: str | None, corruptions: list[str], seed: int, label_column: str | None
) -> tuple[CorruptedImages, CleanImages | None]:
    """The corrupted images, and the clean ones if they are at hand."""
    if is_corrupted_folder(data):
        images = None if clean is None else open_images(clean, split, label_column=label_column)
        source = read_corrupted(data, corruptions)
    else:
        if clean is not None:
            raise DualencError(f"{data}: is no CIFAR-C or Tiny-ImageNet-C folder but clean images; leave --clean out")
        images = open_images(data, split, label_column=label_column)
        source = GeneratedCorruptions(
            images.items, corruptions or ALL, seed=seed, labels=images.labels, class_names=images.class_names
        )
    if len(set(source.corruptions)) < max(2, len(source.corruptions)):
        # A version alone can only find itself.
        raise DualencError(f"--corruptions {','.join(source.corruptions)}: give two or more different ones")
    return source, None if images is None else CleanImages(images.items, images.labels, images.class_names)
