"""`dualenc evaluate corrupted`: retrieval among versions, retrieval among images, the robustness table."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.commands.evaluation import MAX_SEED, MAX_WORKERS, Evaluation, check_range, display_name
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.corrupted import (
    CLEAN,
    Condition,
    ImageVersions,
    PrepareImages,
    confusions,
    encode_versions,
    is_right,
    mean_corruption_error,
    nearest_images,
    nearest_versions,
    read_baseline,
    robustness_rows,
    summarise,
)
from dualenc.evaluation.corruptions import (
    ALL,
    SEVERITIES,
    CifarC,
    CleanImages,
    CorruptedImages,
    GeneratedCorruptions,
    TinyImageNetC,
    is_corrupted_folder,
    read_corrupted,
)
from dualenc.evaluation.images import (
    align_labels,
    encoder_of,
    labelled_features,
    open_image_tower,
    open_images,
    random_rows,
    require_labels,
    simclr_prepare,
)
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.probe import linear_probe
from dualenc.evaluation.report import Entry, Figure, Gallery, Item, Table
from dualenc.files import remove, removed_if_refused
from dualenc.terminal import printable

if TYPE_CHECKING:
    from sklearn.pipeline import Pipeline

    from dualenc.encoders import Tower

GALLERY_IMAGES = 4
TRAIN_BATCH = 256


class Setup(NamedTuple):
    """What all parts work on."""

    tower: Tower
    prepare_views: PrepareImages  # images and seeds to augmented inputs of the tower
    source: CorruptedImages
    clean: CleanImages | None  # the images without corruption, if they are at hand
    limit: int | None  # how many images to use; all if it is None
    out: Path  # for unfinished work
    signature: dict[str, Any]  # model, data and seed, as plain values
    seed: int
    num_workers: int


@dataclass
class Findings:
    """What the parts add to: numbers for metrics.json, and what to show."""

    metrics: dict[str, Any] = field(default_factory=dict)
    retrieval: list[dict[str, object]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    galleries: list[Gallery] = field(default_factory=list)

    def add_retrieval(self, part: str, task: str, images: int, metrics: dict[str, float], **more: object) -> None:
        """A part that finds the other view of an image: its numbers, and its row in the table of both such parts."""
        self.metrics[part] = {"images": images, **more, **metrics}
        row: dict[str, object] = {"task": task, "images": images, "top-1": metrics["top1"]}
        row |= {"first to second": metrics["top1_first_to_second"], "second to first": metrics["top1_second_to_first"]}
        self.retrieval.append(row)


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
    from dualenc.data.sources import usual_split

    split = split or usual_split(clean or data, "test")
    evaluation = Evaluation("corrupted", model, data, out, device)
    source, images = _open(data, split, clean, corruptions or [], seed, label_column)
    at = severities or list(SEVERITIES)
    if train is not None:
        training = open_images(train, train_split, label_column=label_column, limit=train_limit)
        labels = require_labels(training, f"{train} ({train_split})", for_training=True)
    theirs = None if baseline is None else read_baseline(baseline, source.corruptions, at)
    if train is not None:
        tested_labels(source, training.class_names)  # as early as possible: classes that training has not
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
        {**facts, **_identity(tower, source, images)},
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
        classifier = distributed.broadcast_object(classifier)  # the same on all processes
        add_robustness(found, setup, classifier, at, training.class_names, theirs)
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


def _identity(tower: Tower, source: CorruptedImages, images: CleanImages | None) -> dict[str, Any]:
    """Weights and images by their contents, since names may stay while contents change."""
    from dualenc.data.identity import items_identity
    from dualenc.data.images import ImageFiles
    from dualenc.search.embed import tower_checksum

    def contents(of: CorruptedImages) -> str:
        if isinstance(of, CifarC | TinyImageNetC):
            return items_identity(ImageFiles(of.path, of.files), "image")
        assert isinstance(of, CleanImages)
        return items_identity(of.images, "image")

    found = [contents(source), "" if images is None else contents(images)] if distributed.is_main() else []
    return {"images": len(source), "model": tower_checksum(tower), "contents": distributed.broadcast_object(found)}


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
    """A plain value of each image from the features of its versions, on every process; the images are shared over them.

    Finished values are kept in the folder of this part, where an interrupted run resumes. Images that cannot be read
    are counted on stderr; where none can, that is an error and nothing is kept.

    Args:
        setup: What encodes, and which images.
        part: Names the folder of finished values.
        source: The images.
        conditions: Which versions of them.
        value_of: Numbers (n) and features (n, V, C, D) of some images to one value for each.
        what: Names the progress bar.
        views: Of augmented images and their embeddings; 0 for the features of images as they are.
        depends_on: Whatever else the values depend on, besides the setup and the conditions.
    """
    prepare = setup.prepare_views if views else setup.tower.prepare
    versions = ImageVersions(source, conditions, prepare, views=views, seed=setup.seed)
    encode = encoder_of(setup.tower, "embedding" if views else "features")
    indices = random_rows(len(source), setup.limit).tolist()
    folder = setup.out / part
    with removed_if_refused(folder, "part-*.ndjson"):
        ledger: Ledger[int] = Ledger(folder, {**setup.signature, "conditions": conditions, **depends_on})
        todo = ledger.missing(indices)
        with tqdm(total=len(todo), desc=what, unit=" images", disable=not (todo and distributed.is_main())) as bar:
            for block in encode_versions(versions, encode, indices=todo, num_workers=setup.num_workers):
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
    mistaken = []  # of each version, how often it is found, and what it is most often taken for
    for number, name in enumerate(names):
        others = np.where(np.arange(len(names)) == number, -1.0, rates[number])
        other = int(others.argmax())
        row = {"corruption": name, "top-1": float(rates[number, number])}
        mistaken.append({**row, "most often taken for": names[other], "share": float(others[other])})
    found.tables.append(Table("By corruption", mistaken))
    plot = plots.heat(rates, names, names, xlabel="version found")
    found.figures.append(Figure("What the views of each version (row) find", plot))
    if distributed.is_main():
        found.galleries += _galleries(setup.source, list(done), nearest, severity)


def add_plain(found: Findings, setup: Setup, images: CleanImages) -> None:
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
    """Accuracy of a linear probe, fit on clean features, under every corruption at every severity.

    `baseline` holds the (C, S) errors of another model, to divide by.
    """
    scaler, regression = (step for _, step in classifier.steps)
    parameters = (regression.coef_, regression.intercept_, scaler.mean_, scaler.scale_)

    def rightly(source: CorruptedImages, conditions: list[Condition], part: str, what: str) -> np.ndarray:
        """(n, C) whether the classifier is right about each image under each condition."""
        labels = tested_labels(source, class_names)

        def right_of(indices: list[int], features: np.ndarray) -> list[list[int]]:
            predicted = classifier.predict(features.reshape(-1, features.shape[-1])).reshape(len(indices), -1)
            return (predicted == labels[indices][:, None]).astype(int).tolist()

        digests = {"classifier": _digest(*parameters), "labels": _digest(labels)}
        done = measure(setup, part, source, conditions, right_of, what, depends_on={**digests, "task": "robustness"})
        return np.array(list(done.values()), dtype=bool)

    names = setup.source.corruptions
    conditions = [(name, severity) for name in names for severity in severities]
    right = rightly(setup.source, conditions, "robustness", "robustness")
    errors = 1 - right.reshape(len(right), len(names), len(severities)).mean(axis=0)
    metrics: dict[str, Any] = {"images": len(right), "mean_corruption_error": mean_corruption_error(errors)}
    if setup.clean is not None and setup.clean.labels is not None:
        metrics["clean_accuracy"] = float(rightly(setup.clean, [CLEAN], "clean", "clean images").mean())
    if baseline is not None:
        metrics["relative_to_baseline"] = mean_corruption_error(errors, baseline)
    found.tables.append(Table("Robustness of a linear probe", [dict(metrics)]))
    found.tables.append(Table("Accuracy by corruption and severity", robustness_rows(errors, names, severities)))
    columns = [str(severity) for severity in severities]
    plot = plots.heat(1 - errors, names, columns, xlabel="severity")
    found.figures.append(Figure("Accuracy of a linear probe by corruption and severity", plot))
    metrics["errors"] = {name: dict(zip(columns, row)) for name, row in zip(names, errors.tolist())}
    found.metrics["robustness"] = metrics


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def tested_labels(source: CorruptedImages, class_names: Sequence[str] | None) -> np.ndarray:
    """(N,) labels of the images to test, in the class numbers of the training images."""
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
