"""What the image evaluations share: images with labels, the image tower of a model, augmented views, encoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from tqdm.auto import tqdm

from dualenc import distributed
from dualenc.commands.evaluation import (
    HIGHEST_SEED,
    MOST_ITEMS,
    MOST_WORKERS,
    check_range,
    display_name,
    keep_embeddings,
    output_folder,
    similarity_figure,
    start_processes,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.convergence import effective_rank, label_similarities, uniformity
from dualenc.evaluation.corrupted import (
    CLEAN,
    CleanImages,
    EncodeInputs,
    ImageVersions,
    Ledger,
    Prepare,
    encode_versions,
)
from dualenc.evaluation.corruptions import Images, stable_seed
from dualenc.evaluation.probe import (
    L2_SWEEP,
    Batches,
    accuracy,
    draw_per_class,
    feature_batches,
    few_shot,
    knn_predict,
    linear_probe,
    predict,
    sgd_probe,
)
from dualenc.evaluation.report import Figure, Table, print_table, write_report
from dualenc.files import remove, removed_if_refused, write_json
from dualenc.terminal import printable
from dualenc.types import Inputs, Output

if TYPE_CHECKING:
    from dualenc.data import Corpus
    from dualenc.encoders import Tower

Source = tuple[str, str, int | None]
"""Data, split and the number of images to take."""


def random_rows(total: int, limit: int | None) -> np.ndarray:
    """All numbers below `total`, or `limit` of them, always the same: files are often sorted by class."""
    return np.sort(np.random.default_rng(0).permutation(total)[:limit])


def open_images(data: str, split: str, *, label_column: str | None = None, limit: int | None = None) -> Corpus:
    """The images of whatever `data.open_corpus` reads, with their labels if there are any.

    Args:
        data: Also a folder of images with a subfolder for each split.
        split: Which split; a folder of images without such a subfolder is taken whole.
        label_column: Of a table; by default `label`, if there is one.
        limit: Take so many images, chosen at random, always the same ones.
    """
    from dualenc.data import Corpus, open_corpus
    from dualenc.data.columns import Picked
    from dualenc.data.sources import is_image_folder

    folder = Path(data) / split
    # A split is a name, not a way out of the folder.
    is_subfolder = Path(split).name == split != ".." and is_image_folder(data) and folder.is_dir()
    source = folder if is_subfolder else data
    images = open_corpus(source, modality="image", split=split, label_column=label_column)
    if images.modality != "image":
        raise DualencError(f"{data}: holds {images.modality}; give images")
    if limit is None or limit >= len(images):
        return images
    rows = random_rows(len(images), limit)
    labels = None if images.labels is None else images.labels[rows]
    ids = [images.ids[row] for row in rows]
    return Corpus(ids, Picked(images.items, rows), "image", labels=labels, class_names=images.class_names)


def require_labels(corpus: Corpus, what: str) -> np.ndarray:
    """The (N,) labels of a corpus.

    Raises:
        DualencError: it has none, or an image has none.
    """
    if corpus.labels is None:
        raise DualencError(f"{what}: there are no labels; name their column with --label-column, or use class folders")
    if (corpus.labels < 0).any():
        raise DualencError(f"{what}: image {int(np.argmax(corpus.labels < 0))} has no label; give every image one")
    return corpus.labels


class Labelled(NamedTuple):
    """Images, their features (N, D) and labels (N,); images that cannot be read are left out of all three."""

    items: Images
    features: np.ndarray
    labels: np.ndarray


def labelled_features(
    tower: Tower, corpus: Corpus, labels: np.ndarray, folder: Path, batch_size: int, num_workers: int
) -> Labelled:
    """What probes are fit on and tested with; features are kept in `folder`, where an interrupted run goes on."""
    from dualenc.data.columns import Picked

    embeddings = keep_embeddings(
        folder, tower, corpus, {}, batch_size=batch_size, output="features", num_workers=num_workers
    )
    row_of = {name: row for row, name in enumerate(corpus.ids)}
    rows = np.array([row_of[name] for name in embeddings.ids])
    return Labelled(Picked(corpus.items, rows), np.asarray(embeddings.vectors, np.float32), labels[rows])


def align_labels(labels: np.ndarray, names: Sequence[str] | None, onto: Sequence[str] | None, what: str) -> np.ndarray:
    """Class numbers of one source in the numbering of another, by the names of the classes.

    A name matches its equal, or one that begins with it as a word ("n01443537" and "n01443537 goldfish").

    Args:
        labels: (N,) class numbers.
        names: The name of each class number; None leaves the numbers as they are.
        onto: The names in the other numbering.
        what: Names the source in the error.

    Raises:
        DualencError: a class that occurs is not among the others.
    """
    if names is None or onto is None or list(names) == list(onto):
        return labels
    numbers = {key: number for number, name in reversed(list(enumerate(onto))) for key in (name.split()[0], name)}
    numbers |= {name: number for number, name in enumerate(onto)}
    mapped = labels.copy()
    for number in np.unique(labels).tolist():
        if names[number] not in numbers:
            raise DualencError(
                f"{what}: class {names[number]} is not among the {len(onto)} classes of the training images"
            )
        mapped[labels == number] = numbers[names[number]]
    return mapped


def open_image_tower(model: str, device: torch.device) -> Tower:
    """The image tower of a model of kind image or image-text, in evaluation mode.

    Raises:
        DualencError: it cannot be loaded, or has no image tower.
    """
    from dualenc.encoders import load_model

    encoder = load_model(model, device=str(device))
    if encoder.left.modality != "image":
        raise DualencError(f"{model}: is of kind {encoder.kind} and encodes no images; give a model of kind image")
    encoder.eval()
    return encoder.left


class AugmentedPrepare:
    """A tower's evaluation preprocessing, of images augmented before it; picklable.

    Whatever preprocessing a model has, it sees the same augmentation; a loaded model does not know how it was trained.

    Args:
        prepare: The tower's.
        augment: Image and seed to pixels (3, H, W) in [0, 1] or to an image.
    """

    def __init__(self, prepare: Prepare, augment: Callable[[Image.Image, int], Any]) -> None:
        self.prepare, self.augment = prepare, augment

    def __call__(self, items: Sequence[Image.Image], seeds: Sequence[int] | None = None) -> Inputs:
        if seeds is None:
            return self.prepare(items)
        return self.prepare([_as_image(self.augment(item, seed)) for item, seed in zip(items, seeds, strict=True)])


def simclr_prepare(prepare: Prepare) -> AugmentedPrepare:
    """SimCLR's augmentation at the size of the tower's input, before the tower's preprocessing."""
    from dualenc.data.views import SimCLR

    side = prepare([Image.new("RGB", (64, 64))])["image"].shape[-1]
    return AugmentedPrepare(prepare, SimCLR(size=side))


def crop_and_flip(image: Image.Image, seed: int) -> Image.Image:
    """A random crop, brought back to the image's size, and a random flip: the augmentation of the SGD probe."""
    import random

    from dualenc.data.views import crop_box

    draw = random.Random(seed).random
    top, left, height, width = crop_box(image.height, image.width, 0.08, draw)
    box = (left, top, left + width, top + height)
    view = image.resize(image.size, Image.Resampling.BICUBIC, box=box)
    return view.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if draw() < 0.5 else view


def encoder_of(tower: Tower, output: Output) -> EncodeInputs:
    """Inputs of the tower to (B, D) float32 embeddings, or to the features that probes use."""
    device = next(tower.parameters()).device

    @torch.inference_mode()
    def encode(inputs: Inputs) -> np.ndarray:
        on_device = {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}
        vectors: Tensor = tower(on_device) if output == "embedding" else tower.features(on_device)
        return vectors.float().cpu().numpy()

    return encode


def recorded(
    folder: Path,
    signature: dict[str, Any],
    versions: ImageVersions,
    encode: EncodeInputs,
    value_of: Callable[[list[int], np.ndarray], Sequence[Any]],
    *,
    indices: Sequence[int],
    num_workers: int,
    what: str,
) -> dict[int, Any]:
    """A value of each image from the features of its versions; resumes, and shares the images over processes.

    Args:
        folder: Where finished values are kept.
        signature: Everything the values depend on.
        versions: Of the images.
        encode: Inputs to features.
        value_of: Numbers (n) and features (n, V, C, D) of some images to one plain value for each.
        indices: Numbers of the images to do.
        num_workers: Processes that prepare.
        what: Names the progress bar.

    Returns:
        The value by number of every image that could be read, on every process. Others are counted on stderr.

    Raises:
        DualencError: none could be read; nothing is kept then.
    """
    with removed_if_refused(folder, "part-*.ndjson"):
        ledger: Ledger[int] = Ledger(folder, signature)
        todo = ledger.missing(indices)
        bar = tqdm(total=len(todo), desc=what, unit=" images", disable=not (todo and distributed.is_main()))
        with bar:
            for block in encode_versions(versions, encode, indices=todo, num_workers=num_workers):
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


def _as_image(view: Tensor | Image.Image) -> Image.Image:
    if isinstance(view, Image.Image):
        return view
    pixels = (view.permute(1, 2, 0) * 255).round().clamp(0, 255).to(torch.uint8).numpy()
    return Image.fromarray(pixels)


Row = dict[str, object]

NEIGHBOURS, TEMPERATURE = 20, 0.07
SHOTS, DRAWS = (1, 5, 10), 5
SGD_BATCH = 256


def probe(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "test",
    train: str | None = None,
    train_split: str = "train",
    label_column: str | None = None,
    limit: int | None = None,
    train_limit: int | None = None,
    l2: list[float] | None = None,
    shots: list[int] | None = None,
    sgd: Literal["no", "features", "images"] = "no",
    sgd_epochs: int = 100,
    seed: int = 0,
    batch_size: int = 256,
    num_workers: int = 2,
    device: str | None = None,
) -> None:
    """Probe the frozen image features of a model: linear, nearest neighbours, few-shot.

    Writes metrics.json and report.html. Features are kept below OUT: an interrupted evaluation goes on with them.

    Args:
        model: model folder or name, of kind image or image-text.
        data: images with labels: parquet or other table, hub name, or a folder of class folders.
        out: folder to write; by default evaluations/probe/MODEL-DATA.
        split: which split is tested.
        train: images to train probes on, if they are not a split of the same data.
        train_split: which split is trained on.
        label_column: of a table; by default `label`.
        limit: test so many images, chosen at random.
        train_limit: train on so many images, chosen at random.
        l2: penalties to try in the linear probe, chosen on a tenth of the training images; by default 1e-6 to 0.1.
        shots: images of each class in the few-shot probes; by default 1, 5, 10, as far as there are so many.
        sgd: also train a linear probe by SGD (lr 0.3, momentum 0.9, cosine to zero): on features computed once, or
            on images cropped and flipped anew in every epoch, as papers do.
        sgd_epochs: epochs of it.
        seed: of validation split, draws and SGD.
        batch_size: images encoded at once.
        num_workers: processes that decode images.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(1, MOST_ITEMS, batch_size=batch_size, sgd_epochs=sgd_epochs)
    check_range(1, math.inf, limit=limit, train_limit=train_limit)
    check_range(0, MOST_WORKERS, num_workers=num_workers)
    check_range(0, HIGHEST_SEED, seed=seed)
    for value in l2 or ():
        check_range(1e-30, 1e30, l2=value)
    target = output_folder(out, "probe", model, data)
    device_to_use = start_processes(device)
    sources = {"train": (train or data, train_split, train_limit), "test": (data, split, limit)}
    opened = _open(sources, label_column)
    for count in shots or ():
        draw_per_class(opened["train"][1], count, np.random.default_rng(seed))
    tower = open_image_tower(model, device_to_use)
    fitted, tested = (
        labelled_features(tower, *opened[part], target / "features" / part, batch_size, num_workers)
        for part in ("train", "test")
    )
    if distributed.is_main():
        rows = [*_knn(fitted, tested), *_linear(fitted, tested, l2, seed), *_few_shot(fitted, tested, shots, seed)]
        if sgd != "no":
            rows.append(_sgd(tower, fitted, tested, sgd == "images", sgd_epochs, seed, num_workers))
        facts = {"model": model, "data": data, "split": split, "train": train or data, "train_split": train_split}
        _conclude(rows, fitted, tested, target, facts)
    distributed.barrier()


def _open(sources: dict[str, Source], label_column: str | None) -> dict[str, tuple[Corpus, np.ndarray]]:
    """Images and labels of both parts, in the class numbers of the training images."""
    images = {
        part: open_images(data, split, label_column=label_column, limit=limit)
        for part, (data, split, limit) in sources.items()
    }
    names = {part: f"{data} ({split})" for part, (data, split, _) in sources.items()}
    labels = {part: require_labels(images[part], names[part]) for part in images}
    if len(np.unique(labels["train"])) < 2:
        raise DualencError(f"{names['train']}: all images are of one class; a probe needs two or more")
    labels["test"] = align_labels(
        labels["test"], images["test"].class_names, images["train"].class_names, names["test"]
    )  # fmt: skip
    return {part: (images[part], labels[part]) for part in images}


def _knn(train: Labelled, test: Labelled) -> list[Row]:
    k = min(NEIGHBOURS, len(train.labels))
    settings: dict[str, Any] = {"1-NN": {"k": 1}, f"{k}-NN, weighted": {"k": k, "temperature": TEMPERATURE}}
    predicted = {
        name: knn_predict(train.features, train.labels, test.features, **setting) for name, setting in settings.items()
    }
    return [{"probe": name, "accuracy": accuracy(found, test.labels), "sd": None} for name, found in predicted.items()]


def _linear(train: Labelled, test: Labelled, l2: list[float] | None, seed: int) -> list[Row]:
    found = linear_probe(train.features, train.labels, test.features, test.labels, l2=l2 or L2_SWEEP, seed=seed)
    return [{"probe": "linear, L-BFGS", "accuracy": found.accuracy, "note": f"l2={found.l2:g}"}]


def _few_shot(train: Labelled, test: Labelled, shots: list[int] | None, seed: int) -> list[Row]:
    if shots is None:
        smallest = int(np.unique(train.labels, return_counts=True)[1].min())
        shots = [count for count in SHOTS if count <= smallest]
    results = few_shot(
        train.features, train.labels, test.features, test.labels, shots=shots, draws=DRAWS, seed=seed
    )  # fmt: skip
    return [
        {"probe": f"{count}-shot, linear", "accuracy": mean, "sd": deviation, "note": f"{DRAWS} draws"}
        for count, (mean, deviation) in results.items()
    ]


def _sgd(
    tower: Tower, train: Labelled, test: Labelled, on_images: bool, epochs: int, seed: int, num_workers: int
) -> Row:
    """The protocol of saclr.txt A.1.4."""
    if on_images:
        batches = _augmented_batches(tower, train, seed, num_workers)
    else:
        batches = feature_batches(train.features, train.labels, batch_size=SGD_BATCH, seed=seed)
    classifier = sgd_probe(
        batches,
        train.features.shape[1],
        int(train.labels.max()) + 1,
        steps_per_epoch=-(-len(train.labels) // SGD_BATCH),
        epochs=epochs,
        device=next(tower.parameters()).device,
    )
    found = accuracy(predict(classifier, test.features), test.labels)
    what = "crops and flips" if on_images else "fixed features"
    return {"probe": "linear, SGD", "accuracy": found, "note": f"{epochs} epochs, {what}"}


def _augmented_batches(tower: Tower, train: Labelled, seed: int, num_workers: int) -> Callable[[int], Batches]:
    """Features of freshly augmented training images for each epoch."""
    import torch

    encode = encoder_of(tower, "features")
    prepare = AugmentedPrepare(tower.prepare, crop_and_flip)

    def batches(epoch: int) -> Batches:
        order = np.random.default_rng((seed, epoch)).permutation(len(train.labels))
        images = CleanImages(train.items)
        versions = ImageVersions(images, [CLEAN], prepare, views=1, seed=stable_seed(seed, epoch))
        stream = encode_versions(
            versions, encode, indices=order.tolist(), num_workers=num_workers, images_at_once=SGD_BATCH
        )
        for block in stream:
            yield torch.from_numpy(block.features[:, 0, 0]), torch.from_numpy(train.labels[block.indices])

    return batches


def _conclude(rows: list[Row], train: Labelled, test: Labelled, out: Path, source: dict[str, str]) -> None:
    """Write and print what came out."""
    facts: dict[str, object] = {**source, "train_images": len(train.labels), "test_images": len(test.labels)}
    similar = label_similarities(test.features, test.labels) if len(np.unique(test.labels)) > 1 else None
    shape: Row = {"effective_rank": effective_rank(test.features), "uniformity": uniformity(test.features)}
    if similar is not None:
        shape |= {
            "same_label_cosine": similar.positive_mean,
            "different_label_cosine": similar.negative_mean,
            "overlap": similar.overlap,
        }
    write_json(out / "metrics.json", {"task": "probe", **facts, "accuracy": _named(rows), "features": shape})
    tables = [Table("Probes", rows), Table("Features of the test images", [shape])]
    heights = {"accuracy": {str(row["probe"]): float(str(row["accuracy"])) for row in rows}}
    figures = [Figure("Accuracy by probe", plots.bars(heights, ylabel="accuracy"))]
    if similar is not None:
        figures.append(similarity_figure(similar, "same label", "different label", "Cosine of pairs of test images"))
    title = f"Probes: {display_name(str(facts['model']))} on {facts['data']}"
    write_report(out / "report.html", title, facts=facts, tables=tables, figures=figures)
    for table in tables:
        print_table(table)
    print(printable(f"metrics and report.html are in {out}"))


def _named(rows: list[Row]) -> dict[str, dict[str, object]]:
    return {str(row["probe"]): {key: value for key, value in row.items() if key != "probe"} for row in rows}
