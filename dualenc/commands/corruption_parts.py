"""The parts of `dualenc evaluate corrupted`: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.commands.figures import heat_figure
from dualenc.commands.images import align_labels, encoder_of, recorded
from dualenc.errors import DualencError
from dualenc.evaluation.corrupted_retrieval import confusions, is_right, nearest_images, nearest_versions, summarise
from dualenc.evaluation.corruption import CorruptedImages
from dualenc.evaluation.image_versions import CLEAN, CleanImages, ImageVersions, Prepare, encode_versions
from dualenc.evaluation.probe import LinearClassifier
from dualenc.evaluation.report import Entry, Figure, Gallery, Item
from dualenc.evaluation.robustness import (
    as_mapping,
    error_rates,
    from_mapping,
    mean_corruption_error,
    robustness_rows,
)
from dualenc.evaluation.tables import Table
from dualenc.files import read_json_object

if TYPE_CHECKING:
    from dualenc.encoders import Tower

GALLERY_IMAGES = 4


class Setup(NamedTuple):
    """What all parts work on.

    Attributes:
        tower: encodes the images.
        prepare_views: images and seeds to augmented inputs of the tower.
        source: their corrupted versions.
        rows: numbers of the images to use.
        clean: the images without corruption, if they are at hand.
        clean_rows: numbers of those to use.
        out: folder for unfinished work.
        signature: model, data and seed, as plain values.
        seed: of corruption and augmentation.
        num_workers: processes that corrupt and augment.
    """

    tower: Tower
    prepare_views: Prepare
    source: CorruptedImages
    rows: list[int]
    clean: CleanImages | None
    clean_rows: list[int]
    out: Path
    signature: dict[str, Any]
    seed: int
    num_workers: int


class Part(NamedTuple):
    """What came out of a part: numbers for metrics.json, and what to show."""

    metrics: dict[str, Any]
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    galleries: Sequence[Gallery] = ()


def versions_part(setup: Setup, severity: int) -> Part:
    """Retrieval of the other view among the corrupted versions of the same image."""
    names = setup.source.corruptions
    conditions = [(name, severity) for name in names]
    found = recorded(
        setup.out / "versions",
        {**setup.signature, "conditions": conditions, "task": "versions"},
        ImageVersions(setup.source, conditions, setup.prepare_views, views=2, seed=setup.seed),
        encoder_of(setup.tower, "embedding"),
        lambda indices, features: nearest_versions(features).tolist(),
        indices=setup.rows,
        num_workers=setup.num_workers,
        what="corrupted retrieval",
    )
    array = np.array(list(found.values()), dtype=np.int64)
    metrics = summarise(array, names)
    row = {"task": f"among {len(names)} versions of the image", "images": len(array), **_headline(metrics)}
    table = Table("Retrieval of the other view", [row])
    mistaken = Table("By corruption", _mistaken_rows(array, names))
    figure = heat_figure(
        confusions(array), names, names, "What the views of each version (row) find", "version found"
    )  # fmt: skip
    galleries = _galleries(setup.source, list(found), array, severity) if distributed.is_main() else []
    return Part({"images": len(array), "severity": severity, **metrics}, [table, mistaken], [figure], galleries)


def plain_part(setup: Setup) -> Part:
    """Retrieval of the other view among all clean images."""
    assert setup.clean is not None
    versions = ImageVersions(setup.clean, [CLEAN], setup.prepare_views, views=2, seed=setup.seed)
    own = setup.clean_rows[distributed.rank_slice(len(setup.clean_rows))]
    encode = encoder_of(setup.tower, "embedding")
    blocks = [
        block.features[:, :, 0]
        for block in encode_versions(versions, encode, indices=own, num_workers=setup.num_workers)
        if block.indices
    ]
    everything = [block for part in distributed.gather_objects(blocks) for block in part]
    if not everything:
        raise DualencError("none of the clean images can be read; check the data")
    found = nearest_images(np.concatenate(everything))
    metrics = summarise(found)
    row = {"task": "among all images, not corrupted", "images": len(found), **_headline(metrics)}
    return Part({"images": len(found), **metrics}, [Table("Retrieval of the other view", [row])])


def robustness_part(
    setup: Setup,
    classifier: LinearClassifier,
    severities: Sequence[int],
    class_names: Sequence[str] | None,
    baseline: np.ndarray | None,
) -> Part:
    """Accuracy of a linear probe under every corruption at every severity.

    Args:
        setup: What to work on.
        classifier: Fit on clean features.
        severities: S of them.
        class_names: Of the classifier's classes.
        baseline: (C, S) errors of another model, to divide by.
    """
    names = setup.source.corruptions
    conditions = [(name, severity) for name in names for severity in severities]
    right = _right(setup, setup.source, setup.rows, conditions, classifier, class_names)
    errors = error_rates(right.reshape(len(right), len(names), len(severities)))
    metrics: dict[str, Any] = {"images": len(right), "mean_corruption_error": mean_corruption_error(errors)}
    if setup.clean is not None and setup.clean.labels is not None:
        clean = _right(setup, setup.clean, setup.clean_rows, [CLEAN], classifier, class_names)
        metrics["clean_accuracy"] = float(clean.mean())
    if baseline is not None:
        metrics["relative_to_baseline"] = mean_corruption_error(errors, baseline)
    summary = Table("Robustness of a linear probe", [dict(metrics)])
    table = Table("Accuracy by corruption and severity", robustness_rows(errors, names, severities))
    caption = "Accuracy of a linear probe by corruption and severity"
    figure = heat_figure(1 - errors, names, [str(severity) for severity in severities], caption, "severity")
    return Part({**metrics, "errors": as_mapping(errors, names, severities)}, [summary, table], [figure])


def _right(
    setup: Setup,
    source: CorruptedImages | CleanImages,
    rows: list[int],
    conditions: list[tuple[str, int]],
    classifier: LinearClassifier,
    class_names: Sequence[str] | None,
) -> np.ndarray:
    """(n, C) whether the classifier is right about each image under each condition."""
    labels = tested_labels(source, class_names)
    digest = hashlib.sha256(classifier.weight.tobytes() + classifier.bias.tobytes() + classifier.mean.tobytes())

    def is_correct(indices: list[int], features: np.ndarray) -> list[list[int]]:
        predicted = classifier.predict(features.reshape(-1, features.shape[-1])).reshape(len(indices), -1)
        return (predicted == labels[indices][:, None]).astype(int).tolist()

    clean = conditions == [CLEAN]
    found = recorded(
        setup.out / ("clean" if clean else "robustness"),
        {
            **setup.signature,
            "conditions": conditions,
            "classifier": digest.hexdigest(),
            "labels": hashlib.sha256(np.ascontiguousarray(labels).tobytes()).hexdigest(),
            "task": "robustness",
        },
        ImageVersions(source, conditions, setup.tower.prepare),
        encoder_of(setup.tower, "features"),
        is_correct,
        indices=rows,
        num_workers=setup.num_workers,
        what="clean images" if clean else "robustness",
    )
    return np.array(list(found.values()), dtype=bool)


def tested_labels(source: CorruptedImages | CleanImages, class_names: Sequence[str] | None) -> np.ndarray:
    """(N,) labels of the images to test, in the class numbers of the training images.

    Raises:
        DualencError: there are none, or a class that training has not.
    """
    if source.labels is None:
        raise DualencError("the images to test have no labels, which the robustness table needs; give a label column")
    return align_labels(source.labels, source.class_names, class_names, "the images to test")


def _headline(metrics: dict[str, float]) -> dict[str, float]:
    return {
        "top-1": metrics["top1"],
        "first to second": metrics["top1_first_to_second"],
        "second to first": metrics["top1_second_to_first"],
    }


def _mistaken_rows(found: np.ndarray, names: Sequence[str]) -> list[dict[str, object]]:
    """Of each version, how often it is found, and what it is most often taken for."""
    rates = confusions(found)
    rows = []
    for number, name in enumerate(names):
        others = np.where(np.arange(len(names)) == number, -1.0, rates[number])
        other = int(others.argmax())
        row = {"corruption": name, "top-1": float(rates[number, number])}
        rows.append({**row, "most often taken for": names[other], "share": float(others[other])})
    return rows


def _galleries(source: CorruptedImages, rows: list[int], found: np.ndarray, severity: int) -> list[Gallery]:
    """The images whose versions are told apart best and worst, and what each first view found."""
    share = is_right(found).mean(axis=(1, 2))
    order = np.argsort(-share, kind="stable")
    count = min(GALLERY_IMAGES, len(order) // 2 or 1)

    def entry(place: int) -> Entry:
        row = rows[place]
        items = [
            Item(
                "" if got == number else f"took it for {source.corruptions[got] if got >= 0 else 'several'}",
                image=source.image(row, name, severity),
                note=name,
                relevant=got == number,
            )
            for number, (name, got) in enumerate(zip(source.corruptions, found[place, 0].tolist()))
        ]
        query = Item(f"image {row}", note=f"{share[place]:.0%} of its views find their pair")
        return Entry(query, items)

    return [
        Gallery("Images whose versions are told apart best", [entry(int(place)) for place in order[:count]]),
        Gallery("Images whose versions are told apart worst", [entry(int(place)) for place in order[::-1][:count]]),
    ]


def read_baseline(path: str, corruptions: Sequence[str], severities: Sequence[int]) -> np.ndarray:
    """(C, S) errors of another model under the same corruptions and severities.

    Args:
        path: metrics.json of its evaluation.
        corruptions: Their C names.
        severities: The S of them.

    Raises:
        DualencError: the file holds no such errors, or none at all under a corruption: they cannot be divided by.
    """
    found = read_json_object(path)
    robustness = found.get("robustness")
    errors = robustness.get("errors") if isinstance(robustness, dict) else None
    if not isinstance(errors, dict) or not all(isinstance(row, dict) for row in errors.values()):
        raise DualencError(f"{path}: holds no corruption errors; give the metrics.json of an evaluation with --train")
    theirs = from_mapping(errors, corruptions, severities)
    for name, row in zip(corruptions, theirs):
        if not row.sum() > 0:
            raise DualencError(f"{path}: the baseline makes no error under {name}, which cannot be divided by")
    return theirs
