"""open_clip's and lightly's own loss and ours in turn: same loop, same data, same seeds.

    python eval/integrations_vision.py open_clip FLICKR
    python eval/integrations_vision.py lightly CIFAR10

FLICKR and CIFAR10 are folders with train.parquet and test.parquet. open_clip's `train_one_epoch`
trains a small CLIP from scratch on images of 32 pixels, and its `evaluate` gives the recall among
1,000 test pairs. With lightly, a small convolutional network of a `LightningModule` is trained as
in SimCLR; a nearest-neighbour classifier reads its features. τ is the same for all; only ClipLoss
learns it from there, as open_clip does.
"""

from __future__ import annotations

import io
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import transforms

from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import ISIR, GlobalCache, InfoNCE, Objective, SogCLR

OURS: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "SogCLR": SogCLR,
    "ISIR": ISIR,
    "GlobalCache": GlobalCache,
}


def main(
    library: Literal["open_clip", "lightly"],
    folder: Path,
    images: int = 6000,
    epochs: int = 3,
    batch_size: int = 32,
    temperature: float = 0.07,
    seeds: int = 3,
) -> None:
    """Train and print a table.

    Args:
        library: whose loop and loss.
        folder: with train.parquet and test.parquet.
        images: of the training set; open_clip has one caption of each.
        epochs: passes over them.
        batch_size: pairs in a batch.
        temperature: τ.
        seeds: runs of each loss.
    """
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    train, theirs = (
        (train_open_clip, "ClipLoss") if library == "open_clip" else (train_lightly, "NTXentLoss")
    )
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as work:
        data = (write_pairs if library == "open_clip" else read_images)(folder, Path(work), images)
        for name in [theirs, *OURS]:
            begun = time.perf_counter()
            runs = [
                train(data, OURS.get(name), epochs, batch_size, temperature, seed)
                for seed in range(seeds)
            ]
            row: dict[str, object] = {"loss": f"{name} ({'theirs' if name == theirs else 'ours'})"}
            for metric in runs[0]:
                values = [run[metric] for run in runs]
                spread = statistics.stdev(values) if len(values) > 1 else 0.0
                row[metric] = f"{statistics.mean(values):.3f} ± {spread:.3f}"
            rows.append({**row, "seconds per run": round((time.perf_counter() - begun) / seeds)})
            print(rows[-1], flush=True)
    print_table(
        Table(
            f"{library}: {images} images, {epochs} epochs, B = {batch_size}, τ = {temperature}",
            rows,
        )
    )


def small(image: dict[str, bytes]) -> Image.Image:
    """A column's image with 32 pixels a side."""
    return (
        Image.open(io.BytesIO(image["bytes"]))
        .convert("RGB")
        .resize((32, 32), Image.Resampling.BICUBIC)
    )


def write_pairs(folder: Path, work: Path, images: int) -> dict[str, Path]:
    """open_clip's CSV files: the first `images` images and 1,000 test images, a caption of each."""
    paths = {}
    for split, count in (("train", images), ("test", 1000)):
        lines = ["filepath\ttitle"]
        for number, row in enumerate(
            pq.read_table(folder / f"{split}.parquet").slice(0, count).to_pylist()
        ):
            path = work / f"{split}{number}.png"
            small(row["image"]).save(path)
            lines.append(f"{path}\t{row['captions'][number % len(row['captions'])]}")
        paths[split] = work / f"{split}.tsv"
        paths[split].write_text("\n".join(lines) + "\n")
    return paths


class LoaderWithIds:
    """open_clip's loader of a table, which remembers the ids of the batch, and items by id."""

    def __init__(self, loader: Any) -> None:
        data = loader.dataset
        sides = [
            np.unique(side, return_index=True, return_inverse=True)
            for side in (data.images, data.captions)
        ]
        self.sizes = {"num_left": len(sides[0][0]), "num_right": len(sides[1][0])}
        self.items = {
            side: [data[row][column] for row in sides[column][1]]
            for column, side in enumerate(("left", "right"))
        }
        self.num_batches = loader.num_batches
        self.num_samples = loader.num_samples
        pairs = torch.utils.data.StackDataset(data, *(side[2] for side in sides))
        self.loader = torch.utils.data.DataLoader(
            pairs, loader.batch_size, sampler=loader.sampler, drop_last=True
        )

    def __iter__(self) -> Any:
        for (images, texts), *ids in self.loader:
            self.ids = ids
            yield images, texts


def train_open_clip(
    data: dict[str, Path], ours: Any, epochs: int, batch_size: int, temperature: float, seed: int
) -> dict[str, float]:
    """Recall of test pairs after training by open_clip's loop."""
    import open_clip
    from open_clip_train.data import get_data
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import evaluate, train_one_epoch

    torch.manual_seed(seed)
    model = open_clip.CLIP(
        64,
        {"image_size": 32, "patch_size": 8, "width": 128, "layers": 3, "head_width": 32},
        {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2},
        output_dict=True,
    )
    args = SimpleNamespace(
        train_data=str(data["train"]), val_data=str(data["test"]), dataset_type="csv",
        csv_separator="\t", csv_img_key="filepath", csv_caption_key="title",
        batch_size=batch_size, workers=0, imagenet_val=None, imagenet_v2=None, device="cpu",
        precision="fp32", accum_freq=1, skip_scheduler=False, grad_clip_norm=None, distill=False,
        horovod=False, distributed=False, rank=0, local_rank=0, world_size=1, epochs=epochs,
        val_frequency=1, log_every_n_steps=10**9, save_logs=False, wandb=False,
    )  # fmt: skip
    prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.25)])
    loaded = get_data(
        args, (prepare, prepare), tokenizer=open_clip.SimpleTokenizer(context_length=24)
    )
    small_weights = [p for p in model.parameters() if p.ndim < 2]
    weights = [p for p in model.parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW(
        [{"params": small_weights, "weight_decay": 0.0}, {"params": weights}], lr=1e-3
    )
    steps = epochs * loaded["train"].dataloader.num_batches
    scheduler = cosine_lr(optimizer, 1e-3, steps // 10, steps)
    loss: Any = open_clip.ClipLoss()
    with torch.no_grad():
        model.logit_scale.fill_(-torch.tensor(temperature).log())
    if ours is not None:
        loader = loaded["train"].dataloader = LoaderWithIds(loaded["train"].dataloader)
        objective = ours(**loader.sizes, temperature=temperature, seed=seed)

        def encode(side: str, ids: Tensor) -> Tensor:
            inputs = torch.stack([loader.items[side][number] for number in ids.tolist()])
            tower = model.encode_image if side == "left" else model.encode_text
            return nn.functional.normalize(tower(inputs), dim=-1)

        def loss(
            image_features: Tensor, text_features: Tensor, logit_scale: Tensor, output_dict: bool
        ) -> Any:
            return {
                "contrastive_loss": objective(
                    image_features, text_features, *loader.ids, encode
                ).loss
            }

    torch.manual_seed(seed)
    for epoch in range(epochs):
        train_one_epoch(model, loaded, loss, epoch, optimizer, None, scheduler, None, args)
    found = evaluate(model, loaded, epochs, args)
    return {
        f"{way} R@10": float(found[f"{way}_R@10"]) for way in ("image_to_text", "text_to_image")
    }


def read_images(
    folder: Path, work: Path, images: int
) -> dict[str, tuple[list[Image.Image], Tensor]]:
    """Images and labels of a random part of each split."""
    data = {}
    for split, count in (("train", images), ("test", 2000)):
        table = pq.read_table(folder / f"{split}.parquet")
        chosen = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:count]
        rows = table.take(chosen.numpy()).to_pylist()
        data[split] = (
            [small(row["image"]) for row in rows],
            torch.tensor([row["label"] for row in rows]),
        )
    return data


class Images(torch.utils.data.Dataset[Any]):
    """Images in memory with a transform, as lightly's `from_torch_dataset` takes them."""

    def __init__(self, images: list[Image.Image], labels: Tensor) -> None:
        self.images, self.labels, self.transform = images, labels, None

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        image: Any = self.images[row]
        return image if self.transform is None else self.transform(image), int(self.labels[row])


def train_lightly(
    data: dict[str, tuple[list[Image.Image], Tensor]],
    ours: Any,
    epochs: int,
    batch_size: int,
    temperature: float,
    seed: int,
) -> dict[str, float]:
    """Accuracy of 20 nearest neighbours of test images after training in a LightningModule."""
    import pytorch_lightning
    from lightly.data import LightlyDataset
    from lightly.loss import NTXentLoss
    from lightly.transforms.multi_view_transform import MultiViewTransform

    view = transforms.Compose(
        [
            transforms.RandomResizedCrop(32, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.RandomGrayscale(0.2),
            transforms.ToTensor(),
            transforms.ColorJitter(0.4, 0.4),
        ]
    )
    dataset = LightlyDataset.from_torch_dataset(
        Images(*data["train"]), transform=MultiViewTransform([view, view])
    )

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            layers: list[nn.Module] = []
            for before, after in ((3, 32), (32, 64), (64, 128)):
                layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.ReLU()]
            self.backbone = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
            self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
            self.criterion: Any = NTXentLoss(temperature=temperature)
            if ours is not None:
                self.criterion = ours(
                    num_left=len(dataset), views=True, temperature=temperature, seed=seed
                )
                self.number = {name: number for number, name in enumerate(dataset.get_filenames())}

        def forward(self, images: Tensor) -> Tensor:
            projections: Tensor = self.head(self.backbone(images))
            return projections

        def training_step(self, batch: Any, number: int) -> Tensor:
            (view0, view1), _, names = batch
            if ours is None:
                return self.criterion(self(view0), self(view1))
            ids = torch.tensor([self.number[name] for name in names])
            left, right = (nn.functional.normalize(self(view), dim=1) for view in (view0, view1))
            return self.criterion(left, right, ids, encode=self.encode).loss

        def encode(self, side: str, ids: Tensor) -> Tensor:
            views = [dataset[number][0][side == "right"] for number in ids.tolist()]
            return nn.functional.normalize(self(torch.stack(views)), dim=1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(seed)
    module = Module()
    settings = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pytorch_lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, enable_checkpointing=False, **settings
    )
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=batch_size, shuffle=True, drop_last=True
    )
    torch.manual_seed(seed)
    trainer.fit(module.train(), loader)
    features = {split: embed(module.backbone, images) for split, (images, _) in data.items()}
    neighbours = (features["test"] @ features["train"].T).topk(20).indices
    votes = nn.functional.one_hot(data["train"][1][neighbours], 10).sum(dim=1)
    return {"kNN accuracy": float((votes.argmax(dim=1) == data["test"][1]).float().mean())}


@torch.no_grad()
def embed(backbone: nn.Module, images: list[Image.Image]) -> Tensor:
    """(n, 128) unit-norm features."""
    inputs = torch.stack([transforms.functional.to_tensor(image) for image in images])
    return nn.functional.normalize(torch.cat([backbone(part) for part in inputs.split(256)]), dim=1)


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
