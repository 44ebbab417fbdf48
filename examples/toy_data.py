"""Small generated data for the examples, so that each of them runs offline in seconds on a CPU."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import open_clip
from PIL import Image, ImageDraw

# What a customer writes, and what the catalogue calls it.
COLOURS = {
    "crimson": "red",
    "azure": "blue",
    "emerald": "green",
    "ebony": "black",
    "ivory": "white",
    "amber": "orange",
}
STUFFS = {
    "timber": "wood",
    "metallic": "steel",
    "crystal": "glass",
    "knitted": "wool",
    "ceramic": "clay",
}
THINGS = {
    "sofa": "couch",
    "light": "lamp",
    "cup": "mug",
    "rug": "carpet",
    "seat": "chair",
    "cabinet": "wardrobe",
}


def write_catalogue(folder: Path) -> None:
    """train.jsonl and test.jsonl with {query, document}, documents.jsonl with {_id, text}: no word
    in common."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    words = (COLOURS.items(), STUFFS.items(), THINGS.items())
    for (colour, red), (stuff, wood), (thing, couch) in itertools.product(*words):
        rows.append(
            {"query": f"{colour} {stuff} {thing}", "document": f"{couch} of {wood} in {red}"}
        )
    order = np.random.default_rng(0).permutation(len(rows))
    write_jsonl(folder / "train.jsonl", [rows[i] for i in order[40:]])
    write_jsonl(folder / "test.jsonl", [rows[i] for i in order[:40]])
    documents = [
        {"_id": row["document"].replace(" ", "-"), "text": row["document"]} for row in rows
    ]
    write_jsonl(folder / "documents.jsonl", documents)


def write_shapes(folder: Path, copies: int = 4) -> None:
    """Pictures of a coloured shape on a coloured ground, and train.jsonl and test.jsonl with
    {image, captions}."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    colours = ("red", "green", "blue", "yellow", "black", "white")
    kinds = [
        k for k in itertools.product(colours, ("circle", "square", "bar"), colours) if k[0] != k[2]
    ]
    rows = []
    for copy, (colour, shape, ground) in itertools.product(range(copies), kinds):
        image = Image.new("RGB", (32, 32), ground)
        x, y = (int(position) for position in random.integers(2, 10, size=2))
        if shape == "circle":
            ImageDraw.Draw(image).ellipse((x, y, x + 18, y + 18), fill=colour)
        else:
            ImageDraw.Draw(image).rectangle(
                (x, y, x + 18, y + (18 if shape == "square" else 5)), fill=colour
            )
        name = f"{copy}-{colour}-{shape}-{ground}.png"
        image.save(folder / name)
        caption = f"a {colour} {shape} on {ground} ground"
        rows.append(
            {"image": name, "captions": [caption, f"{ground} behind a {shape} that is {colour}"]}
        )
    write_jsonl(folder / "train.jsonl", rows[len(kinds) :])
    write_jsonl(folder / "test.jsonl", rows[: len(kinds)])


def write_clip_files(folder: Path) -> list[str]:
    """Tables of images and captions, and arguments of open_clip's program for a tiny architecture,
    made known to it."""
    write_shapes(folder)
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
        lines = [f"{folder / row['image']}\t{row['captions'][0]}\n" for row in rows]
        (folder / f"{split}.tsv").write_text("filepath\ttitle\n" + "".join(lines))
    config = {
        "embed_dim": 32,
        "vision_cfg": {
            "image_size": 32,
            "patch_size": 8,
            "width": 64,
            "layers": 2,
            "head_width": 32,
        },
        "text_cfg": {
            "context_length": 16,
            "vocab_size": 49408,
            "width": 64,
            "heads": 2,
            "layers": 1,
        },
    }
    (folder / "tiny-clip.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder / "tiny-clip.json")
    files = f"--train-data {folder}/train.tsv --val-data {folder}/test.tsv --dataset-type csv"
    settings = (
        "--epochs 16 --batch-size 32 --lr 2e-3 --lr-scheduler const --precision fp32 "
        "--device cpu --workers 0"
    )
    return f"--model tiny-clip {files} {settings} --skip-scheduler".split()


def write_patterns(folder: Path, per_class: int) -> None:
    """Folders of images, one per pattern, in random colours: what a class has in common is not its
    colour."""
    random = np.random.default_rng(per_class)
    rows, columns = np.mgrid[:32, :32]
    patterns = {
        "stripes": lambda width, shift: (rows + shift) // width % 2,
        "checks": lambda width, shift: ((rows + shift) // width + columns // width) % 2,
        "diagonals": lambda width, shift: (rows + columns + shift) // width % 2,
        "rings": lambda width, shift: (
            np.hypot(rows - 16, columns - 16 + shift % 3).astype(int) // width % 2
        ),
    }
    for name, pattern in patterns.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(per_class):
            colours = np.stack([random.integers(0, 110, size=3), random.integers(146, 256, size=3)])
            pixels = colours[pattern(int(random.integers(3, 7)), int(random.integers(12)))]
            pixels = pixels + random.normal(0, 12, size=pixels.shape)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(
                folder / name / f"{number}.png"
            )


def write_jsonl(path: Path, rows: list[dict]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
