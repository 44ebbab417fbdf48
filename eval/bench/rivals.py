"""Training loops of other tools: sentence-transformers' trainer, open_clip's epoch, and SimCLR made
of lightly's parts.

Each takes what ours takes: the same model, pairs, batch size, optimizer (AdamW at 1e-4, gradients
clipped to norm 1), number of worker processes, and float32 or bfloat16 autocast. Random weights
instead of trained ones make no difference.
"""

from __future__ import annotations

import csv
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from in_turn import default_model
from profiling import device
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dualenc.encoders import ImageEncoder
from dualenc.types import Items

BeforeLoss = Callable[[], None]
Train = Callable[..., None]
"""`train(steps, before_loss=None)` trains for so many steps and calls `before_loss` before every
loss."""


def watch(loss: nn.Module, before_loss: BeforeLoss | None) -> None:
    """Have a loss call `before_loss` whenever it is computed."""
    if before_loss is not None:
        loss.register_forward_pre_hook(lambda *_: before_loss())


def sentence_transformers(
    left: list[str],
    right: list[str],
    batch_size: int,
    workers: int,
    text_length: int,
    chunk_size: int | None,
    bf16: bool,
) -> Train:
    """`SentenceTransformerTrainer` with (Cached)MultipleNegativesRankingLoss, InfoNCE for one
    direction."""
    from datasets import Dataset as Table
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )
    from transformers import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    data = Table.from_dict({"anchor": left, "positive": right})

    def train(steps: int, before_loss: BeforeLoss | None = None) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = SentenceTransformer(default_model())
            model.max_seq_length = text_length
            arguments = Arguments(
                output_dir=folder,
                per_device_train_batch_size=batch_size,
                max_steps=steps,
                learning_rate=1e-4,
                bf16=bf16,
                use_cpu=not torch.cuda.is_available(),
                dataloader_num_workers=workers,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
            )
            if chunk_size is None:
                loss = MultipleNegativesRankingLoss(model)
            else:
                loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=chunk_size)
            watch(loss, before_loss)
            trainer = SentenceTransformerTrainer(model, arguments, data, loss=loss)
            trainer.remove_callback(PrinterCallback)
            trainer.train()

    return train


def open_clip(
    folder: Path,
    names: list[str],
    captions: list[str],
    config: dict[str, Any],
    batch_size: int,
    workers: int,
    bf16: bool,
) -> Train:
    """open_clip's `train_one_epoch` on its CSV data set."""
    from open_clip import ClipLoss, SimpleTokenizer
    from open_clip.model import CLIP
    from open_clip.transform import image_transform
    from open_clip_train.data import get_csv_dataset
    from open_clip_train.train import train_one_epoch

    table = folder / "pairs.csv"
    arguments = SimpleNamespace(
        device=str(device()),
        precision="amp_bf16" if bf16 else "fp32",
        batch_size=batch_size,
        workers=workers,
        train_data=str(table),
        csv_img_key="image",
        csv_caption_key="caption",
        csv_separator=",",
        grad_clip_norm=1.0,
        accum_freq=1,
        log_every_n_steps=10,
        skip_scheduler=True,
        distill=False,
        distributed=False,
        horovod=False,
        wandb=False,
        world_size=1,
        rank=0,
        local_rank=0,
    )

    def train(steps: int, before_loss: BeforeLoss | None = None) -> None:
        places = [place % len(names) for place in range(steps * batch_size)]
        with table.open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(("image", "caption"))
            rows.writerows((str(folder / names[place]), captions[place]) for place in places)
        model = CLIP(**config, output_dict=True).to(device())
        transform = image_transform(config["vision_cfg"]["image_size"], is_train=True)
        tokenizer = SimpleTokenizer(context_length=config["text_cfg"]["context_length"])
        data = get_csv_dataset(arguments, transform, is_train=True, tokenizer=tokenizer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loss = ClipLoss()
        watch(loss, before_loss)
        train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, None, None, arguments)

    return train


class TwoViews(Dataset):
    """Two random views of each image."""

    def __init__(self, images: Items, transform: Callable[[Any], list[Tensor]]) -> None:
        self.images = images
        self.transform = transform

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> list[Tensor]:
        return self.transform(self.images[index])


def lightly(
    images: Items,
    new_model: Callable[[], ImageEncoder],
    image_size: int,
    batch_size: int,
    workers: int,
    bf16: bool,
) -> Train:
    """The loop of lightly's SimCLR example, with its loss, projection head and transform, on the
    backbone of a model.

    Gradients are clipped, which the example leaves out.
    """
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    # As SimCLR for CIFAR-10, and as `dualenc.data.views.SimCLR` by default.
    transform = SimCLRTransform(input_size=image_size, cj_strength=0.5, gaussian_blur=0.0)
    loader = DataLoader(
        TwoViews(images, transform),
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=torch.cuda.is_available(),
    )

    def train(steps: int, before_loss: BeforeLoss | None = None) -> None:
        tower = new_model().left
        head = SimCLRProjectionHead(tower.feature_dim, tower.feature_dim, tower.dim)
        model = nn.Sequential(tower.backbone, head).to(device()).train()
        loss = NTXentLoss(temperature=0.2)
        watch(loss, before_loss)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for first, second in itertools.islice(batches, steps):
            first = first.to(device(), non_blocking=True)
            second = second.to(device(), non_blocking=True)
            with torch.autocast(device().type, torch.bfloat16, enabled=bf16):
                value = loss(model(first), model(second))
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return train
