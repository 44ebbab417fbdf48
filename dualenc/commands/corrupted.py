"""The parts of `dualenc evaluate corrupted`: retrieval among versions, retrieval among images, the robustness table."""

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
    check_range,
    display_name,
    heat_figure,
    output_folder,
    start_processes,
)
from dualenc.commands.probe import (
    align_labels,
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
from dualenc.evaluation.probe import LinearClassifier, fit_best
from dualenc.evaluation.report import Entry, Figure, Gallery, Item, Table, print_table, write_report
from dualenc.files import read_json_object, write_json
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.data import Corpus
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
    from dualenc.search.embed import tower_checksum

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
