"""Corruptions: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dualenc import distributed
from dualenc.data.detect import default_split
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import read_baseline
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
from dualenc.evaluation.output import Evaluation, display_name
from dualenc.evaluation.probe import linear_probe
from dualenc.evaluation.report import Table

if TYPE_CHECKING:
    from dualenc.evaluation.options import CorruptionOptions, ImageOptions, OutputOptions

TRAIN_BATCH = 256


def evaluate(model: str, data: str, given: ImageOptions, options: CorruptionOptions, output: OutputOptions) -> None:
    """Evaluate retrieval among versions and images, and with training images the robustness of a linear probe."""
    split = given.split or default_split(options.clean or data, "test")
    evaluation = Evaluation("corrupted", model, data, output)
    source, images = _open(data, split, given, options)
    severities = options.severities or list(SEVERITIES)
    if given.train is not None:
        where = f"{given.train} ({given.train_split})"
        columns: dict[str, Any] = {"label_column": given.label_column, "quotes": given.quotes}
        training = open_images(given.train, given.train_split, limit=given.train_limit, **columns)
        labels = require_labels(training, where, for_training=True)
        # Classes that the training images lack are an error before hours of encoding.
        tested_labels(source, training.class_names)
    baseline = None
    if options.baseline is not None:
        baseline = read_baseline(options.baseline, source.corruptions, severities)
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    facts: dict[str, Any] = {"data": data, "split": split, "augmentation": options.augmentation, "seed": given.seed}
    setup = Setup(
        tower,
        simclr_prepare(tower.prepare) if options.augmentation == "simclr" else tower.prepare,
        source,
        images,
        evaluation.folder / "finished",
        {**facts, **contents_of(tower, source, images)},
        given,
    )
    found = Findings()
    add_versions(found, setup, options.severity)
    if images is not None:
        add_plain(found, setup, images)
    if given.train is not None:
        fitted = labelled_features(
            tower, training, labels, setup.out / "train-features", TRAIN_BATCH, given.num_workers
        )
        classifier = linear_probe(fitted.features, fitted.labels).classifier if distributed.is_main() else None
        # Processes may fit slightly different ones, and their results are put together.
        classifier = distributed.broadcast_object(classifier)
        add_robustness(found, setup, classifier, severities, training.class_names, baseline)
    if distributed.is_main():
        evaluation.conclude(
            f"Corrupted images: {display_name(model)} on {data}",
            {"model": model, **facts},
            found.metrics,
            [Table("Retrieval of the other view", found.retrieval), *found.tables],
        )
    distributed.barrier()


def _open(
    data: str, split: str, given: ImageOptions, options: CorruptionOptions
) -> tuple[CorruptedImages, CleanImages | None]:
    """The corrupted images, and the clean ones if they are at hand."""
    corruptions = options.corruptions or []
    source: CorruptedImages
    clean = None
    if is_corrupted_folder(data):
        source = read_corrupted(data, corruptions)
        if options.clean is not None:
            clean = open_images(options.clean, split, label_column=given.label_column, quotes=given.quotes)
    else:
        if options.clean is not None:
            raise DualencError(f"{data}: is no CIFAR-C or Tiny-ImageNet-C folder but clean images; leave --clean out")
        clean = open_images(data, split, label_column=given.label_column, quotes=given.quotes)
        names = clean.class_names
        source = GeneratedCorruptions(
            clean.items, corruptions or ALL, seed=given.seed, labels=clean.labels, class_names=names
        )
    if len(set(source.corruptions)) < max(2, len(source.corruptions)):
        # A version alone can only find itself.
        raise DualencError(f"--corruptions {','.join(source.corruptions)}: give two or more different ones")
    return source, None if clean is None else CleanImages(clean.items, clean.labels, clean.class_names)
