"""What is adapting the queries of an image index worth, for captions and for images as queries?

    python eval/adapting_images.py run DATA WORK
    python eval/adapting_images.py report

DATA holds {train,dev,test}.parquet of images with five captions each (Flickr8k). A small open_clip
model is trained from scratch on the first half of the training images and kept in WORK; the index
holds none of these. `dualenc adapt` then trains the query side on clicks:

- "captions": the index holds the other half and the test images. A click is one of four captions
  and its image of the half; the fifth is a test query ("seen"), as are all captions of the test
  images, which have no click ("new").
- "images": the index holds the other half. A query is an image of dev, and its clicks are on the
  three images whose captions are nearest, by the cosine of their tf-idf; likewise for the test
  queries, the images of test. "Seen" are those with a clicked image among their three.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from frame import Outcome, Settings, Store
from tasks import CLIP
from toys import images as toy_images

import dualenc
from dualenc.data import TablePairs
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, ImageTextEncoder, load_model
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.report_page import Table, print_table
from dualenc.evaluation.retrieval import divide_by_training, retrieve
from dualenc.io.decoding import decode_image
from dualenc.objectives import InfoNCE
from dualenc.types import Side

STORE = frame.RESULTS / "adapting_images.jsonl"
BASE = {"epochs": 6, "batch_size": 128, "learning_rate": 1e-3}
TEMPERATURE = 0.07
NEAREST = 3
GROUPS = ("all", "seen", "new")
METRICS = ("ndcg@10", "recall@10")
SIDES: dict[str, Side] = {"captions": "right", "images": "left"}
"""Sides of the model that encode queries."""


class Task(NamedTuple):
    """An index, clicks, and test queries: items and judgments by query."""

    index: Path
    clicks: Path
    queries: list[Any]
    qrels: dict[str, dict[str, int]]


def base_model(data: Path, work: Path) -> Path:
    """Train the model of the index on the first half of the training images, once."""
    folder = work / "base"
    if not folder.exists():
        columns = {"left_column": "image", "right_column": "captions"}
        pairs = TablePairs(data / "train.parquet", **columns)
        first = pairs.take(np.flatnonzero(pairs.left_id < pairs.num_left // 2))
        torch.manual_seed(0)
        model = ImageTextEncoder(config=CLIP, crop_scale=(0.5, 1.0))
        objective = InfoNCE(
            num_left=pairs.num_left, num_right=pairs.num_right, temperature=TEMPERATURE
        )
        frame.train(model, first, objective, **BASE).model.save(folder)
    return folder


def open_task(data: Path, work: Path, name: str) -> Task:
    """Write the index and the clicks of a task, once, and open it."""
    base = base_model(data, work)
    parts = {part: rows_of(data, part) for part in ("train", "dev", "test")}
    half = parts["train"][len(parts["train"]) // 2 :]
    folder, clicks = work / name, work / f"{name}.parquet"
    if name == "captions":
        indexed = [*half, *parts["test"]]
        clicked = [(text, row["_id"]) for row in half for text in row["captions"][:4]]
        judged = [(row["captions"][4], {row["_id"]: 1}) for row in half]
        judged += [(text, {row["_id"]: 1}) for row in parts["test"] for text in row["captions"]]
    else:
        indexed = half
        near = {part: nearest(parts[part], half) for part in ("dev", "test")}
        own = zip(parts["dev"], near["dev"], strict=True)
        clicked = [(row["image"], half[place]["_id"]) for row, places in own for place in places]
        judged = [
            (decode_image(row["image"]["bytes"], row["_id"]), {half[at]["_id"]: 1 for at in places})
            for row, places in zip(parts["test"], near["test"], strict=True)
        ]
    if not clicks.exists():
        table = pa.Table.from_pylist(
            [{key: row[key] for key in ("_id", "image")} for row in indexed]
        )
        pq.write_table(table, work / f"{name}-indexed.parquet")
        dualenc.embed(str(base), str(work / f"{name}-indexed.parquet"), out=folder, progress=False)
        queries, documents = zip(*clicked, strict=True)
        columns = {"query": list(queries), "document": list(documents)}
        pq.write_table(pa.table(columns), clicks)
    qrels = {f"q{row}": grades for row, (_, grades) in enumerate(judged)}
    return Task(folder, clicks, [query for query, _ in judged], qrels)


def rows_of(data: Path, part: str) -> list[dict[str, Any]]:
    """Return images and captions of a part, with ids."""
    rows = pq.read_table(data / f"{part}.parquet", columns=["image", "captions"]).to_pylist()
    return [{"_id": f"{part}-{number}", **row} for number, row in enumerate(rows)]


def nearest(queries: list[dict[str, Any]], documents: list[dict[str, Any]]) -> np.ndarray:
    """Return the places (Q, 3) of the documents whose captions are nearest by tf-idf."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    texts = [[" ".join(row["captions"]) for row in rows] for rows in (documents, queries)]
    weigh = TfidfVectorizer(stop_words="english", sublinear_tf=True)
    weighed = weigh.fit_transform(texts[0])
    similarities = (weigh.transform(texts[1]) @ weighed.T).toarray()
    return np.argsort(-similarities, axis=1, kind="stable")[:, :NEAREST]


def measure(task: Task, model: DualEncoder, side: Side) -> Outcome:
    """Return the metrics of test queries: all, and those with and without a clicked document."""
    index = Embeddings.open(task.index)
    vectors = model.encode(task.queries, side, batch_size=64, show_progress_bar=False)
    run = retrieve(list(task.qrels), vectors, index.ids, index.vectors, depth=10)
    scores = score_queries(task.qrels, run, cutoffs=(10,))
    clicked = set(pq.read_table(task.clicks, columns=["document"])["document"].to_pylist())
    seen, new = divide_by_training(task.qrels, clicked)
    groups = dict(zip(GROUPS, (task.qrels, seen, new), strict=True))
    outcome: Outcome = {}
    for name, group in groups.items():
        outcome[f"{name} queries"] = len(group)
        for metric in METRICS:
            if group:
                mean = statistics.mean(scores[query][metric] for query in group)
                outcome[f"{name} {metric}"] = round(mean, 4)
    return outcome


def adapt(tasks: dict[str, Task], base: Path, settings: Settings) -> Outcome:
    """Run the command, and measure its model on the test queries."""
    task = tasks[settings["task"]]
    if settings["train"] == "unadapted":
        return measure(task, load_model(base), SIDES[settings["task"]])
    options = {key: value for key, value in settings.items() if key != "task"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        result = dualenc.adapt(
            str(task.index), str(task.clicks), out=out, progress=False, **options
        )
        outcome = measure(task, load_model(result.model_folder), "left")
    return outcome | {"share": result.keep}


def run(
    data: Path,
    work: Path,
    tasks: tuple[str, ...] = tuple(SIDES),
    trains: tuple[str, ...] = ("perceptron", "linear"),
    rate: float | None = None,
    seeds: int = 3,
    keep: float | None = None,
) -> None:
    """Adapt every part of the query side that is named; `rate` and `keep` are those of `adapt`."""
    store = Store(STORE)
    opened = {name: open_task(data, work, name) for name in tasks}
    run_once = partial(adapt, opened, work / "base")
    store.get([{"task": name, "train": "unadapted"} for name in tasks], run_once)
    given = {"learning_rate": rate, "keep": keep}
    more = {key: value for key, value in given.items() if value is not None}
    wanted = {
        (name, part): {"task": name, "train": part, **more} for name in tasks for part in trains
    }
    frame.repeat(store, run_once, wanted, seeds)
    report()


def report() -> None:
    """Print a table of each task."""
    store = Store(STORE)
    for name in SIDES:
        rows = []
        for runs in frame.by_seed(store.where(task=name)):
            settings = runs[0].settings
            row = {"trained": settings["train"], "rate": settings.get("learning_rate", "default")}
            for group in GROUPS:
                for metric in METRICS:
                    key = f"{group} {metric}"
                    values = [each.outcome[key] for each in runs if key in each.outcome]
                    row[key] = frame.spread(values).removesuffix(" (one seed)")
            row["share"] = ", ".join(str(each.outcome.get("share", 1)) for each in runs)
            row["seconds"] = ", ".join(str(each.outcome.get("seconds", 0)) for each in runs)
            rows.append(row)
        if rows:
            print_table(Table(name, rows))


def check(folder: Path) -> None:
    """Adapt to images of one color by captions of their own: clicked images are found."""
    globals().update(STORE=folder / "runs.jsonl", BASE={"max_steps": 2, "batch_size": 8})
    toy_images(folder, train=40, test=8, size=64)
    for part, source in (("dev", "train"), ("train", "train"), ("test", "test")):
        rows = pq.read_table(folder / f"{source}.parquet").to_pylist()
        for number, row in enumerate(rows):
            color = ("red", "green", "blue")[row["label"] % 3]
            row["captions"] = [f"{color} {part} {number} {word}" for word in "abcde"]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{part}.parquet")
    run(folder, folder / "work", trains=("linear",), rate=0.02, seeds=1, keep=0.0)
    for name in SIDES:
        before, after = (each.outcome for each in Store(STORE).where(task=name))
        assert after["seen ndcg@10"] > before["seen ndcg@10"], (name, before, after)


if __name__ == "__main__":
    frame.command_line(run, report, check=check)
