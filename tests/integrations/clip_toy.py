"""A tiny CLIP, and images of stripes with captions, as open_clip's own loaders read them."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

COLORS = ["black", "red", "green", "blue", "yellow", "pink", "cyan", "white"]
WORDS = {word: number for number, word in enumerate(["", *COLORS, "on", "end"])}
CONFIG: dict[str, Any] = {
    "embed_dim": 16,
    "vision_cfg": {"image_size": 16, "layers": 1, "width": 32, "head_width": 16, "patch_size": 4},
    "text_cfg": {"context_length": 6, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 1},
}


def tiny_clip(seed: int = 0) -> Any:
    import open_clip

    torch.manual_seed(seed)
    text = {**CONFIG["text_cfg"], "vocab_size": len(WORDS)}
    model = open_clip.CLIP(16, CONFIG["vision_cfg"], text, output_dict=True)
    torch.nn.init.normal_(model.text_projection)
    return model


def tokenize(texts: str | list[str]) -> torch.Tensor:
    texts = [texts] if isinstance(texts, str) else texts
    rows = [[*(WORDS[word] for word in text.split()), WORDS["end"]] for text in texts]
    return torch.tensor([[*row, *[0] * (6 - len(row))] for row in rows])


def prepare(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"), dtype=np.float32)).permute(2, 0, 1) / 127.5 - 1


def picture(back: int, front: int) -> Image.Image:
    """A square of one colour on another."""
    image = Image.new("RGB", (16, 16), COLORS[back])
    image.paste(COLORS[front], (4, 4, 12, 12))
    return image


def pictures() -> list[tuple[str, Image.Image]]:
    """64 captions and their images, in mixed order."""
    numbers = [(back, front) for back in range(8) for front in range(8)]
    order = np.random.default_rng(0).permutation(64)
    return [(f"{COLORS[f]} on {COLORS[b]}", picture(b, f)) for b, f in (numbers[i] for i in order)]


def write_csv(folder: Path, repeat: bool = False) -> Path:
    """A table of 64 pairs; with `repeat` two more, with images of the first two and one caption."""
    lines = ["filepath\ttitle"]
    for number, (caption, image) in enumerate(pictures()):
        image.save(folder / f"{number}.png")
        lines.append(f"{folder / str(number)}.png\t{caption}")
    if repeat:
        lines.append(f"{folder / '0.png'}\twhite")
        lines.append(f"{folder / '1.png'}\twhite")
    path = folder / "pairs.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_tars(folder: Path, tars: int = 4) -> str:
    """The same pairs as webdataset tars whose keys repeat from tar to tar."""
    rows = pictures()
    for tar in range(tars):
        with tarfile.open(folder / f"{tar}.tar", "w") as archive:
            for key, (caption, image) in enumerate(rows[tar::tars]):
                content = io.BytesIO()
                image.save(content, "png")
                for suffix, data in (("png", content.getvalue()), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{key:04}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
    (folder / "sizes.json").write_text(json.dumps({f"{tar}.tar": 64 // tars for tar in range(tars)}))
    return f"{folder}/{{0..{tars - 1}}}.tar"


def arguments(train_data: Path | str, **changes: Any) -> SimpleNamespace:
    """What open_clip's loops read of its command line."""
    values: dict[str, Any] = {
        "train_data": str(train_data),
        "val_data": None,
        "dataset_type": "auto",
        "csv_img_key": "filepath",
        "csv_caption_key": "title",
        "csv_separator": "\t",
        "train_num_samples": None,
        "train_data_upsampling_factors": None,
        "dataset_resampled": False,
        "imagenet_val": None,
        "imagenet_v2": None,
        "batch_size": 16,
        "workers": 0,
        "seed": 0,
        "device": "cpu",
        "precision": "fp32",
        "accum_freq": 1,
        "skip_scheduler": True,
        "grad_clip_norm": None,
        "distill": False,
        "horovod": False,
        "distributed": False,
        "rank": 0,
        "local_rank": 0,
        "world_size": 1,
        "epochs": 4,
        "val_frequency": 1,
        "log_every_n_steps": 1000,
        "save_logs": False,
        "wandb": False,
        "val_num_samples": None,
    }
    return SimpleNamespace(**values | changes)


def optimizer_of(model: torch.nn.Module, kind: Any = torch.optim.AdamW, lr: float = 3e-3) -> torch.optim.Optimizer:
    """As open_clip's program: no weight decay of scalars and biases."""
    groups = [[p for p in model.parameters() if (p.ndim < 2) == small] for small in (True, False)]
    optimizer: torch.optim.Optimizer = kind([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1]}], lr=lr)
    return optimizer


def read(args: SimpleNamespace) -> dict[str, Any]:
    from open_clip_train.data import get_data

    data: dict[str, Any] = get_data(args, (prepare, prepare), tokenizer=tokenize)
    return data
