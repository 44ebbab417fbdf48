"""Do the claims of the papers behind the objectives hold at a size that one core can train? One
table per claim.

    python eval/claims.py PATH_TO_CIFAR10 --out runs/claims
    python eval/claims.py PATH_TO_CIFAR10 --only convergence hardness

Every arm has the same network, images, steps and learning rate, and the same two temperatures to
choose from, by a linear probe on validation images with the first seed; arms that vary one argument
take the temperature of the objective that they vary, and hard negatives have 0.5. `convergence`
trains on a finite set of stored views and follows the exact gradient of the global loss (Yau et al.
2024, arXiv:2404.10575, Figure 7). One JSON file per run: an interrupted table resumes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from convergence import exact_gradient
from estimators import FrozenPairs
from PIL import Image
from probes import OSGDBatches
from quality import cached, mean_and_sd, new_parser, open_parts, train_and_measure
from torch import Tensor, nn

from dualenc.batching import BatchSelector, RandomBatches, SpectralBatches
from dualenc.data import ImageViews
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder
from dualenc.encoders.dual import DUALENC_FILE, Prepare, Tower, unit_norm
from dualenc.evaluation import plots
from dualenc.evaluation.corrupted import nearest_images, nearest_versions, summarize_nearest
from dualenc.evaluation.corruptions import ALL, CleanImages, GeneratedCorruptions
from dualenc.evaluation.probe import accuracy, knn_predict, linear_probe
from dualenc.evaluation.report_page import Table, print_table
from dualenc.io.files import write_json
from dualenc.objectives import EMC2, HCL, ISIR, SACLR, InfoNCE, NegativeCache, Objective, SogCLR
from dualenc.training import Evaluator
from dualenc.types import Inputs, Side

SIZE = 16
AUGMENTATIONS = 64


@dataclass(frozen=True)
class Arm:
    """One row of a table.

    Attributes:
        objective: made with the arguments that all objectives share.
        temperatures: to choose from on validation images.
        as_in: another arm, whose temperature is taken instead.
        batching: who meets whom.
        augmentations: how many of the stored ones are used.
        corrupted: also measure retrieval among corrupted versions.
    """

    objective: Callable[..., Objective]
    temperatures: tuple[float, ...] = (0.1, 0.3)
    as_in: str | None = None
    batching: Callable[..., BatchSelector] = RandomBatches
    augmentations: int = AUGMENTATIONS
    corrupted: bool = False


def hard(hardness: float, class_prior: float) -> Arm:
    """Robinson et al. at one temperature; with both at zero it is SimCLR."""
    return Arm(partial(HCL, hardness=hardness, class_prior=class_prior), temperatures=(0.5,))


sogclr = partial(SogCLR, gamma=0.9)
osgd, bisection = partial(OSGDBatches, k=40, q=20), partial(SpectralBatches, method="bisection")
spectral = partial(SpectralBatches, method="spectral", k=20)

ARMS: dict[str, Arm] = {
    "SimCLR": Arm(InfoNCE, corrupted=True),
    "SogCLR": Arm(sogclr, corrupted=True),
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
    "SimCLR, OSGD": Arm(InfoNCE, as_in="SimCLR", batching=osgd, corrupted=True),
    "SimCLR, bisection": Arm(InfoNCE, as_in="SimCLR", batching=bisection, corrupted=True),
    "SimCLR, spectral": Arm(InfoNCE, as_in="SimCLR", batching=spectral, corrupted=True),
    "SogCLR, OSGD": Arm(sogclr, as_in="SogCLR", batching=osgd, corrupted=True),
    "SogCLR, bisection": Arm(sogclr, as_in="SogCLR", batching=bisection, corrupted=True),
    "SogCLR, spectral": Arm(sogclr, as_in="SogCLR", batching=spectral, corrupted=True),
    "β 0, τ⁺ 0 (SimCLR)": hard(0, 0),
    "β 0, τ⁺ 0.1 (debiased)": hard(0, 0.1),
    "β 1, τ⁺ 0": hard(1, 0),
    "β 1, τ⁺ 0.1": hard(1, 0.1),
    "β 6, τ⁺ 0.1": hard(6, 0.1),
}
EXPERIMENTS: dict[str, list[str]] = {
    "objectives": ["SimCLR", "SogCLR", "EMC2", "ISIR", "NegativeCache"],
    "hardness": [name for name in ARMS if name.startswith("β")],
    "saclr": ["SimCLR", "SogCLR", *(name for name in ARMS if name.startswith("SACLR"))],
    "burn-in": ["EMC2", *(name for name in ARMS if "burn-in" in name)],
    "augmentations": ["EMC2", *(name for name in ARMS if name.endswith("augmentations"))],
    "batches": [name for name, arm in ARMS.items() if arm.corrupted and "spectral" not in name],
    "spectral": ["SimCLR", "SimCLR, spectral", "SogCLR", "SogCLR, spectral"],
}


# ---- Images and the network
# ------------------------------------------------------------------------------------------


class StoredViews(Prepare):
    """Images by their row numbers: as they are, or in one of their stored augmentations, which the
    seed chooses.

    Args:
        plain: (N, 3, S, S) uint8 pixels.
        augmented: (N, A, 3, S, S) uint8 pixels: A augmentations, the same for all images (Yau et
            al., Eq. 21).
    """

    modality = "image"

    def __init__(self, plain: Tensor, augmented: Tensor) -> None:
        self.plain, self.augmented = plain, augmented

    def __call__(self, items: Sequence[int], seeds: Sequence[int] | None = None) -> Inputs:
        rows = torch.tensor(items)
        if seeds is None:
            return {"image": scaled(self.plain[rows])}
        count = self.augmented.shape[1]
        return {
            "image": scaled(self.augmented[rows, torch.tensor([seed % count for seed in seeds])])
        }


def scaled(pixels: Tensor) -> Tensor:
    """Pixels from 0 to 255 as float32 from −1 to 1."""
    return pixels.float().div_(127.5).sub_(1)


def views_of(images: Sequence[Image.Image], seeds: Sequence[Sequence[int]]) -> Tensor:
    """(N, A, 3, S, S) uint8: each image augmented with each of its A seeds."""
    augment = SimCLR(SIZE, min_area=0.2)
    views = [
        torch.stack([augment(image, seed) for seed in own])
        for image, own in zip(images, seeds, strict=True)
    ]
    return torch.stack(views).mul(255).round().byte()


def pairs_of_views(images: Sequence[Image.Image]) -> Tensor:
    """(N, 2, 3, S, S): two augmentations of each image, others for each."""
    return scaled(views_of(images, [(2 * row, 2 * row + 1) for row in range(len(images))]))


class SmallTower(Tower):
    """Three convolutions of stride 2, averaged over places to 128 features, and a projector of two
    layers.

    Args:
        prepare: where images come from.
    """

    modality = "image"
    feature_dim, dim = 128, 64

    def __init__(self, prepare: StoredViews) -> None:
        super().__init__()
        self.prepare = prepare
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 128)):
            layers += [
                nn.Conv2d(before, after, 3, stride=2, padding=1),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.projector = nn.Sequential(
            nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, self.dim)
        )

    def features(self, inputs: Inputs) -> Tensor:
        """(B, 128) of pixels (B, 3, S, S)."""
        found: Tensor = self.backbone(inputs["image"].contiguous(memory_format=torch.channels_last))
        return found

    def forward(self, inputs: Inputs) -> Tensor:
        return unit_norm(self.projector(self.features(inputs)))


class SmallEncoder(DualEncoder):
    """Two views of an image through one small tower."""

    def __init__(self, prepare: StoredViews) -> None:
        tower = SmallTower(prepare).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        super().__init__(tower, tower, kind="image", views=True)

    def write(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")
        write_json(folder / DUALENC_FILE, {"kind": self.kind})


class Task(Evaluator):
    """Images, and what is measured of a network that was trained on them.

    Args:
        path: folder with train.parquet and test.parquet.
        num_train: images to train on, whose features the probes are fit on, too.
        num_test: images of validation and of test.
        num_versions: test images whose corrupted versions are compared.
    """

    primary = "validation"

    def __init__(self, path: str, num_train: int, num_test: int, num_versions: int) -> None:
        parts = open_parts(path, num_train, num_test)
        images = [[part[row].left.copy() for row in range(len(part))] for part in parts]
        self.labels = [np.asarray(part.labels) for part in parts]
        small = [
            [image.resize((SIZE, SIZE), Image.Resampling.BICUBIC) for image in part]
            for part in images
        ]
        self.plain = [torch.from_numpy(np.stack(part)).permute(0, 3, 1, 2) for part in small]
        self.augmented = views_of(images[0], [range(AUGMENTATIONS)] * num_train)
        self.pairs = pairs_of_views(images[2])
        corrupted = GeneratedCorruptions(CleanImages(images[2][:num_versions]))
        versions = [corrupted.image(row, name, 1) for row in range(num_versions) for name in ALL]
        # (n, 2, K, 3, S, S): two views of each of K versions of n images.
        self.versions = (
            pairs_of_views(versions).unflatten(0, (num_versions, len(ALL))).transpose(1, 2)
        )

    def prepare(self, num_augmentations: int) -> StoredViews:
        """The training images with some of their augmentations."""
        return StoredViews(self.plain[0], self.augmented[:, :num_augmentations])

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        """Probes of the features, and retrieval of an image's other view by embeddings, as in Cho
        et al., Table 1."""
        train, validation, test = (embed(model.left.features, scaled(part)) for part in self.plain)
        train_labels, validation_labels, test_labels = self.labels
        found = {}
        probe = linear_probe(train, train_labels, l2=(1e-2,)).classifier
        for name, features, labels in zip(
            ("validation", "linear"), (validation, test), (validation_labels, test_labels)
        ):
            found[name] = accuracy(probe.predict(features), labels)
        for name, k in (("knn20", 20), ("nn1", 1)):
            found[name] = accuracy(knn_predict(train, train_labels, test, k=k), test_labels)
        found["pair"] = summarize_nearest(nearest_images(embed(model.left, self.pairs)))["top1"]
        return found

    def among_versions(self, model: DualEncoder) -> float:
        """Top-1 retrieval of a version's other view among the versions of its image (Cho et al.,
        Table 1)."""
        return summarize_nearest(nearest_versions(embed(model.left, self.versions)))["top1"]


@torch.inference_mode()
def embed(encode: Callable[[Inputs], Tensor], images: Tensor) -> np.ndarray:
    """(..., D) of images (..., 3, S, S)."""
    found = torch.cat([encode({"image": part}) for part in images.flatten(0, -4).split(256)])
    return found.view(*images.shape[:-3], -1).numpy()


# ---- Arms against one another
# ----------------------------------------------------------------------------------------


class WithVersions(Evaluator):
    """What `Task` measures, and retrieval among corrupted versions."""

    primary = "validation"

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, model: DualEncoder) -> dict[str, float]:
        return {**self.task(model), "version": self.task.among_versions(model)}


class Comparison:
    """Trains arms, each at its temperature and with each seed, and keeps what came out.

    Args:
        task: images, and what is measured.
        arguments: of the command line.
    """

    def __init__(self, task: Task, arguments: argparse.Namespace) -> None:
        self.task, self.arguments = task, arguments

    def run(self, name: str, temperature: float, seed: int) -> dict[str, float]:
        """Metrics of one training, new or from its file."""
        given, arm = self.arguments, ARMS[name]
        shared = {
            "batch_size": given.batch_size,
            "learning_rate": given.learning_rate,
            "seed": seed,
        }

        def train() -> dict[str, float]:
            torch.manual_seed(seed)
            model, pairs = (
                SmallEncoder(self.task.prepare(arm.augmentations)),
                ImageViews(range(given.pairs)),
            )
            objective = arm.objective(
                num_left=given.pairs, temperature=temperature, views=True, seed=seed
            )
            batching = arm.batching(given.pairs, given.batch_size, seed=seed)
            evaluator = WithVersions(self.task) if arm.corrupted else self.task
            options = {
                "max_steps": given.steps,
                "output": Path(given.out) / "work",
                "log_every": 100,
                **shared,
            }
            found = train_and_measure(model, pairs, objective, evaluator, batching, **options)
            print(f"{name}, τ = {temperature}, seed {seed}: {found}", flush=True)
            return found

        settings = {
            "temperature": temperature,
            "steps": given.steps,
            "pairs": given.pairs,
            "test": given.test,
        }
        settings |= {"versions": given.versions, **shared}
        return cached(
            Path(given.out) / f"{file_name(name)}-{temperature}-{seed}.json", train, settings
        )

    def temperature(self, name: str) -> float:
        """The best on validation images with the first seed."""
        arm = ARMS[name]
        if arm.as_in:
            return self.temperature(arm.as_in)
        if len(arm.temperatures) == 1:
            return arm.temperatures[0]
        return max(
            arm.temperatures, key=lambda temperature: self.run(name, temperature, 0)["validation"]
        )

    def table(self, names: Sequence[str], num_seeds: int) -> list[dict[str, object]]:
        """Mean and standard deviation over seeds of every metric that all of these arms have."""
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        # Seeds outside: an interrupted table has all arms.
        for seed in range(num_seeds):
            for name in names:
                runs[name].append(self.run(name, self.temperature(name), seed))
        metrics = set.intersection(*(set(found[0]) for found in runs.values())) - {"validation"}
        rows = []
        for name, found in runs.items():
            row: dict[str, object] = {"arm": name, "τ": str(self.temperature(name))}
            for metric in sorted(metrics):
                row |= mean_and_sd(metric, [one[metric] for one in found])
            rows.append(row)
        return rows


# ---- The exact gradient on a finite set
# ------------------------------------------------------------------------------

ON_FINITE_SET: dict[str, Callable[..., Objective]] = {
    "SimCLR": InfoNCE,
    "SogCLR": sogclr,
    "EMC2": EMC2,
    "ISIR": ISIR,
    "NegativeCache": partial(NegativeCache, refresh=0.1),
}


def with_fixed_statistics(model: SmallEncoder, images: Tensor) -> SmallEncoder:
    """In evaluation mode, with the statistics that batch normalisation of the untrained network has
    on (M, 3, S, S).

    An embedding is then a function of its own image alone, and the exact loss that of the function
    which is trained.
    """
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d):
            layer.momentum = 1.0
    with torch.no_grad():
        model.train()("left", {"image": images})
    model.eval()
    return model


def descend(
    name: str,
    views: Tensor,
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    temperature: float,
    seed: int,
) -> list[dict[str, float]]:
    """Plain SGD on a finite set of stored views, its rate falling to zero along a cosine; the exact
    loss on the way.

    Args:
        name: of an objective in `ON_FINITE_SET`.
        views: (M, 2, 3, S, S) two views of each image, in float32.
        epochs: passes over the M images.
        batch_size: images per step.
        learning_rate: at the start.
        temperature: τ.
        seed: of weights, batches and the objective.

    Returns:
        At ten points in time, and before: the epoch, the exact loss and the squared norm of its
        gradient.
    """
    torch.manual_seed(seed)
    model = with_fixed_statistics(
        SmallEncoder(StoredViews(views[:0, 0], views[:0])), views.flatten(0, 1)
    )
    objective = ON_FINITE_SET[name](
        num_left=len(views), temperature=temperature, views=True, seed=seed
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    steps_per_epoch = len(views) // batch_size
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * steps_per_epoch)
    batches = RandomBatches(len(views), batch_size, seed=seed)
    sides: dict[Side, Tensor] = {"left": views[:, 0], "right": views[:, 1]}
    chunks = {
        side: [{"image": part} for part in images.split(250)] for side, images in sides.items()
    }

    def encode(side: Side, rows: Tensor) -> Tensor:
        return model(side, {"image": sides[side][rows]})

    def measure(epoch: int) -> dict[str, float]:
        pairs = partial(FrozenPairs.one_to_one, views=True)
        point = exact_gradient(
            model, lambda _, inputs: model.left(inputs), chunks, pairs, temperature
        )
        return {"epoch": epoch, "loss": point.loss, "squared gradient": point.squared_gradient_norm}

    found = [measure(0)]
    for epoch in range(epochs):
        for rows in batches.select(epoch):
            batch = torch.from_numpy(rows)
            left, right = model(
                "left", {"image": views[batch].transpose(0, 1).flatten(0, 1)}
            ).chunk(2)
            out = objective(left, right, batch, encode=encode)
            optimizer.zero_grad()
            out.loss.backward()
            optimizer.step()
            schedule.step()
        if (epoch + 1) % max(epochs // 10, 1) == 0 or epoch + 1 == epochs:
            found.append(measure(epoch + 1))
    return found


def convergence(views: Tensor, arguments: argparse.Namespace) -> list[dict[str, object]]:
    """Where each objective ends on the finite set: exact loss and squared gradient, over seeds."""
    shared = {
        "epochs": arguments.epochs,
        "batch_size": 4,
        "learning_rate": arguments.rate,
        "temperature": 0.2,
    }
    set_name = f"finite-{len(views)}-{arguments.epochs}"
    ends: dict[str, list[dict[str, Any]]] = {name: [] for name in ON_FINITE_SET}
    for seed in range(arguments.seeds):
        for name, own in ends.items():

            def train(name: str = name, seed: int = seed) -> dict[str, Any]:
                curve = descend(name, views, seed=seed, **shared)
                print(f"{name}, seed {seed}: {curve[-1]}", flush=True)
                return {**curve[-1], "curve": curve}

            path = (
                Path(arguments.out) / f"{set_name}-{file_name(name)}-{arguments.rate}-{seed}.json"
            )
            own.append(cached(path, train, {**shared, "images": len(views), "seed": seed}))
    curves = {name: [end["curve"] for end in own] for name, own in ends.items()}
    means = {
        name: (
            [point["epoch"] for point in own[0]],
            np.mean([[point["loss"] for point in one] for one in own], axis=0),
        )
        for name, own in curves.items()
    }
    figure = plots.lines(means, xlabel="epoch", ylabel="exact global loss, mean over seeds")
    (Path(arguments.out) / f"{set_name}.svg").write_text(plots.as_svg(figure), encoding="utf-8")
    rows = []
    for name, own in ends.items():
        norms = sorted(end["squared gradient"] for end in own)
        row = {"objective": name, **mean_and_sd("loss", [end["loss"] for end in own])}
        rows.append(row | {"squared gradient": " ".join(f"{norm:.1e}" for norm in norms)})
    return rows


def file_name(words: str) -> str:
    """Letters and digits, with a hyphen for everything else."""
    return "".join(letter if letter.isalnum() else "-" for letter in words)


def main() -> None:
    parser = new_parser(__doc__, "runs/claims", pairs=1600, steps=2000)
    parser.add_argument("path", help="folder with train.parquet and test.parquet")
    everything = ["convergence", *EXPERIMENTS]
    parser.add_argument("--only", nargs="+", choices=everything, default=everything)
    parser.add_argument("--test", type=int, default=4000, help="images of validation and of test")
    parser.add_argument(
        "--versions",
        type=int,
        default=300,
        help="test images whose corrupted versions are compared",
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument(
        "--images", type=int, default=500, help="of convergence: the first ones of --pairs"
    )
    parser.add_argument("--epochs", type=int, default=40, help="of convergence")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of convergence")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = Task(arguments.path, arguments.pairs, arguments.test, arguments.versions)
    comparison = Comparison(task, arguments)
    for name in arguments.only:
        if name == "convergence":
            rows = convergence(scaled(task.augmented[: arguments.images, :2]), arguments)
        else:
            rows = comparison.table(EXPERIMENTS[name], arguments.seeds)
        print_table(Table(name, rows))
        write_json(Path(arguments.out) / f"table-{name}.json", rows)


if __name__ == "__main__":
    main()
