"""Training loops of other tools: sentence-transformers, open_clip, and SimCLR of lightly's parts.

Each takes what ours takes: the same model, pairs, batch size, optimizer (AdamW at 1e-4, gradients
clipped to norm 1), number of worker processes, and float32 or bfloat16 autocast. Random weights
instead of trained ones make no difference.
"""

from __future__ import annotations

import csv
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from profiling import DEVICE, ON_GPU, watch
from torch import nn
from torch.utils.data import DataLoader, default_collate

from dualenc.data import PairDataset
from dualenc.encoders import ImageEncoder

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import Settings
from tasks import default_model

VIEW_SIZE = 32
SMALL_CLIP: dict[str, Any] = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 96, "patch_size": 16, "width": 256, "layers": 6, "head_width": 64},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}


def sentence_transformers(
    pairs: PairDataset, settings: Settings, steps: int, before_loss: Callable[[], None]
) -> None:
    """Train by `SentenceTransformerTrainer`; its loss is InfoNCE for one direction."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer import losses
    from transformers import PrinterCallback
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = SentenceTransformer(default_model())
    model.max_seq_length = settings["text_length"]
    loss = losses.MultipleNegativesRankingLoss(model)
    if chunk_size := settings["chunk_size"]:
        loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=chunk_size)
    watch(loss, before_loss)
    with tempfile.TemporaryDirectory() as folder:
        arguments = Arguments(
            output_dir=folder,
            per_device_train_batch_size=settings["batch_size"],
            max_steps=steps,
            learning_rate=1e-4,
            bf16=settings["bf16"],
            use_cpu=not ON_GPU,
            dataloader_num_workers=settings["workers"],
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
        )
        data = Dataset.from_dict({"anchor": pairs.left_items, "positive": pairs.right_items})
        trainer = SentenceTransformerTrainer(model, arguments, data, loss=loss)
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def open_clip(
    pairs: PairDataset, settings: Settings, steps: int, before_loss: Callable[[], None]
) -> None:
    """Train by open_clip's `train_one_epoch` on its CSV data set."""
    from open_clip import ClipLoss, SimpleTokenizer
    from open_clip.model import CLIP
    from open_clip.transform import image_transform
    from open_clip_train.data import get_csv_dataset
    from open_clip_train.train import train_one_epoch

    files = pairs.left_items
    table = files.root / "pairs.csv"
    arguments = SimpleNamespace(
        device=str(DEVICE),
        precision="amp_bf16" if settings["bf16"] else "fp32",
        batch_size=settings["batch_size"],
        workers=settings["workers"],
        train_data=str(table),
        **{"csv_img_key": "image", "csv_caption_key": "caption", "csv_separator": ","},
        grad_clip_norm=1.0,
        accum_freq=1,
        log_every_n_steps=10,
        skip_scheduler=True,
        **dict.fromkeys(("distill", "distributed", "horovod", "wandb"), False),
        **{"world_size": 1, "rank": 0, "local_rank": 0},
    )
    images = [str(files.root / name) for name in files.names]
    rows = itertools.cycle(zip(images, pairs.right_items, strict=True))
    with table.open("w", newline="") as file:
        lines = itertools.islice(rows, steps * settings["batch_size"])
        csv.writer(file).writerows([("image", "caption"), *lines])
    model = CLIP(**SMALL_CLIP, output_dict=True).to(DEVICE)
    transform = image_transform(SMALL_CLIP["vision_cfg"]["image_size"], is_train=True)
    tokenizer = SimpleTokenizer(context_length=SMALL_CLIP["text_cfg"]["context_length"])
    data = {"train": get_csv_dataset(arguments, transform, is_train=True, tokenizer=tokenizer)}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = ClipLoss()
    watch(loss, before_loss)
    train_one_epoch(model, data, loss, 0, optimizer, None, None, None, arguments)


def lightly(
    pairs: PairDataset, settings: Settings, steps: int, before_loss: Callable[[], None]
) -> None:
    """Train by the loop of lightly's SimCLR example, with its loss, head and transform.

    Gradients are clipped, which the example leaves out.
    """
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.transforms import SimCLRTransform

    # As SimCLR for CIFAR-10, and as `dualenc.data.views.SimCLR` by default.
    transform = SimCLRTransform(input_size=VIEW_SIZE, cj_strength=0.5, gaussian_blur=0.0)
    images = pairs.left_items
    loader = DataLoader(
        range(len(images)),
        settings["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=settings["workers"],
        pin_memory=ON_GPU,
        collate_fn=lambda rows: default_collate([transform(images[row]) for row in rows]),
    )
    tower = ImageEncoder("resnet18", image_size=VIEW_SIZE).left
    head = SimCLRProjectionHead(tower.feature_dim, tower.feature_dim, tower.dim)
    model = nn.Sequential(tower.backbone, head).to(DEVICE).train()
    loss = NTXentLoss(temperature=0.2)
    watch(loss, before_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for views in itertools.islice(batches, steps):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=settings["bf16"]):
            vectors = [model(view.to(DEVICE, non_blocking=True)) for view in views]
            value = loss(*vectors)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
