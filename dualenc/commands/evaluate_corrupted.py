"""`dualenc evaluate corrupted`: retrieval among corrupted versions of an image, and accuracy under corruptions."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.commands.corruption_parts import (
    Part,
    Setup,
    plain_part,
    read_baseline,
    robustness_part,
    tested_labels,
    versions_part,
)
from dualenc.commands.evaluation import (
    HIGHEST_SEED,
    MOST_WORKERS,
    check_range,
    display_name,
    output_folder,
    start_processes,
)
from dualenc.commands.images import (
    labelled_features,
    open_image_tower,
    open_images,
    random_rows,
    require_labels,
    simclr_prepare,
)
from dualenc.errors import DualencError
from dualenc.evaluation.corruption import ALL, SEVERITIES, CorruptedImages, GeneratedCorruptions
from dualenc.evaluation.corruption_folders import CifarC, TinyImageNetC, is_corrupted_folder, read_corrupted
from dualenc.evaluation.image_versions import CleanImages
from dualenc.evaluation.probe import LinearClassifier, fit_best
from dualenc.evaluation.report import write_report
from dualenc.evaluation.tables import Table, print_table
from dualenc.files import write_json
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Tower


TRAIN_BATCH = 256


class _Training(NamedTuple):
    """What the linear probe of the robustness table is trained on."""

    images: Corpus
    labels: np.ndarray


def corrupted(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "test",
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

    Writes metrics.json and report.html. Finished images are kept below OUT: an interrupted evaluation goes on there.

    Args:
        model: model folder or name, of kind image or image-text.
        data: clean images, corrupted on the fly; or a CIFAR-C or Tiny-ImageNet-C folder.
        out: folder to write; by default evaluations/corrupted/MODEL-DATA.
        split: which split of the clean images.
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
    check_range(0, MOST_WORKERS, num_workers=num_workers)
    check_range(0, HIGHEST_SEED, seed=seed)
    _check_severities([severity, *(severities or [])])
    target = output_folder(out, "corrupted", model, data)
    device_to_use = start_processes(device)
    source, images = _open(data, split, clean, corruptions or [], seed, label_column)
    at = severities or list(SEVERITIES)
    training = None if train is None else _open_training(train, train_split, train_limit, label_column)
    theirs = None if baseline is None else read_baseline(baseline, source.corruptions, at)
    if training is not None:
        tested_labels(source, training.images.class_names)
    tower = open_image_tower(model, device_to_use)
    facts: dict[str, object] = {"data": data, "split": split, "augmentation": augmentation, "seed": seed}
    setup = _setup(tower, source, images, target, facts, limit, num_workers)
    parts = {"corrupted": versions_part(setup, severity)}
    parts |= {} if images is None else {"plain": plain_part(setup)}
    if training is not None:
        classifier, class_names = _train_probe(setup, training)
        parts["robustness"] = robustness_part(setup, classifier, at, class_names, theirs)
    if distributed.is_main():
        _conclude(parts, target, {"model": model, **facts})
    distributed.barrier()


def _check_severities(severities: list[int]) -> None:
    for severity in severities:
        if severity not in SEVERITIES:
            raise DualencError(f"severity {severity}: choose from 1, 2, 3, 4, 5")


def _open(
    data: str, split: str, clean: str | None, corruptions: list[str], seed: int, label_column: str | None
) -> tuple[CorruptedImages, CleanImages | None]:
    """The corrupted images, and the clean ones if they are at hand.

    Raises:
        DualencError: a wrong folder, or fewer than two corruptions: a version alone can only find itself.
    """
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
        raise DualencError(f"--corruptions {','.join(source.corruptions)}: give two or more different ones")
    return source, None if images is None else CleanImages(images.items, images.labels, images.class_names)


def _setup(
    tower: Tower,
    source: CorruptedImages,
    images: CleanImages | None,
    out: Path,
    facts: dict[str, object],
    limit: int | None,
    num_workers: int,
) -> Setup:
    from dualenc.embed import tower_checksum

    contents = [_contents(source), "" if images is None else _contents(images)] if distributed.is_main() else []
    return Setup(
        tower=tower,
        prepare_views=simclr_prepare(tower.prepare) if facts["augmentation"] == "simclr" else tower.prepare,
        source=source,
        rows=random_rows(len(source), limit).tolist(),
        clean=images,
        clean_rows=[] if images is None else random_rows(len(images), limit).tolist(),
        out=out / "finished",
        signature={
            **facts,
            "images": len(source),
            "model": tower_checksum(tower),
            "contents": distributed.broadcast_object(contents),
        },
        seed=int(str(facts["seed"])),
        num_workers=num_workers,
    )


def _contents(source: CorruptedImages | CleanImages) -> str:
    """Checksum of the images themselves, whose names may stay while their contents change."""
    from dualenc.data.identity import items_identity
    from dualenc.data.images import ImageFiles

    if isinstance(source, CifarC | TinyImageNetC):
        return items_identity(ImageFiles(source.path, source.files), "image")
    assert isinstance(source, CleanImages | GeneratedCorruptions)
    return items_identity(source.images, "image")


def _open_training(data: str, split: str, limit: int | None, label_column: str | None) -> _Training:
    images = open_images(data, split, label_column=label_column, limit=limit)
    labels = require_labels(images, f"{data} ({split})")
    if len(np.unique(labels)) < 2:
        raise DualencError(f"{data} ({split}): all images are of one class; a probe needs two or more")
    return _Training(images, labels)


def _train_probe(setup: Setup, training: _Training) -> tuple[LinearClassifier, list[str] | None]:
    """A linear classifier of clean features, the same on all processes, and the names of its classes."""
    train = labelled_features(
        setup.tower, training.images, training.labels, setup.out / "train-features", TRAIN_BATCH, setup.num_workers
    )
    classifier = fit_best(train.features, train.labels)[0] if distributed.is_main() else None
    return distributed.broadcast_object(classifier), training.images.class_names


def _conclude(parts: dict[str, Part], out: Path, facts: dict[str, object]) -> None:
    """Write and print what came out."""
    write_json(out / "metrics.json", {"task": "corrupted", **facts, **{name: p.metrics for name, p in parts.items()}})
    everything = list(parts.values())
    rows = [row for name, part in parts.items() if name != "robustness" for row in part.tables[0].rows]
    tables = [Table("Retrieval of the other view", rows)]
    tables += [t for name, part in parts.items() for t in (part.tables if name == "robustness" else part.tables[1:])]
    write_report(
        out / "report.html",
        f"Corrupted images: {display_name(str(facts['model']))} on {facts['data']}",
        facts=facts,
        tables=tables,
        figures=[figure for part in everything for figure in part.figures],
        galleries=[gallery for part in everything for gallery in part.galleries],
    )
    for table in tables:
        print_table(table)
    print(printable(f"metrics and report.html are in {out}"))
