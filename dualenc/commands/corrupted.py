"""`dualenc evaluate corrupted`: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from dualenc import distributed
from dualenc.commands.evaluation import (
    HIGHEST_SEED,
    MOST_WORKERS,
    align_labels,
    begin,
    check_range,
    conclude,
    display_name,
    encoder_of,
    labelled_features,
    open_image_tower,
    open_images,
    random_rows,
    recorded,
    require_labels,
    simclr_prepare,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.corrupted import (
    CLEAN,
    CleanImages,
    ImageVersions,
    Prepare,
    as_mapping,
    confusions,
    encode_versions,
    error_rates,
    from_mapping,
    is_right,
    mean_corruption_error,
    nearest_images,
    nearest_versions,
    robustness_rows,
    summarise,
)
from dualenc.evaluation.corruptions import (
    ALL,
    SEVERITIES,
    CifarC,
    CorruptedImages,
    GeneratedCorruptions,
    TinyImageNetC,
    is_corrupted_folder,
    read_corrupted,
)
from dualenc.evaluation.probe import fit_best
from dualenc.evaluation.report import Entry, Figure, Gallery, Item, Table
from dualenc.files import read_json_object

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

    from dualenc.encoders import Tower

GALLERY_IMAGES = 4
TRAIN_BATCH = 256


class Setup(NamedTuple):
    """What all parts work on.

    Attributes:
        tower: encodes the images.
        prepare_views: images and seeds to augmented inputs of the tower.
        source: their corrupted versions.
        clean: the images without corruption, if they are at hand.
        limit: how many images to use; all if it is None.
        out: folder for unfinished work.
        signature: model, data and seed, as plain values.
        seed: of corruption and augmentation.
        num_workers: processes that corrupt and augment.
    """

    tower: Tower
    prepare_views: Prepare
    source: CorruptedImages
    clean: CleanImages | None
    limit: int | None
    out: Path
    signature: dict[str, Any]
    seed: int
    num_workers: int


class Part(NamedTuple):
    """What came out of a part: numbers for metrics.json, and what to show."""

    metrics: dict[str, Any]
    tables: list[Table]
    figures: Sequence[Figure] = ()
    galleries: Sequence[Gallery] = ()


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

    Writes metrics.json and report.html. Finished images are kept below OUT: an interrupted evaluation resumes there.

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
    for value in [severity, *(severities or [])]:
        if value not in SEVERITIES:
            raise DualencError(f"severity {value}: choose from 1, 2, 3, 4, 5")
    target, device_to_use = begin("corrupted", model, data, out, device)
    source, images = _open(data, split, clean, corruptions or [], seed, label_column)
    at = severities or list(SEVERITIES)
    if train is not None:
        training = open_images(train, train_split, label_column=label_column, limit=train_limit)
        labels = require_labels(training, f"{train} ({train_split})")
        if len(np.unique(labels)) < 2:
            raise DualencError(f"{train} ({train_split}): all images are of one class; a probe needs two or more")
    theirs = None if baseline is None else read_baseline(baseline, source.corruptions, at)
    if train is not None:
        tested_labels(source, training.class_names)  # as early as possible: classes that training has not
    tower = open_image_tower(model, device_to_use)
    facts: dict[str, Any] = {"data": data, "split": split, "augmentation": augmentation, "seed": seed}
    setup = Setup(
        tower,
        simclr_prepare(tower.prepare) if augmentation == "simclr" else tower.prepare,
        source,
        images,
        limit,
        target / "finished",
        {**facts, **_identity(tower, source, images)},
        seed,
        num_workers,
    )
    parts = {"corrupted": versions_part(setup, severity)}
    if images is not None:
        parts["plain"] = plain_part(setup, images)
    if train is not None:
        fitted = labelled_features(tower, training, labels, setup.out / "train-features", TRAIN_BATCH, num_workers)
        classifier = fit_best(fitted.features, fitted.labels)[0] if distributed.is_main() else None
        classifier = distributed.broadcast_object(classifier)  # the same on all processes
        parts["robustness"] = robustness_part(setup, classifier, at, training.class_names, theirs)
    if distributed.is_main():
        retrieved = [part for name, part in parts.items() if name != "robustness"]
        tables = [Table("Retrieval of the other view", [row for part in retrieved for row in part.tables[0].rows])]
        tables += [table for part in retrieved for table in part.tables[1:]]
        tables += parts["robustness"].tables if "robustness" in parts else []
        conclude(
            target,
            f"Corrupted images: {display_name(model)} on {data}",
            {"task": "corrupted", "model": model, **facts, **{name: part.metrics for name, part in parts.items()}},
            {"model": model, **facts},
            tables,
            figures=[figure for part in parts.values() for figure in part.figures],
            galleries=[gallery for part in parts.values() for gallery in part.galleries],
        )
    distributed.barrier()


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


def _identity(tower: Tower, source: CorruptedImages, images: CleanImages | None) -> dict[str, Any]:
    """Weights and images by their contents, since names may stay while contents change."""
    from dualenc.search.embed import tower_checksum

    contents = [_contents(source), "" if images is None else _contents(images)] if distributed.is_main() else []
    contents = distributed.broadcast_object(contents)
    return {"images": len(source), "model": tower_checksum(tower), "contents": contents}


def _contents(source: CorruptedImages | CleanImages) -> str:
    from dualenc.data.identity import items_identity
    from dualenc.data.images import ImageFiles

    if isinstance(source, CifarC | TinyImageNetC):
        return items_identity(ImageFiles(source.path, source.files), "image")
    assert isinstance(source, CleanImages | GeneratedCorruptions)
    return items_identity(source.images, "image")


def versions_part(setup: Setup, severity: int) -> Part:
    """Retrieval of the other view among the corrupted versions of the same image."""
    names = setup.source.corruptions
    conditions = [(name, severity) for name in names]
    done = recorded(
        setup.out / "versions",
        {**setup.signature, "conditions": conditions, "task": "versions"},
        ImageVersions(setup.source, conditions, setup.prepare_views, views=2, seed=setup.seed),
        encoder_of(setup.tower, "embedding"),
        lambda indices, features: nearest_versions(features).tolist(),
        indices=random_rows(len(setup.source), setup.limit).tolist(),
        num_workers=setup.num_workers,
        what="corrupted retrieval",
    )
    found = np.array(list(done.values()), dtype=np.int64)
    metrics = summarise(found, names)
    rates = confusions(found)
    mistaken = []  # of each version, how often it is found, and what it is most often taken for
    for number, name in enumerate(names):
        others = np.where(np.arange(len(names)) == number, -1.0, rates[number])
        other = int(others.argmax())
        row = {"corruption": name, "top-1": float(rates[number, number])}
        mistaken.append({**row, "most often taken for": names[other], "share": float(others[other])})
    return Part(
        {"images": len(found), "severity": severity, **metrics},
        [_headline(f"among {len(names)} versions of the image", len(found), metrics), Table("By corruption", mistaken)],
        [Figure("What the views of each version (row) find", plots.heat(rates, names, names, xlabel="version found"))],
        _galleries(setup.source, list(done), found, severity) if distributed.is_main() else [],
    )


def plain_part(setup: Setup, images: CleanImages) -> Part:
    """Retrieval of the other view among all clean images."""
    versions = ImageVersions(images, [CLEAN], setup.prepare_views, views=2, seed=setup.seed)
    rows = random_rows(len(images), setup.limit).tolist()
    own = rows[distributed.rank_slice(len(rows))]
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
    return Part({"images": len(found), **metrics}, [_headline("among all images, not corrupted", len(found), metrics)])


def _headline(task: str, images: int, metrics: dict[str, float]) -> Table:
    row = {
        "task": task,
        "images": images,
        "top-1": metrics["top1"],
        "first to second": metrics["top1_first_to_second"],
        "second to first": metrics["top1_second_to_first"],
    }
    return Table("Retrieval of the other view", [row])


def robustness_part(
    setup: Setup,
    classifier: Pipeline,
    severities: Sequence[int],
    class_names: Sequence[str] | None,
    baseline: np.ndarray | None,
) -> Part:
    """Accuracy of a linear probe, fit on clean features, under every corruption at every severity.

    `baseline` holds the (C, S) errors of another model, to divide by.
    """
    names = setup.source.corruptions
    conditions = [(name, severity) for name in names for severity in severities]
    right = _right(setup, setup.source, conditions, classifier, class_names)
    errors = error_rates(right.reshape(len(right), len(names), len(severities)))
    metrics: dict[str, Any] = {"images": len(right), "mean_corruption_error": mean_corruption_error(errors)}
    if setup.clean is not None and setup.clean.labels is not None:
        metrics["clean_accuracy"] = float(_right(setup, setup.clean, [CLEAN], classifier, class_names).mean())
    if baseline is not None:
        metrics["relative_to_baseline"] = mean_corruption_error(errors, baseline)
    summary = Table("Robustness of a linear probe", [dict(metrics)])
    table = Table("Accuracy by corruption and severity", robustness_rows(errors, names, severities))
    plot = plots.heat(1 - errors, names, [str(severity) for severity in severities], xlabel="severity")
    figures = [Figure("Accuracy of a linear probe by corruption and severity", plot)]
    return Part({**metrics, "errors": as_mapping(errors, names, severities)}, [summary, table], figures)


def _right(
    setup: Setup,
    source: CorruptedImages | CleanImages,
    conditions: list[tuple[str, int]],
    classifier: Pipeline,
    class_names: Sequence[str] | None,
) -> np.ndarray:
    """(n, C) whether the classifier is right about each image under each condition."""
    labels = tested_labels(source, class_names)
    scaler, regression = (step for _, step in classifier.steps)
    digest = hashlib.sha256()
    for values in (regression.coef_, regression.intercept_, scaler.mean_, scaler.scale_):
        digest.update(np.ascontiguousarray(values).tobytes())

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
        indices=random_rows(len(source), setup.limit).tolist(),
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
