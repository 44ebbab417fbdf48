"""Corruptions: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.commands.labelled_images import (
    align_labels,
    labelled_features,
    open_image_tower,
    open_images,
    random_rows,
    require_labels,
)
from dualenc.commands.output import Evaluation, short_name
from dualenc.data.detect import default_split
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import (
    CLEAN,
    Condition,
    ImageVersions,
    PrepareImages,
    confusions,
    encode_versions,
    encoder_of,
    mean_corruption_error,
    nearest_images,
    nearest_versions,
    read_baseline,
    robustness_rows,
    simclr_prepare,
    summarise,
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
from dualenc.evaluation.probe import linear_probe
from dualenc.evaluation.report import Table
from dualenc.terminal import printable

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

    from dualenc.commands.evaluate import CorruptionOptions, ImageOptions
    from dualenc.commands.options import OutputOptions
    from dualenc.encoders import Tower

TRAIN_BATCH = 256


def evaluate_corrupted(
    model: str, data: str, chosen: ImageOptions, options: CorruptionOptions, output: OutputOptions
) -> None:
    """Evaluate retrieval among versions and images, and with training images the robustness of a linear probe."""
    split = chosen.split or default_split(options.clean or data, "test")
    evaluation = Evaluation("corrupted", model, data, output)
    source, clean = _open_versions(data, split, chosen, options)
    severities = options.severities or list(SEVERITIES)
    if chosen.train is not None:
        columns: dict[str, Any] = {"label_column": chosen.label_column, "quotes": chosen.quotes}
        training = open_images(chosen.train, chosen.train_split, limit=chosen.train_limit, **columns)
        labels = require_labels(training, f"{chosen.train} ({chosen.train_split})", for_training=True)
        # Classes that the training images lack are an error before hours of encoding.
        _tested_labels(source, training.class_names)
    baseline = None
    if options.baseline is not None:
        baseline = read_baseline(options.baseline, source.corruptions, severities)
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    prepare_views = simclr_prepare(tower.prepare) if options.augmentation == "simclr" else tower.prepare
    study = Study(tower, prepare_views, source, clean, chosen)
    metrics: dict[str, Any] = {}
    retrieval: list[dict[str, object]] = []
    metrics["corrupted"], row, by_corruption = _among_versions(study, options.severity)
    retrieval.append(row)
    tables = [by_corruption]
    if clean is not None:
        metrics["plain"], row = _among_images(study, clean)
        retrieval.append(row)
    if chosen.train is not None:
        folder = evaluation.folder / "features" / "train"
        fitted = labelled_features(tower, training, labels, folder, TRAIN_BATCH, chosen.num_workers)
        classifier = linear_probe(fitted.features, fitted.labels).classifier if distributed.is_main() else None
        # Processes may fit slightly different ones, and their results are put together.
        classifier = distributed.broadcast_object(classifier)
        robustness = _robustness(study, classifier, severities, training.class_names, baseline)
        metrics["robustness"] = robustness.metrics
        tables += robustness.tables
    if distributed.is_main():
        facts = {"model": model, "data": data, "split": split}
        evaluation.conclude(
            f"Corrupted images: {short_name(model)} on {data}",
            {**facts, "augmentation": options.augmentation, "seed": chosen.seed},
            metrics,
            [Table("Retrieval of the other view", retrieval), *tables],
        )
    distributed.barrier()


def _open_versions(
    data: str, split: str, chosen: ImageOptions, options: CorruptionOptions
) -> tuple[CorruptedImages, CleanImages | None]:
    """The corrupted images, and the clean ones if they are at hand."""
    corruptions = options.corruptions or []
    is_corrupted = is_corrupted_folder(data)
    if options.clean is not None and not is_corrupted:
        raise DualencError(f"{data}: is no CIFAR-C or Tiny-ImageNet-C folder but clean images; leave --clean out")
    source: CorruptedImages
    clean = None
    place = options.clean if is_corrupted else data
    if place is not None:
        images = open_images(place, split, label_column=chosen.label_column, quotes=chosen.quotes)
        clean = CleanImages(images.items, images.labels, images.class_names)
    if clean is None or is_corrupted:
        source = read_corrupted(data, corruptions)
    else:
        about: dict[str, Any] = {"labels": clean.labels, "class_names": clean.class_names}
        source = GeneratedCorruptions(clean.images, corruptions or ALL, seed=chosen.seed, **about)
    if len(set(source.corruptions)) < max(2, len(source.corruptions)):
        # A version alone can only find itself.
        raise DualencError(f"--corruptions {','.join(source.corruptions)}: give two or more different ones")
    return source, clean


class Study(NamedTuple):
    """The model, the images and the settings of all parts.

    Attributes:
        tower: the image tower.
        prepare_views: images and seeds to augmented inputs of the tower.
        source: the corrupted images.
        clean: the images without corruption, if they are at hand.
        chosen: how many images to use, the seed of corruptions and augmentation, and the number of workers.
    """

    tower: Tower
    prepare_views: PrepareImages
    source: CorruptedImages
    clean: CleanImages | None
    chosen: ImageOptions

    def values(
        self,
        source: CorruptedImages,
        conditions: list[Condition],
        value_of: Callable[[list[int], np.ndarray], np.ndarray],
        what: str,
        *,
        views: int = 0,
        bar: bool = True,
    ) -> np.ndarray:
        """A value for each image that can be read, from the features of its versions. The processes share the images.

        Args:
            source, conditions: the images, and which versions of them.
            value_of: row numbers (n) and features (n, V, C, D) of images to their values (n, …).
            what: name of the progress bar, in errors too.
            views: number of augmented views to embed; 0 for the features of unchanged images.
            bar: whether to show the bar.

        Raises:
            DualencError: no image can be read.
        """
        prepare = self.prepare_views if views else self.tower.prepare
        versions = ImageVersions(source, conditions, prepare, views=views, seed=self.chosen.seed)
        encode = encoder_of(self.tower, "embedding" if views else "features")
        rows = random_rows(len(source), self.chosen.limit).tolist()
        own = rows[distributed.rank_slice(len(rows))]
        values: list[np.ndarray] = []
        hidden = not (bar and own and distributed.is_main())
        with tqdm(total=len(own), desc=what, unit=" images", disable=hidden) as shown:
            for block in encode_versions(versions, encode, indices=own, num_workers=self.chosen.num_workers):
                if block.indices:
                    values.append(value_of(block.indices, block.features))
                shown.update(len(block.indices) + len(block.bad))
                if block.bad and bar:
                    tqdm.write(printable(f"{what}: left out {block.bad[0][1]}"))
        everything = [block for part in distributed.gather_objects(values) for block in part]
        if not everything:
            raise DualencError(f"{what}: none of {len(rows)} images can be read; check the data")
        return np.concatenate(everything)


def _among_versions(study: Study, severity: int) -> tuple[dict[str, object], dict[str, object], Table]:
    """Retrieval of the other view among the corrupted versions of the same image: metrics, a row, and a table."""
    names = study.source.corruptions
    conditions = [(name, severity) for name in names]
    nearest = study.values(
        study.source, conditions, lambda _, features: nearest_versions(features), "corrupted retrieval", views=2
    )
    metrics = summarise(nearest, names)
    rates = confusions(nearest)
    others = rates - 2 * np.eye(len(names))
    rows = [
        {"corruption": name, "top-1": right, "most often taken for": names[row.argmax()], "share": float(row.max())}
        for name, right, row in zip(names, rates.diagonal().tolist(), others)
    ]
    row = _retrieval_row(f"among {len(names)} versions of the image", len(nearest), metrics)
    return {"images": len(nearest), "severity": severity, **metrics}, row, Table("By corruption", rows)


def _among_images(study: Study, clean: CleanImages) -> tuple[dict[str, object], dict[str, object]]:
    """Retrieval of the other view among all clean images: metrics, and a row."""
    views = study.values(clean, [CLEAN], lambda _, features: features[:, :, 0], "clean images", views=2, bar=False)
    nearest = nearest_images(views)
    metrics = summarise(nearest)
    row = _retrieval_row("among all images, not corrupted", len(nearest), metrics)
    return {"images": len(nearest), **metrics}, row


def _retrieval_row(task: str, images: int, metrics: dict[str, float]) -> dict[str, object]:
    row: dict[str, object] = {"task": task, "images": images, "top-1": metrics["top1"]}
    return row | {
        "first to second": metrics["top1_first_to_second"],
        "second to first": metrics["top1_second_to_first"],
    }


class Robustness(NamedTuple):
    """Metrics of a probe under corruptions, and their tables."""

    metrics: dict[str, Any]
    tables: list[Table]


def _robustness(
    study: Study,
    classifier: Pipeline,
    severities: Sequence[int],
    class_names: Sequence[str] | None,
    baseline: np.ndarray | None,
) -> Robustness:
    """Accuracy of a linear probe of clean features under every corruption; `baseline`: (C, S) errors to divide by."""

    def is_correct(source: CorruptedImages, conditions: list[Condition], what: str) -> np.ndarray:
        """(n, C) whether the classifier is correct for each image under each condition."""
        labels = _tested_labels(source, class_names)

        def correct(indices: list[int], features: np.ndarray) -> np.ndarray:
            predicted = classifier.predict(features.reshape(-1, features.shape[-1]))
            return predicted.reshape(len(indices), -1) == labels[indices][:, None]

        return study.values(source, conditions, correct, what)

    names = study.source.corruptions
    conditions = [(name, severity) for name in names for severity in severities]
    right = is_correct(study.source, conditions, "robustness")
    errors = 1 - right.reshape(len(right), len(names), len(severities)).mean(axis=0)
    metrics: dict[str, Any] = {"images": len(right), "mean_corruption_error": mean_corruption_error(errors)}
    if study.clean is not None and study.clean.labels is not None:
        metrics["clean_accuracy"] = float(is_correct(study.clean, [CLEAN], "clean images").mean())
    if baseline is not None:
        metrics["relative_to_baseline"] = mean_corruption_error(errors, baseline)
    tables = [
        Table("Robustness of a linear probe", [dict(metrics)]),
        Table("Accuracy by corruption and severity", robustness_rows(errors, names, severities)),
    ]
    columns = [str(severity) for severity in severities]
    metrics["errors"] = {name: dict(zip(columns, row)) for name, row in zip(names, errors.tolist())}
    return Robustness(metrics, tables)


def _tested_labels(source: CorruptedImages, class_names: Sequence[str] | None) -> np.ndarray:
    """(N,) labels of the images to test, in the class numbers of the training images."""
    if source.labels is None:
        raise DualencError("the images to test have no labels, which the robustness table needs; give a label column")
    return align_labels(source.labels, source.class_names, class_names, "the images to test")
