"""Do the claims of the papers behind the objectives hold at a size that one core can train?

    python eval/claims/augmented.py run CIFAR10 --only hardness
    python eval/claims/augmented.py report

Two augmented views of an image are a pair, and three convolutions are trained. All arms have the
same images, steps and learning rate, and the same two temperatures, of which a linear probe on
validation images chooses with the first seed. Arms that vary one argument take the temperature of
the objective that they vary, and hard negatives have 0.5.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches, batch_losses
from dualenc.data import PairDataset
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder
from dualenc.encoders.dual import Prepare
from dualenc.encoders.image import ProjectedTower
from dualenc.evaluation.corrupted import nearest_images, summarize_nearest
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.objectives import EMC2, HCL, ISIR, SACLR, InfoNCE, NegativeCache, Objective, SogCLR
from dualenc.types import Inputs

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from frame import (
    RESULTS,
    Outcome,
    Settings,
    Store,
    choose,
    command_line,
    most_seeds,
    print_runs,
    repeat,
    train,
)
from tasks import open_parts

FOUND = RESULTS / "claims.jsonl"
PIXELS, AUGMENTATIONS = 16, 64
SHARED = {"batch_size": 32, "learning_rate": 3e-3}


class Arm(NamedTuple):
    """One row of a table."""

    objective: Callable[..., Objective]
    temperatures: tuple[float, ...] = (0.1, 0.3)  # to choose from on validation images
    as_in: str | None = None  # another arm, whose temperature is taken instead
    batching: Callable[..., BatchSelector] = RandomBatches


class OSGDBatches(BatchSelector):
    """Ordered SGD: of each 40 random batches the 20 with the largest loss.

    An epoch is a random partition into batches, cut into windows of 40, of which the last may be
    shorter and gives in proportion. Source: Cho et al. 2023, arXiv:2307.05906, Algorithm 6;
    Kawaguchi and Lu 2020, arXiv:1907.04371.
    """

    needs_embeddings = True
    temperature = 0.1

    @property
    def num_batches(self) -> int:
        full, rest = divmod(self.num_pairs // self.batch_size, 40)
        return full * 20 + math.ceil(rest / 2)

    def select(self, epoch: int, left: Any = None, right: Any = None) -> np.ndarray:
        batches = self.random_batches(self.generator(epoch))
        if left is None:
            return batches
        losses = batch_losses(*self.check_embeddings(left, right), batches, self.temperature)
        windows = np.split(np.arange(len(batches)), range(40, len(batches), 40))
        # A stable sort, so that equal losses give equal batches everywhere.
        order = [own[np.argsort(-losses[own], kind="stable")] for own in windows]
        return batches[np.concatenate([own[: math.ceil(len(own) / 2)] for own in order])]


def hard(hardness: float, class_prior: float) -> Arm:
    """Robinson et al. at one temperature; with both at zero it is SimCLR."""
    return Arm(partial(HCL, hardness=hardness, class_prior=class_prior), (0.5,))


BOTH: dict[str, Callable[..., Objective]] = {"SimCLR": InfoNCE, "SogCLR": SogCLR}
ARMS: dict[str, Arm] = {
    **{name: Arm(kind) for name, kind in BOTH.items()},
    "EMC2": Arm(EMC2),
    "ISIR": Arm(ISIR),
    "NegativeCache": Arm(NegativeCache),
    "SACLR-1 row": Arm(partial(SACLR, form="row", negatives=1)),
    "SACLR-all row": Arm(partial(SACLR, form="row")),
    "SACLR-1 matrix": Arm(partial(SACLR, form="matrix", negatives=1, rho=0.99)),
    "SACLR-all matrix": Arm(partial(SACLR, form="matrix", rho=0.99)),
    "EMC2, burn-in 0": Arm(partial(EMC2, burn_in=0.0), as_in="EMC2"),
    "EMC2, burn-in 3/4": Arm(partial(EMC2, burn_in=0.75), as_in="EMC2"),
    **{f"{name}, OSGD": Arm(kind, as_in=name, batching=OSGDBatches) for name, kind in BOTH.items()},
    **{
        f"{name}, bisection": Arm(kind, as_in=name, batching=SpectralBatches)
        for name, kind in BOTH.items()
    },
    "β 0, τ⁺ 0 (SimCLR)": hard(0, 0),
    "β 0, τ⁺ 0.1 (debiased)": hard(0, 0.1),
    "β 1, τ⁺ 0": hard(1, 0),
    "β 1, τ⁺ 0.1": hard(1, 0.1),
    "β 6, τ⁺ 0.1": hard(6, 0.1),
}
EXPERIMENTS: dict[str, list[str]] = {
    "objectives": [*BOTH, "EMC2", "ISIR", "NegativeCache"],
    "hardness": [name for name in ARMS if name.startswith("β")],
    "saclr": [*BOTH, *(name for name in ARMS if name.startswith("SACLR"))],
    "burn-in": ["EMC2", *(name for name in ARMS if "burn-in" in name)],
    "batches": [*BOTH, *(name for name, arm in ARMS.items() if arm.as_in in BOTH)],
}


class StoredViews(Prepare):
    """Images by their numbers: as they are, or in one of A stored augmentations, by the seed."""

    modality = "vector"

    def __init__(self, plain: Tensor, augmented: Tensor) -> None:
        self.plain = plain  # (N, 3, S, S) uint8
        self.augmented = augmented  # (N, A, 3, S, S) uint8

    def __call__(self, items: Sequence[int], seeds: Sequence[int] | None = None) -> Inputs:
        rows = torch.as_tensor(np.array(items)).reshape(-1).long()
        if seeds is None:
            return {"image": scaled(self.plain[rows])}
        chosen = torch.tensor([seed % self.augmented.shape[1] for seed in seeds])
        return {"image": scaled(self.augmented[rows, chosen])}


def numbered(count: int) -> PairDataset:
    """Return pairs of image numbers, for a model that has the images."""
    numbers = np.arange(count, dtype=np.float32)[:, None]
    pairs = PairDataset(numbers, numbers, left_modality="vector", right_modality="vector")
    pairs.views = True
    return pairs


def scaled(pixels: Tensor) -> Tensor:
    """Convert pixels from 0 to 255 to float32 from −1 to 1."""
    return pixels.float().div_(127.5).sub_(1)


def views_of(images: Sequence[Image.Image], seeds: Sequence[Sequence[int]]) -> Tensor:
    """Augment each image with each of its A seeds: (N, A, 3, S, S) uint8."""
    augment = SimCLR(PIXELS, min_area=0.2)
    rows = zip(images, seeds, strict=True)
    views = [torch.stack([augment(image, seed) for seed in own]) for image, own in rows]
    return torch.stack(views).mul(255).round().byte()


class SmallEncoder(DualEncoder):
    """Three convolutions of stride 2, averaged to 128 features, and a projector of two layers."""

    def __init__(self, prepare: Any) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            convolution = nn.Conv2d(before, after, 3, stride=2, padding=1)
            layers += [convolution, nn.BatchNorm2d(after), nn.ReLU()]
        backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        head = [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)]
        tower: Any = ProjectedTower(backbone, nn.Sequential(*head), prepare, 128, 64)
        tower.to(memory_format=torch.channels_last)
        tower.modality = "vector"
        super().__init__(tower, tower, kind="image", views=True)

    def write(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")


class SmallImages:
    """Images to train on, for validation and for test, small and augmented."""

    def __init__(self, folder: Path, num_train: int, num_test: int) -> None:
        parts = open_parts(str(folder), num_train, num_test)
        images = [[part[row].left.copy() for row in range(len(part))] for part in parts]
        self.labels = [np.asarray(part.labels) for part in parts]
        size = (PIXELS, PIXELS)
        small = [[image.resize(size, Image.Resampling.BICUBIC) for image in own] for own in images]
        self.plain = [torch.from_numpy(np.stack(own)).permute(0, 3, 1, 2) for own in small]
        self.augmented = views_of(images[0], [range(AUGMENTATIONS)] * num_train)
        seeds = [(2 * row, 2 * row + 1) for row in range(len(images[2]))]
        self.pairs = scaled(views_of(images[2], seeds))

    def measure(self, model: DualEncoder) -> Outcome:
        """Probe the features, and find an image's other view (Cho et al., Table 1)."""
        train, validation, test = (embed(model.left.features, scaled(own)) for own in self.plain)
        train_labels, validation_labels, test_labels = self.labels
        probe = linear_probe(train, train_labels, l2=(1e-2,)).classifier
        found = {
            "validation": accuracy(probe.predict(validation), validation_labels),
            "linear": accuracy(probe.predict(test), test_labels),
        }
        for name, k in (("20-NN", 20), ("1-NN", 1)):
            found[name] = accuracy(knn_predict(train, train_labels, test, k=k), test_labels)
        found["pair"] = summarize_nearest(nearest_images(embed(model.left, self.pairs)))["top1"]
        return found


@torch.inference_mode()
def embed(encode: Callable[[Inputs], Tensor], images: Tensor) -> np.ndarray:
    """Encode images (..., 3, S, S) to (..., D)."""
    found = torch.cat([encode({"image": part}) for part in images.flatten(0, -4).split(256)])
    return found.view(*images.shape[:-3], -1).numpy()


open_images = cache(SmallImages)


def train_arm(settings: Settings, folder: Path) -> Outcome:
    """Train an arm once, and measure it."""
    arm, seed = ARMS[settings["arm"]], settings["seed"]
    num_pairs, num_test = settings["pairs"], settings["test"]
    pairs, images = numbered(num_pairs), open_images(folder, num_pairs, num_test)
    torch.manual_seed(seed)
    model = SmallEncoder(StoredViews(images.plain[0], images.augmented))
    shared = {"num_left": num_pairs, "temperature": settings["temperature"], "views": True}
    objective = arm.objective(seed=seed, **shared)
    batching = arm.batching(num_pairs, SHARED["batch_size"], seed=seed)
    own = {"max_steps": settings["steps"], "mixed_precision": "no", "seed": seed}
    train(model, pairs, objective, batching, **own, **SHARED)
    return images.measure(model)


def run(
    folder: Path,
    only: str | None = None,
    pairs: int = 1600,
    steps: int = 2000,
    test: int = 4000,
    seeds: int = 3,
    results: Path = FOUND,
) -> None:
    """Choose the temperature of each arm, train it with all seeds, and print the tables.

    Args:
        folder: folder with train.parquet and test.parquet (or val.parquet).
        only: one of `EXPERIMENTS`; all of them by default.
        pairs: images to train on.
        steps: steps of a training.
        test: images of validation and of test.
        seeds: number of seeds.
        results: file of finished runs.
    """
    store, once = Store(results), partial(train_arm, folder=folder)
    size = {"data": folder.name, "pairs": pairs, "steps": steps, "test": test}
    arms = [name for own in ([only] if only else EXPERIMENTS) for name in EXPERIMENTS[own]]
    chosen: dict[str, Settings] = {}
    for owner in {ARMS[name].as_in or name for name in arms}:
        grids = {"temperature": ARMS[owner].temperatures}
        chosen |= choose(store, once, {owner: {**size, "arm": owner}}, grids, beyond_edge=0)
    wanted = {name: {**size, "arm": name, **chosen[ARMS[name].as_in or name]} for name in arms}
    repeat(store, once, wanted, seeds)
    report(results)


def report(results: Path = FOUND) -> None:
    """Print the tables of all runs, at the temperatures that were chosen.

    Args:
        results: file of finished runs.
    """
    store = Store(results)
    data = sorted({each.settings["data"] for each in store.runs})
    for name, (experiment, arms) in itertools.product(data, EXPERIMENTS.items()):
        found = [runs for arm in arms if (runs := store.where(data=name, arm=arm))]
        if found:
            print_runs(experiment, [each for runs in found for each in most_seeds(runs)])


def check(folder: Path) -> None:
    """Train for two steps; hard negatives with both arguments 0 are SimCLR."""
    results = folder / "claims.jsonl"
    toys.images(folder / "toy", train=44, size=32)
    for only in ("hardness", "batches"):
        run(folder / "toy", only, pairs=32, steps=2, test=12, seeds=1, results=results)
    [hardness] = Store(results).where(arm="β 0, τ⁺ 0 (SimCLR)")
    same = {**hardness.settings, "arm": "SimCLR"}
    assert hardness.outcome.items() <= train_arm(same, folder / "toy").items()


if __name__ == "__main__":
    command_line(run, report, check=check)
