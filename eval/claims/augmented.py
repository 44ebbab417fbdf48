"""Do the claims of the papers behind the objectives hold at a size that one core can train?

    python eval/claims/augmented.py run CIFAR10 --only hardness
    python eval/claims/augmented.py run DATA --only selection --pairs 2560 --steps 500 --test 1000
    python eval/claims/augmented.py report

Two augmented views of an image are a pair. All arms have the same images, steps and learning rate,
and the same two temperatures, of which a linear probe on validation images chooses with the first
seed. Arms that vary one argument take the temperature of the objective that they vary, and hard
negatives have 0.5. `selection` trains a narrow ResNet, everything else three convolutions.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches, batch_losses
from dualenc.data import ImageViews, PairDataset
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder
from dualenc.encoders.dual import Prepare
from dualenc.encoders.image import ProjectedTower
from dualenc.evaluation.corrupted import nearest_images, nearest_versions, summarize_nearest
from dualenc.evaluation.corruptions import ALL, CleanImages, GeneratedCorruptions
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import EMC2, HCL, ISIR, SACLR, InfoNCE, NegativeCache, Objective, SogCLR
from dualenc.training import KNNEvaluator
from dualenc.types import Inputs

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from frame import RESULTS, Outcome, Run, Settings, Store, command_line, spread, train, tune
from probes import OSGDBatches
from tasks import new_encoder, open_parts

FOUND = RESULTS / "claims.jsonl"
PIXELS, AUGMENTATIONS = 16, 64
SHARED = {"batch_size": 32, "learning_rate": 3e-3}


class Arm(NamedTuple):
    """One row of a table."""

    objective: Callable[..., Objective]
    temperatures: tuple[float, ...] = (0.1, 0.3)  # to choose from on validation images
    as_in: str | None = None  # another arm, whose temperature is taken instead
    batching: Callable[..., BatchSelector] = RandomBatches
    augmentations: int = AUGMENTATIONS  # of the stored ones
    resnet: bool = False


def hard(hardness: float, class_prior: float) -> Arm:
    """Robinson et al. at one temperature; with both at zero it is SimCLR."""
    return Arm(partial(HCL, hardness=hardness, class_prior=class_prior), (0.5,))


BOTH: dict[str, Callable[..., Objective]] = {"SimCLR": InfoNCE, "SogCLR": SogCLR}
SELECTORS: dict[str, Callable[..., BatchSelector]] = {
    "random": RandomBatches,
    "OSGD": partial(OSGDBatches, k=40, q=20),
    "spectral": partial(SpectralBatches, method="spectral"),
    "bisection": SpectralBatches,
}
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
    "EMC2, 2 augmentations": Arm(EMC2, as_in="EMC2", augmentations=2),
    "EMC2, 8 augmentations": Arm(EMC2, as_in="EMC2", augmentations=8),
    **{
        f"{name}, {how}": Arm(kind, as_in=name, batching=SELECTORS[how])
        for name, kind in BOTH.items()
        for how in ("OSGD", "bisection")
    },
    **{
        f"ResNet, {name}, {how}": Arm(kind, (0.2,), batching=batching, resnet=True)
        for name, kind in BOTH.items()
        for how, batching in SELECTORS.items()
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
    "augmentations": ["EMC2", *(name for name in ARMS if name.endswith("augmentations"))],
    "batches": [*BOTH, *(name for name, arm in ARMS.items() if arm.as_in in BOTH)],
    "selection": [name for name, arm in ARMS.items() if arm.resnet],
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


def pairs_of_views(images: Sequence[Image.Image]) -> Tensor:
    """Augment each image twice, with seeds of its own: (N, 2, 3, S, S)."""
    return scaled(views_of(images, [(2 * row, 2 * row + 1) for row in range(len(images))]))


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
        self.pairs = pairs_of_views(images[2])
        some = images[2][:300]
        corrupted = GeneratedCorruptions(CleanImages(some))
        versions = [corrupted.image(row, name, 1) for row in range(len(some)) for name in ALL]
        by_image = pairs_of_views(versions).unflatten(0, (len(some), len(ALL)))
        self.versions = by_image.transpose(1, 2)  # (n, 2, K, 3, S, S)

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
        nearest = nearest_versions(embed(model.left, self.versions))
        return found | {"version": summarize_nearest(nearest)["top1"]}


@torch.inference_mode()
def embed(encode: Callable[[Inputs], Tensor], images: Tensor) -> np.ndarray:
    """Encode images (..., 3, S, S) to (..., D)."""
    found = torch.cat([encode({"image": part}) for part in images.flatten(0, -4).split(256)])
    return found.view(*images.shape[:-3], -1).numpy()


def watched(batching: BatchSelector) -> Outcome:
    """Return what will hold the loss of the last selected batches, and of random ones."""
    select: Any = batching.select
    found: Outcome = {}

    def select_and_compare(epoch: int, left: Any = None, right: Any = None) -> np.ndarray:
        begun = time.perf_counter()
        batches = select(epoch, left, right)
        if left is not None:
            found["seconds per selection"] = time.perf_counter() - begun
            random = RandomBatches(batching.num_pairs, batching.batch_size).select(epoch)
            for name, each in (("loss, selected", batches), ("random", random)):
                found[name] = float(batch_losses(left, right, each, batching.temperature).mean())
        return batches

    batching.select = select_and_compare
    return found


def measure_resnet(model: DualEncoder, pairs: ImageViews, test: ImageViews) -> Outcome:
    """Find an image's other view by embeddings, and let 20 neighbors vote by features."""
    images, prepare = [each.left for each in test], model.left.prepare
    seeds = [range(view, 2 * len(images), 2) for view in range(2)]
    views = torch.stack([prepare(images, own)["image"] for own in seeds], dim=1)
    top1 = summarize_nearest(nearest_images(embed(model.left, views)))["top1"]
    return {"pair": top1, "20-NN": KNNEvaluator(pairs, test)(model)["knn_accuracy"]}


open_images = cache(SmallImages)


def train_arm(settings: Settings, folder: Path) -> Outcome:
    """Train an arm once, and measure it."""
    arm, seed = ARMS[settings["arm"]], settings["seed"]
    num_pairs, num_test = settings["pairs"], settings["test"]
    new_model: Callable[[], DualEncoder]
    measure: Callable[[DualEncoder], Outcome]
    if arm.resnet:
        pairs, _, test = open_parts(str(folder), num_pairs, num_test)
        new_model, measure = new_encoder, partial(measure_resnet, pairs=pairs, test=test)
    else:
        pairs, images = numbered(num_pairs), open_images(folder, num_pairs, num_test)
        prepare = StoredViews(images.plain[0], images.augmented[:, : arm.augmentations])
        new_model, measure = partial(SmallEncoder, prepare), images.measure
    torch.manual_seed(seed)
    model = new_model()
    shared = {"num_left": num_pairs, "temperature": settings["temperature"], "views": True}
    objective = arm.objective(seed=seed, **shared)
    batching = arm.batching(num_pairs, SHARED["batch_size"], seed=seed)
    selection = watched(batching)
    precision = "bf16" if arm.resnet else "no"
    own = {"max_steps": settings["steps"], "mixed_precision": precision, "seed": seed}
    train(model, pairs, objective, batching, **own, **SHARED)
    return measure(model) | selection


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

    def on_validation(tried: list[tuple[str, float]]) -> list[float]:
        wanted = [{**size, "arm": name, "temperature": each, "seed": 0} for name, each in tried]
        return [found["validation"] for found in store.get(wanted, once)]

    arms = {name for own in ([only] if only else EXPERIMENTS) for name in EXPERIMENTS[own]}
    chosen: dict[str, float] = {}
    for owner in {ARMS[name].as_in or name for name in arms}:
        chosen |= tune([owner], ARMS[owner].temperatures, on_validation, beyond_edge=0)
    # Seeds outside: an interrupted run has all arms.
    wanted = [
        {**size, "arm": name, "temperature": chosen[ARMS[name].as_in or name], "seed": seed}
        for seed in range(seeds)
        for name in ARMS
        if name in arms
    ]
    store.get(wanted, once)
    report(results)


def chosen_by(runs: Sequence[Run], name: str) -> tuple[float, list[Outcome]]:
    """Return the value of a setting that was chosen, which has most seeds, with its outcomes."""
    by_value: dict[float, list[Outcome]] = {}
    for each in runs:
        by_value.setdefault(each.settings[name], []).append(each.outcome)
    # With one seed, the best on validation images.
    return max(by_value.items(), key=lambda own: (len(own[1]), own[1][0].get("validation", 0)))


def row_of(runs: Sequence[Run]) -> dict[str, object]:
    """Return the metrics of an arm over seeds, at the temperature that was chosen."""
    temperature, found = chosen_by(runs, "temperature")
    metrics = [metric for metric in found[0] if metric != "validation"]
    row = {metric: spread([each[metric] for each in found]) for metric in metrics}
    return {"arm": runs[0].settings["arm"], "τ": str(temperature), **row}


def report(results: Path = FOUND) -> None:
    """Print the tables of all runs.

    Args:
        results: file of finished runs.
    """
    store, names = Store(results), ("data", "pairs", "steps", "test")
    sizes = {tuple(each.settings[name] for name in names) for each in store.runs}
    for size, (experiment, arms) in itertools.product(sorted(sizes), EXPERIMENTS.items()):
        own = dict(zip(names, size))
        found = [runs for name in arms if (runs := store.where(arm=name, **own))]
        title = f"{experiment} on {size[0]}: {size[1]} images, {size[2]} steps"
        if found:
            print_table(Table(title, [row_of(runs) for runs in found]))


def check(folder: Path) -> None:
    """Train for two steps; hard negatives with both arguments 0 are SimCLR."""
    results = folder / "claims.jsonl"
    toys.images(folder / "toy", train=44, size=32)
    for only in ("hardness", "selection"):
        run(folder / "toy", only, pairs=32, steps=2, test=12, seeds=1, results=results)
    [hardness] = Store(results).where(arm="β 0, τ⁺ 0 (SimCLR)")
    same = {**hardness.settings, "arm": "SimCLR"}
    assert hardness.outcome.items() <= train_arm(same, folder / "toy").items()


if __name__ == "__main__":
    command_line(run, report, check=check)
