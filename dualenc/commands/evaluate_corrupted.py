"""Corruptions: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
    SimCLRPrepare,
    confusions,
    encode_versions,
    encoder_of,
    nearest_images,
    nearest_versions,
    robustness_rows,
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
    model: str, data: str, images: ImageOptions, options: CorruptionOptions, output: OutputOptions
) -> None:
    """Evaluate retrieval among versions and images, and with training images the robustness of a linear probe."""
    split = images.split or default_split(options.clean or data, "test")
    evaluation = Evaluation("corrupted", model, data, output)
    source, clean = _open_versions(data, split, images, options)
    if images.train is not None:
        training = open_images(images.train, images.train_split, images, limit=images.train_limit)
        labels = require_labels(training, f"{images.train} ({images.train_split})", for_training=True)
        # Classes that the training images lack are an error before hours of encoding.
        _tested_labels(source, training.class_names)
    tower = open_image_tower(model, evaluation.device)
    evaluation.check_weights(tower)
    prepare_views = SimCLRPrepare(tower.prepare) if options.augmentation == "simclr" else tower.prepare
    study = Study(tower, prepare_views, source, clean, images)
    study.add_versions(options.severity)
    if clean is not None:
        study.add_images(clean)
    if images.train is not None:
        folder = evaluation.folder / "features" / "train"
        fitted = labelled_features(tower, training, labels, folder, TRAIN_BATCH, images.num_workers)
        classifier = (
            linear_probe(fitted.features, fitted.labels).classifier if distributed.is_main() else None
        )
        # Processes may fit slightly different ones, and their results are put together.
        classifier = distributed.broadcast_object(classifier)
        study.add_robustness(classifier, options.severities or SEVERITIES, training.class_names)
    if distributed.is_main():
        facts: dict[str, object] = {"model": model, "data": data, "split": split}
        facts |= {"augmentation": options.augmentation, "seed": images.seed}
        tables = [Table("Retrieval of the other view", study.retrieval), *study.tables]
        evaluation.conclude(
            f"Corrupted images: {short_name(model)} on {data}", facts, study.metrics, tables
        )
    distributed.barrier()


def _open_versions(
    data: str, split: str, images: ImageOptions, options: CorruptionOptions
) -> tuple[CorruptedImages, CleanImages | None]:
    """The corrupted images, and the clean ones if they are at hand."""
    corruptions = options.corruptions or []
    source: CorruptedImages
    clean = None
    if is_corrupted_folder(data):
        source = read_corrupted(data, corruptions)
        if options.clean is not None:
            corpus = open_images(options.clean, split, images)
            clean = CleanImages(corpus.items, corpus.labels, corpus.class_names)
    else:
        if options.clean is not None:
            raise DualencError(
                f"{data}: is no CIFAR-C or Tiny-ImageNet-C folder but clean images; leave --clean out"
            )
        corpus = open_images(data, split, images)
        about: dict[str, Any] = {"labels": corpus.labels, "class_names": corpus.class_names}
        clean = CleanImages(corpus.items, **about)
        source = GeneratedCorruptions(corpus.items, corruptions or ALL, seed=images.seed, **about)
    if len(set(source.corruptions)) < max(2, len(source.corruptions)):
        # A version alone can only find itself.
        raise DualencError(
            f"--corruptions {','.join(source.corruptions)}: give two or more different ones"
        )
    return source, clean


class Study:
    """The results of all parts: metrics, rows of the table of retrieval, and further tables.

    `images` says how many to use, the seed of corruptions and augmentation, and the number of workers.
    """

    def __init__(
        self,
        tower: Tower,
        prepare_views: PrepareImages,
        source: CorruptedImages,
        clean: CleanImages | None,
        images: ImageOptions,
    ) -> None:
        self.tower = tower
        self.prepare_views = prepare_views
        self.source = source
        self.clean = clean
        self.images = images
        self.metrics: dict[str, Any] = {}
        self.retrieval: list[dict[str, object]] = []
        self.tables: list[Table] = []

    def add_versions(self, severity: int) -> None:
        """Retrieval of the other view among the corrupted versions of the same image."""
        names = self.source.corruptions
        conditions = [(name, severity) for name in names]
        nearest = self._values(
            self.source,
            conditions,
            lambda _, features: nearest_versions(features),
            "corrupted retrieval",
            views=2,
        )
        task = f"among {len(names)} versions of the image"
        self._add_retrieval(
            "corrupted", task, {"severity": severity, **summarise(nearest, names)}, len(nearest)
        )
        rates = confusions(nearest)
        others = rates - 2 * np.eye(len(names))
        rows = []
        for name, right, row in zip(names, rates.diagonal().tolist(), others):
            mistaken = {"most often taken for": names[row.argmax()], "share": float(row.max())}
            rows.append({"corruption": name, "top-1": right, **mistaken})
        self.tables.append(Table("By corruption", rows))

    def add_images(self, clean: CleanImages) -> None:
        """Retrieval of the other view among all clean images."""
        views = self._values(
            clean, [CLEAN], lambda _, features: features[:, :, 0], "clean images", views=2
        )
        nearest = nearest_images(views)
        self._add_retrieval("plain", "among all images, not corrupted", summarise(nearest), len(nearest))

    def _add_retrieval(self, part: str, task: str, metrics: dict[str, float], images: int) -> None:
        self.metrics[part] = {"images": images, **metrics}
        row: dict[str, object] = {"task": task, "images": images, "top-1": metrics["top1"]}
        row |= {
            "first to second": metrics["top1_first_to_second"],
            "second to first": metrics["top1_second_to_first"],
        }
        self.retrieval.append(row)

    def add_robustness(
        self, classifier: Pipeline, severities: Sequence[int], class_names: Sequence[str] | None
    ) -> None:
        """Accuracy of a linear probe of clean features under every corruption."""

        def is_correct(source: CorruptedImages, conditions: list[Condition], what: str) -> np.ndarray:
            """(n, C) whether the classifier is correct for each image under each condition."""
            labels = _tested_labels(source, class_names)

            def correct(indices: list[int], features: np.ndarray) -> np.ndarray:
                predicted = classifier.predict(features.reshape(-1, features.shape[-1]))
                return predicted.reshape(len(indices), -1) == labels[indices][:, None]

            return self._values(source, conditions, correct, what)

        names = self.source.corruptions
        conditions = [(name, severity) for name in names for severity in severities]
        right = is_correct(self.source, conditions, "robustness")
        errors = 1 - right.reshape(len(right), len(names), len(severities)).mean(axis=0)
        metrics: dict[str, Any] = {"images": len(right), "mean_corruption_error": float(errors.mean())}
        if self.clean is not None and self.clean.labels is not None:
            metrics["clean_accuracy"] = float(is_correct(self.clean, [CLEAN], "clean images").mean())
        self.tables.append(Table("Robustness of a linear probe", [dict(metrics)]))
        self.tables.append(
            Table("Accuracy by corruption and severity", robustness_rows(errors, names, severities))
        )
        columns = [str(severity) for severity in severities]
        metrics["errors"] = {name: dict(zip(columns, row)) for name, row in zip(names, errors.tolist())}
        self.metrics["robustness"] = metrics

    def _values(
        self,
        source: CorruptedImages,
        conditions: list[Condition],
        value_of: Callable[[list[int], np.ndarray], np.ndarray],
        what: str,
        *,
        views: int = 0,
    ) -> np.ndarray:
        """`value_of` each readable image's row number and (V, C, D) features; processes share the images."""
        prepare = self.prepare_views if views else self.tower.prepare
        versions = ImageVersions(source, conditions, prepare, views=views, seed=self.images.seed)
        encode = encoder_of(self.tower, "embedding" if views else "features")
        rows = random_rows(len(source), self.images.limit).tolist()
        own = rows[distributed.rank_slice(len(rows))]
        values: list[np.ndarray] = []
        with tqdm(total=len(own), desc=what, unit=" images", disable=not distributed.is_main()) as bar:
            for block in encode_versions(
                versions, encode, indices=own, num_workers=self.images.num_workers
            ):
                if block.indices:
                    values.append(value_of(block.indices, block.features))
                bar.update(len(block.indices) + len(block.bad))
                if block.bad:
                    tqdm.write(printable(f"{what}: left out {block.bad[0][1]}"))
        everything = [block for part in distributed.gather_objects(values) for block in part]
        if not everything:
            raise DualencError(f"{what}: none of {len(rows)} images can be read; check the data")
        return np.concatenate(everything)


def _tested_labels(source: CorruptedImages, class_names: Sequence[str] | None) -> np.ndarray:
    """(N,) labels of the images to test, in the class numbers of the training images."""
    if source.labels is None:
        raise DualencError(
            "the images to test have no labels, which the robustness table needs; give a label column"
        )
    return align_labels(source.labels, source.class_names, class_names, "the images to test")
