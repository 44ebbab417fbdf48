"""What does an objective add to a training step: in time, by encoder and corpus size, and in state?

    python eval/bench/objectives.py steps --encoder minilm --batch_sizes [32,256,1024] --repeats 15
    python eval/bench/objectives.py steps --sizes [10000,100000,1000000,10000000] --repeats 3
    python eval/bench/objectives.py state --ranks [1,8,64] --dimension 256
    python eval/bench/objectives.py items --workers "[0,1,2,8]" --size 224

steps: an objective is timed alone, forward and backward, on random embeddings, those of items
outside the batch included; without an encoder caches are full. The least time is taken; on one
thread the clock is CPU time. "operations" counts kernels and views, which is what launching costs
on a GPU. Memory is what the process has grown by since before the objective was built (what an
earlier one has left is used first: time one at a time). With --encoder, ratio = (model + objective)
/ (model + InfoNCE); "with encodes" adds the model's time for items outside the batch.

state: what well-known corpora take on each rank: that of two small ones, extrapolated.

items: how long images outside the batch take to read, by the number of workers: JPEG files of noise
through SimCLR's views. The network is a mean of pixels: what is timed is reading and preparing.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from in_turn import in_turn, new_backbone, quietest_clock, rows_of
from psutil import Process
from torch import Tensor, nn
from torch.nn.functional import normalize
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import noise_images

sys.path.insert(0, str(Path(__file__).parents[1]))
from frame import command_line

import dualenc.objectives as library
from dualenc.data import ImageFolderViews
from dualenc.encoders import BatchStatistics, ImageEncoder
from dualenc.encoders.batchnorm import trained_norms
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import SACLR, GlobalCache, NegativeCache, Objective
from dualenc.objectives.memory import EmbeddingMemory
from dualenc.training.encoding import PlainEncoding
from dualenc.training.extra_items import ItemEncoder

PLAIN = ("InfoNCE", "DCL", "HCL", "SigLIP", "SogCLR", "ISogCLR", "EMC2", "ISIR")
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **{name: getattr(library, name) for name in PLAIN},
    "SACLR row": SACLR,
    "SACLR-1 matrix": partial(SACLR, form="matrix", negatives=1),
    "GlobalCache": GlobalCache,
    "GlobalCache, pool=65536": partial(GlobalCache, pool=65_536),
    "NegativeCache": partial(NegativeCache, refresh=0.0),
}
CHUNK = 64
"""Items that a model encodes at once."""
WRITTEN = 1 << 16
"""Embeddings that are written at once, and that items share."""
# Items of both sides.
CORPORA = {"MS MARCO": 9_300_000, "CC12M": 24_000_000, "LAION-400M": 800_000_000}
CORPORA["10⁹ pairs"] = 2 * 10**9


def new_step(
    objective: Objective, vectors: Tensor, batch_size: int, paired: bool = True
) -> tuple[Callable[[], None], Counter[bool]]:
    """Return a step of an objective alone, and the items it asks for, with and without gradient.

    Items beyond the vectors (n, D) share them. `paired`: ids of both sides are the same space.
    """
    draw = torch.Generator().manual_seed(0)
    num_items = max(objective.num_left, objective.num_right or 0)
    # Few anchors, so that each comes back after some steps and finds its state, mostly outside the
    # batch.
    visited = torch.randperm(objective.num_left, generator=draw)[: 4 * batch_size]
    asked: Counter[bool] = Counter()

    def embeddings(ids: Tensor) -> Tensor:
        return vectors[ids if num_items <= len(vectors) else ids % len(vectors)]

    def encode(side: str, ids: Tensor) -> Tensor:
        asked[torch.is_grad_enabled()] += len(ids)
        return embeddings(ids).requires_grad_()

    def step() -> None:
        ids = visited[torch.randperm(len(visited), generator=draw)[:batch_size]]
        left, right = (embeddings(ids).detach().requires_grad_() for _ in range(2))
        objective(left, right, ids, None if paired else ids, encode=encode).loss.backward()

    return step, asked


class Operations(TorchDispatchMode):
    """Counts every operation, forward and backward, while it is on."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def least_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a call, after one to warm up: other work only adds to it."""
    return min(in_turn({"run": run}, repeats, 1, quietest_clock)[0]["run"])


def model_seconds(
    backbone: nn.Module, items: Tensor, batch_size: int, repeats: int
) -> tuple[float, float, float]:
    """Return seconds of a step for 2B items; noting BatchNorm's statistics; of one more item."""

    def run(keep: bool, out_of_batch: bool = False) -> None:
        noted = BatchStatistics(keep)
        with noted.recorded(backbone):
            loss = backbone(items).pow(2).mean()
        if out_of_batch:
            with noted.applied(backbone):
                loss = loss + backbone(items).pow(2).mean()
        noted.release()
        loss.backward()

    passes = (partial(run, False), partial(run, True), partial(run, True, True))
    plain, noting, both = (least_seconds(each, repeats) for each in passes)
    if not trained_norms(backbone):
        noting = plain
    optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-5)
    update, chunks = least_seconds(optimizer.step, repeats), 2 * batch_size / len(items)
    return plain * chunks + update, noting * chunks + update, (both - noting) / len(items)


def fill(objective: Objective, dimension: int) -> None:
    """Write an embedding of every item to the memories of an objective."""
    for memory in {each for each in objective.modules() if isinstance(each, EmbeddingMemory)}:
        for items in torch.arange(memory.num_items).split(WRITTEN):
            embeddings = normalize(torch.randn(len(items), dimension))
            memory.write(items * memory.keys_per_item, embeddings)


def steps(
    encoder: Literal["resnet18", "minilm"] | None = None,
    batch_sizes: list[int] = [32],  # noqa: B006 - a default for the command line, never changed
    sizes: list[int] = [20_000],  # noqa: B006
    dimension: int = 64,
    num_left: int | None = None,
    objectives: list[str] = list(OBJECTIVES),  # noqa: B006
    item_size: int = 64,
    repeats: int = 5,
) -> list[dict[str, Any]]:
    """Print a row per batch size, size of the corpus, and objective.

    Args:
        encoder: the model whose step is the yardstick, if any.
        sizes: items of the corpus, N.
        dimension: D, without an encoder.
        num_left: items on the left, such as queries; by default N.
        item_size: pixels of an image's side, or tokens of a text.
        repeats: timed steps.
    """
    torch.manual_seed(0)
    views, table = encoder == "resnet18", []
    if encoder:
        backbone, dimension = new_backbone(encoder)
    for batch_size, num_items in itertools.product(batch_sizes, sizes):
        vectors = normalize(torch.randn(min(num_items, WRITTEN), dimension))
        shape = (min(CHUNK, 2 * batch_size), *[3, item_size] * views, item_size)
        chunk = torch.randn(shape) if views else torch.randint(30000, shape)
        times = model_seconds(backbone, chunk, batch_size, repeats) if encoder else (0.0, 0.0, 0.0)
        right = {"num_right": num_items} if num_left else {}
        reference = 0.0
        for name in dict.fromkeys(["InfoNCE", *objectives]):
            before = Process().memory_info().rss
            objective = OBJECTIVES[name](views=views, num_left=num_left or num_items, **right)
            if not encoder:
                fill(objective, dimension)
            step, asked = new_step(objective, vectors, batch_size, paired=num_left is None)
            for _ in range(8):
                step()
            with Operations() as operations:
                step()
            asked.clear()
            own = least_seconds(step, repeats)
            graphs, no_graphs = (asked[kind] / (repeats + 1) for kind in (True, False))
            model = times[objective.needs_encode]
            reference = reference or model + own
            row = {
                "B": batch_size,
                "N": num_items,
                "objective": name,
                "operations": operations.count,
                "ms": 1000 * own,
                "encodes": graphs + no_graphs,
                "state, MB": state_bytes(objective) / 1e6,
                "memory, MB": (Process().memory_info().rss - before) / 1e6,
                "ratio": (model + own) / reference,
            }
            if encoder:
                whole = model + own + times[2] * (graphs + no_graphs / 3)
                row |= {"model, ms": 1000 * model, "with encodes": whole / reference}
            table.append(row)
    threads = f"{torch.get_num_threads()} threads"
    print_table(Table(f"{encoder or 'no encoder'}, {threads}, D = {dimension}", table))
    return table


def state_bytes(module: nn.Module) -> int:
    """Return the bytes of all buffers."""
    return sum(buffer.nbytes for buffer in module.buffers())


def bytes_per_item(name: str, dimension: int) -> tuple[int, float, float]:
    """Return state that does not grow, and that of an item: on every rank, and divided by ranks."""
    small, large = 1 << 14, 1 << 15
    found = []
    for num_items in (small, large):
        objective = OBJECTIVES[name](num_left=num_items)
        new_step(objective, normalize(torch.randn(64, dimension)), batch_size=8)[0]()
        banks = [each for each in objective.modules() if isinstance(each, EmbeddingMemory)]
        divided = sum(map(state_bytes, banks))
        found.append((state_bytes(objective) - divided, divided))
    # Beyond some 16,000 items all that grows is in proportion to their number, 2N.
    whole, divided = ((b - a) / (2 * (large - small)) for a, b in zip(*found, strict=True))
    return found[0][0] - 2 * small * whole, whole, divided


def state(ranks: list[int], dimension: int = 64) -> None:
    """Print bytes per item, and GB per rank, of each objective for well-known corpora."""
    rows = []
    for name in OBJECTIVES:
        fixed, whole, divided = bytes_per_item(name, dimension)
        for corpus, items in CORPORA.items():
            cells = {"corpus": corpus, "objective": name, "bytes per item": whole + divided}
            for number in ranks:
                cells[f"GB, {number} ranks"] = (fixed + items * (whole + divided / number)) / 1e9
            rows.append(cells)
    print_table(Table(f"State per rank, D = {dimension}", rows))


def items(
    workers: list[int] = [0, 1, 2],  # noqa: B006
    size: int = 224,
    count: int = 64,
    images: int = 512,
    repeats: int = 9,
) -> None:
    """Print milliseconds of a request, and the ratio to the first number of workers.

    Args:
        workers: numbers of workers, which take turns.
        count: items of a request.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        noise_images(Path(folder), images, size=size * 3 // 2, suffix=".jpg")
        model = ImageEncoder("resnet18", image_size=size)
        model.left.forward = lambda inputs: normalize(inputs["image"].mean(dim=(2, 3)))
        encoding = PlainEncoding(model, torch.device("cpu"), keep_statistics=False)
        pairs = ImageFolderViews(folder)
        readers = {each: ItemEncoder(model, pairs, encoding, num_workers=each) for each in workers}
        asks = {
            each: lambda reader=reader: reader("left", torch.randint(images, (count,)))
            for each, reader in readers.items()
        }
        times, _ = in_turn(asks, repeats, warm_up=1)
        for reader in readers.values():
            reader.close()
    print_table(Table(f"{count} images of {size}×{size} pixels", rows_of(times, "workers")))


def check(folder: Path) -> None:
    """Time all with a small ResNet-18; a number of SogCLR is 4 bytes, a cached item 520 at most."""
    table = steps("resnet18", [4], [50], item_size=32, repeats=1)
    assert table[0]["ratio"] == 1
    for name, expected in {"SogCLR": 4, "EMC2": 12, "ISIR": 8}.items():
        assert sum(bytes_per_item(name, 8)[1:]) == expected
    items([0], size=32, count=4, images=8, repeats=1)


if __name__ == "__main__":
    command_line(steps, state, items, check=check)
