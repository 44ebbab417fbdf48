"""What is trained: data, a model, and the training loop of another tool.

The other tools, sentence-transformers, open_clip and SimCLR of lightly's parts, take what ours
takes: the same model, pairs, batch size, optimizer (AdamW at 1e-4, gradients clipped to norm 1),
number of worker processes, and float32 or bfloat16 autocast.
"""

from __future__ import annotations

import csv
import itertools
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, default_collate

from dualenc.data import ImageFolderViews, PairDataset
from dualenc.data.readers.images import ImageFiles
from dualenc.data.views import SimCLR
from dualenc.encoders import DualEncoder, ImageEncoder, ImageTextEncoder, TextEncoder
from dualenc.workflows.run_quickstart import read_docstrings

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import Settings
from tasks import default_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
"""Device that the trainers compute on."""
WORKERS = min(8, (os.cpu_count() or 1) // 2) if ON_GPU else 0
"""Processes that prepare the data, of both tools."""
VIEW_SIZE = 32
CLIP: dict[str, Any] = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 96, "patch_size": 16, "width": 256, "layers": 6, "head_width": 64},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}


class Workload(NamedTuple):
    """Training pairs, what makes our model, and `rival(bf16, steps, before_loss)`."""

    pairs: PairDataset
    new_model: Callable[[], DualEncoder]
    rival: Callable[[bool, int, Callable[[], None]], None]


def watch(loss: nn.Module, before_loss: Callable[[], None]) -> None:
    """Have a loss call `before_loss` whenever it is computed."""
    loss.register_forward_pre_hook(lambda *_: before_loss())


def texts(settings: Settings, count: int, folder: Path) -> Workload:
    """MiniLM on pairs of texts; the rival's loss is InfoNCE for one direction."""
    left, right = text_pairs(settings["text_source"], count)

    def rival(bf16: bool, steps: int, before_loss: Callable[[], None]) -> None:
        from datasets import Dataset
        from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
        from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
        from sentence_transformers.sentence_transformer import losses

        model = SentenceTransformer(default_model())
        model.max_seq_length = settings["text_length"]
        loss = losses.MultipleNegativesRankingLoss(model)
        if chunk_size := settings["chunk_size"]:
            loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=chunk_size)
        watch(loss, before_loss)
        work = {"per_device_train_batch_size": settings["batch_size"], "max_steps": steps}
        work |= {"dataloader_num_workers": WORKERS, "learning_rate": 1e-4, "bf16": bf16}
        quiet = dict.fromkeys(("save_strategy", "logging_strategy"), "no") | {"report_to": "none"}
        quiet |= {"disable_tqdm": True, "use_cpu": not ON_GPU}
        arguments = Arguments(str(folder / "run"), **work, **quiet)
        data = Dataset.from_dict({"anchor": left, "positive": right})
        SentenceTransformerTrainer(model, arguments, data, loss=loss).train()

    new_model = partial(TextEncoder, default_model(), max_length=settings["text_length"])
    return Workload(PairDataset(left, right), new_model, rival)


def text_pairs(source: str, count: int) -> tuple[list[str], list[str]]:
    """Return summaries and bodies of docstrings, or titles and texts of a corpus.jsonl."""
    if source == "docstrings":
        pairs = [(own.summary, own.rest) for own in read_docstrings(count)]
    else:
        documents = map(json.loads, Path(source).read_text(encoding="utf-8").splitlines())
        both = ((own.get("title"), own["text"]) for own in documents)
        pairs = [(title, text) for title, text in both if title and text][:count]
    return [left for left, _ in pairs], [right for _, right in pairs]


def images_and_texts(settings: Settings, count: int, folder: Path) -> Workload:
    """A small CLIP on noise with captions; the rival is open_clip's epoch over a CSV file."""
    images = noise_images(folder, count, size=128, suffix=".jpg")
    captions = [f"noise of number {number}, without any picture in it" for number in range(count)]

    def rival(bf16: bool, steps: int, before_loss: Callable[[], None]) -> None:
        from open_clip import ClipLoss, SimpleTokenizer
        from open_clip.model import CLIP as Model
        from open_clip.transform import image_transform
        from open_clip_train.data import get_csv_dataset
        from open_clip_train.params import parse_args
        from open_clip_train.train import train_one_epoch

        files = [str(folder / name) for name in images.names]
        rows = itertools.cycle(zip(files, captions, strict=True))
        with (folder / "pairs.csv").open("w", newline="") as table:
            few = itertools.islice(rows, steps * settings["batch_size"])
            csv.writer(table).writerows([("filepath", "title"), *few])
        arguments = parse_args(["--csv-separator=,", "--skip-scheduler", "--log-every-n-steps=10"])
        own = {"batch_size": settings["batch_size"], "workers": WORKERS, "grad_clip_norm": 1.0}
        own |= {"train_data": str(folder / "pairs.csv"), "device": str(DEVICE), "world_size": 1}
        own |= dict.fromkeys(("distill", "distributed", "wandb", "rank", "local_rank"), 0)
        vars(arguments).update(own, precision="amp_bf16" if bf16 else "fp32")
        model = Model(**CLIP, output_dict=True).to(DEVICE)
        transform = image_transform(CLIP["vision_cfg"]["image_size"], is_train=True)
        tokenizer = SimpleTokenizer(context_length=CLIP["text_cfg"]["context_length"])
        data = {"train": get_csv_dataset(arguments, transform, is_train=True, tokenizer=tokenizer)}
        optimizer, loss = torch.optim.AdamW(model.parameters(), lr=1e-4), ClipLoss()
        watch(loss, before_loss)
        train_one_epoch(model, data, loss, 0, optimizer, None, None, None, arguments)

    pairs = PairDataset(images, captions, left_modality="image")
    return Workload(pairs, partial(ImageTextEncoder, config=CLIP), rival)


def views(settings: Settings, count: int, folder: Path) -> Workload:
    """ResNet-18 on two views of noise; the rival's gradients are clipped as ours are."""
    images = noise_images(folder, count, size=VIEW_SIZE, suffix=".png")
    augment = SimCLR(VIEW_SIZE)
    new_model = partial(ImageEncoder, "resnet18", image_size=VIEW_SIZE, augment=augment)

    def rival(bf16: bool, steps: int, before_loss: Callable[[], None]) -> None:
        from lightly.loss import NTXentLoss
        from lightly.models.modules import SimCLRProjectionHead
        from lightly.transforms import SimCLRTransform

        # As SimCLR for CIFAR-10, and as `dualenc.data.views.SimCLR` by default.
        augment = SimCLRTransform(input_size=VIEW_SIZE, cj_strength=0.5, gaussian_blur=0.0)
        options = {"num_workers": WORKERS, "pin_memory": ON_GPU, "drop_last": True}
        options["collate_fn"] = lambda rows: default_collate([augment(images[r]) for r in rows])
        loader = DataLoader(range(count), settings["batch_size"], shuffle=True, **options)
        tower = new_model().left
        head = SimCLRProjectionHead(tower.feature_dim, tower.feature_dim, tower.dim)
        model = nn.Sequential(tower.backbone, head).to(DEVICE).train()
        loss = NTXentLoss(temperature=0.2)
        watch(loss, before_loss)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        batches = itertools.chain.from_iterable(itertools.repeat(loader))
        for batch in itertools.islice(batches, steps):
            with torch.autocast(DEVICE.type, torch.bfloat16, enabled=bf16):
                value = loss(*(model(view.to(DEVICE, non_blocking=True)) for view in batch))
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return Workload(ImageFolderViews(folder), new_model, rival)


WORKLOADS = {"text": texts, "image-text": images_and_texts, "views": views}


def noise_images(folder: Path, count: int, size: int, suffix: str) -> ImageFiles:
    """Write image files of noise to a folder."""
    draw = np.random.default_rng(0)
    names = [f"{number}{suffix}" for number in range(count)]
    for name in names:
        Image.fromarray(draw.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(folder / name)
    return ImageFiles(folder, names)
