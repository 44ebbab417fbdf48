"""The parts of the evaluation under corruptions: retrieval among versions, among images, robustness of a probe."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.data.identity import items_identity
from dualenc.data.images import ImageFiles
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted import (
    CLEAN,
    Condition,
    ImageVersions,
    PrepareImages,
    confusions,
    encode_versions,
    mean_corruption_error,
    nearest_images,
    nearest_versions,
    robustness_rows,
    summarise,
)
from dualenc.evaluation.corruptions import CifarC, CleanImages, CorruptedImages, TinyImageNetC
from dualenc.evaluation.images import align_labels, encoder_of, random_rows
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.report import Table
from dualenc.files import remove, removed_if_refused
from dualenc.search.embed import tower_checksum
from dualenc.terminal import printable

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

    from dualenc.encoders import Tower
    from dualenc.evaluation.options import ImageOptions


class Setup(NamedTuple):
    """The model, the images and the settings that all parts share.

    Attributes:
        tower: the image tower.
        prepare_views: images and seeds to augmented inputs of the tower.
        source: the corrupted images.
        clean: the images without corruption, if they are at hand.
        out: folder for unfinished work.
        signature: model, data and seed, as plain values.
        given: how many images to use, the seed of corruptions and augmentation, and the number of workers.
    """

    tower: Tower
    prepare_views: PrepareImages
    source: CorruptedImages
    clean: CleanImages | None
    out: Path
    signature: dict[str, Any]
    given: ImageOptions


@dataclass
class Findings:
    """Results of the parts: numbers for metrics.json, and tables for the report."""

    metrics: dict[str, Any] = field(default_factory=dict)
    retrieval: list[dict[str, object]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    def add_retrieval(self, part: str, task: str, images: int, metrics: dict[str, float], **more: object) -> None:
        """Add the numbers of a part that finds the other view of an image, and its row in the table of such parts."""
        self.metrics[part] = {"images": images, **more, **metrics}
        row: dict[str, object] = {"task": task, "images": images, "top-1": metrics["top1"]}
        row |= {"first to second": metrics["top1_first_to_second"], "second to first": metrics["top1_second_to_first"]}
        self.retrieval.append(row)


def contents_of(tower: Tower, source: CorruptedImages, images: CleanImages | None) -> dict[str, Any]:
    """Checksums of weights and images: names may stay while contents change."""
    found = []
    if distributed.is_main():
        found = [_checksum(source), "" if images is None else _checksum(images)]
    return {"images": len(source), "model": tower_checksum(tower), "contents": distributed.broadcast_object(found)}


def _checksum(source: CorruptedImages) -> str:
    if isinstance(source, CifarC | TinyImageNetC):
        return items_identity(ImageFiles(source.path, source.files), "image")
    assert isinstance(source, CleanImages)
    return items_identity(source.images, "image")


def measure(
    setup: Setup,
    part: str,
    source: CorruptedImages,
    conditions: list[Condition],
    value_of: Callable[[list[int], np.ndarray], Sequence[Any]],
    what: str,
    *,
    views: int = 0,
    depends_on: dict[str, str],
) -> dict[int, Any]:
    """A plain value for each image, from the features of its versions. The processes share the images.

    Finished values are kept in the folder of this part, where an interrupted run resumes. Images that cannot be read
    are named on stderr; where none can, that is an error and nothing is kept.

    Args:
        setup: the model and the images.
        part: name of the folder of finished values.
        source, conditions: the images, and which versions of them.
        value_of: row numbers (n) and features (n, V, C, D) of images to one value for each.
        what: name of the progress bar.
        views: number of augmented views to embed; 0 for the features of unchanged images.
        depends_on: what the values depend on besides the setup and the conditions.
    """
    prepare = setup.prepare_views if views else setup.tower.prepare
    versions = ImageVersions(source, conditions, prepare, views=views, seed=setup.given.seed)
    encode = encoder_of(setup.tower, "embedding" if views else "features")
    indices = random_rows(len(source), setup.given.limit).tolist()
    folder = setup.out / part
    with removed_if_refused(folder, "part-*.ndjson"):
        ledger: Ledger[int] = Ledger(folder, {**setup.signature, "conditions": conditions, **depends_on})
        todo = ledger.missing(indices)
        with tqdm(total=len(todo), desc=what, unit=" images", disable=not (todo and distributed.is_main())) as bar:
            for block in encode_versions(versions, encode, indices=todo, num_workers=setup.given.num_workers):
                values = value_of(block.indices, block.features) if block.indices else []
                ledger.add(dict(zip(block.indices, values, strict=True)) | {index: None for index, _ in block.bad})
                bar.update(len(block.indices) + len(block.bad))
                if block.bad:
                    tqdm.write(printable(f"{what}: left out {block.bad[0][1]}"))
        done = {index: value for index, value in ledger.all_values().items() if value is not None}
        if not done:
            if distributed.is_main():
                remove(folder)
            raise DualencError(f"{what}: none of {len(indices)} images can be read; check the data")
    return done


def add_versions(found: Findings, setup: Setup, severity: int) -> None:
    """Retrieval of the other view among the corrupted versions of the same image."""
    names = setup.source.corruptions
    done = measure(
        setup,
        "versions",
        setup.source,
        [(name, severity) for name in names],
        lambda indices, features: nearest_versions(features).tolist(),
        "corrupted retrieval",
        views=2,
        depends_on={"task": "versions"},
    )
    nearest = np.array(list(done.values()), dtype=np.int64)
    task = f"among {len(names)} versions of the image"
    found.add_retrieval("corrupted", task, len(nearest), summarise(nearest, names), severity=severity)
    rates = confusions(nearest)
    others = rates - 2 * np.eye(len(names))
    rows = [
        {"corruption": name, "top-1": right, "most often taken for": names[row.argmax()], "share": float(row.max())}
        for name, right, row in zip(names, rates.diagonal().tolist(), others)
    ]
    found.tables.append(Table("By corruption", rows))


def add_plain(found: Findings, setup: Setup, images: CleanImages) -> None:
    """Retrieval of the other view among all clean images."""
    versions = ImageVersions(images, [CLEAN], setup.prepare_views, views=2, seed=setup.given.seed)
    rows = random_rows(len(images), setup.given.limit).tolist()
    own = rows[distributed.rank_slice(len(rows))]
    encode = encoder_of(setup.tower, "embedding")
    blocks = [
        block.features[:, :, 0]
        for block in encode_versions(versions, encode, indices=own, num_workers=setup.given.num_workers)
        if block.indices
    ]
    everything = [block for part in distributed.gather_objects(blocks) for block in part]
    if not everything:
        raise DualencError("none of the clean images can be read; check the data")
    nearest = nearest_images(np.concatenate(everything))
    found.add_retrieval("plain", "among all images, not corrupted", len(nearest), summarise(nearest))


def add_robustness(
    found: Findings,
    setup: Setup,
    classifier: Pipeline,
    severities: Sequence[int],
    class_names: Sequence[str] | None,
    baseline: np.ndarray | None,
) -> None:
    """Accuracy of a linear probe of clean features under every corruption; `baseline`: (C, S) errors to divide by."""
    scaler, regression = (step for _, step in classifier.steps)
    parameters = (regression.coef_, regression.intercept_, scaler.mean_, scaler.scale_)

    def is_correct(source: CorruptedImages, conditions: list[Condition], part: str, what: str) -> np.ndarray:
        """(n, C) whether the classifier is correct for each image under each condition."""
        labels = tested_labels(source, class_names)

        def correct(indices: list[int], features: np.ndarray) -> list[list[int]]:
            predicted = classifier.predict(features.reshape(-1, features.shape[-1])).reshape(len(indices), -1)
            return (predicted == labels[indices][:, None]).astype(int).tolist()

        digests = {"classifier": _digest(*parameters), "labels": _digest(labels)}
        done = measure(setup, part, source, conditions, correct, what, depends_on={**digests, "task": "robustness"})
        return np.array(list(done.values()), dtype=bool)

    names = setup.source.corruptions
    conditions = [(name, severity) for name in names for severity in severities]
    right = is_correct(setup.source, conditions, "robustness", "robustness")
    errors = 1 - right.reshape(len(right), len(names), len(severities)).mean(axis=0)
    metrics: dict[str, Any] = {"images": len(right), "mean_corruption_error": mean_corruption_error(errors)}
    if setup.clean is not None and setup.clean.labels is not None:
        metrics["clean_accuracy"] = float(is_correct(setup.clean, [CLEAN], "clean", "clean images").mean())
    if baseline is not None:
        metrics["relative_to_baseline"] = mean_corruption_error(errors, baseline)
    found.tables.append(Table("Robustness of a linear probe", [dict(metrics)]))
    found.tables.append(Table("Accuracy by corruption and severity", robustness_rows(errors, names, severities)))
    columns = [str(severity) for severity in severities]
    metrics["errors"] = {name: dict(zip(columns, row)) for name, row in zip(names, errors.tolist())}
    found.metrics["robustness"] = metrics


def _digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(values.tobytes() for values in arrays)).hexdigest()


def tested_labels(source: CorruptedImages, class_names: Sequence[str] | None) -> np.ndarray:
    """(N,) labels of the images to test, in the class numbers of the training images."""
    if source.labels is None:
        raise DualencError("the images to test have no labels, which the robustness table needs; give a label column")
    return align_labels(source.labels, source.class_names, class_names, "the images to test")
