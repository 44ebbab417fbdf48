"""What does an objective add to a training step: by encoder, by corpus size, and in state?

    python eval/bench/objectives.py encoders --encoder minilm --batch_sizes [32,256,1024]
    python eval/bench/objectives.py encoders --encoder resnet18 --device cuda
    python eval/bench/objectives.py corpora --sizes [10000,100000,1000000,10000000]
    python eval/bench/objectives.py state --ranks [1,8,64] --dimension 256
    python eval/bench/objectives.py items --workers "[0,1,2,8]" --size 224

An objective is timed alone, forward and backward, on random embeddings, those of items outside the
batch included: they cost next to nothing here. On one thread the clock is CPU time, which other
processes on the machine disturb little; the least time of several is taken.

encoders: ratio = (model + objective) / (model + InfoNCE). The step of the model is that of 2B
items, forward and backward chunk by chunk, and one update; for objectives that ask for items
outside the batch it includes noting BatchNorm's statistics, as training does. "with encodes" adds
the model's time for those items, normalized by the batch's statistics (with gradient in full,
without gradient a third). "operations" counts the objective's kernels and views, forward and
backward: what launching costs on a GPU. ResNet-18 trains on two views, MiniLM on pairs of texts.

corpora: every item has been seen, caches are full. Memory is what the process has grown by since
before the objective was built (what an earlier one has left is used first: time one at a time).

state: what well-known corpora take on each rank: that of two small ones, extrapolated.

items: how long images outside the batch take to read, by the number of workers. Images are JPEG
files of noise, half as large again as the views, of which each request is a random sample; views
are SimCLR's. The network is a mean of pixels: what is timed is reading, preparing, and the way from
the workers.
"""

from __future__ import annotations

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

from dualenc.data import ImageFolderViews
from dualenc.encoders import BatchStatistics, ImageEncoder
from dualenc.encoders.batchnorm import trained_norms
from dualenc.encoders.dual import Tower
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import (
    DCL,
    EMC2,
    HCL,
    ISIR,
    SACLR,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SigLIP,
    SogCLR,
)
from dualenc.objectives.memory import EmbeddingMemory
from dualenc.training.encoding import PlainEncoding
from dualenc.training.extra_items import ItemEncoder
from dualenc.types import Inputs

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    **{each.__name__: each for each in (InfoNCE, DCL, HCL, SigLIP, SogCLR, ISogCLR)},
    "SACLR row": SACLR,
    "SACLR-1 matrix": partial(SACLR, form="matrix", negatives=1),
    "GlobalCache": GlobalCache,
    "GlobalCache pool=65536": partial(GlobalCache, pool=65_536),
    "NegativeCache ρ=0": partial(NegativeCache, refresh=0.0),
    "EMC2": EMC2,
    "ISIR": ISIR,
}
FILLED = ["NegativeCache ρ=0", "GlobalCache", "GlobalCache pool=65536"]
WRITTEN = 1 << 16
# Items of both sides.
CORPORA = {"MS MARCO": 9_300_000, "CC12M": 24_000_000, "LAION-400M": 800_000_000}
CORPORA["10⁹ pairs"] = 2 * 10**9


class ObjectiveStep:
    """A step of an objective alone, on random embeddings; counts the items that it asks for.

    Args:
        objective: the objective.
        dimension: D.
        num_items: N; above `WRITTEN`, items share embeddings.
        draw_ids: returns the left ids of a batch (B,), or left and right ids.
        device: where the embeddings are.
    """

    def __init__(
        self,
        objective: Objective,
        dimension: int,
        num_items: int,
        draw_ids: Callable[[], tuple[Tensor, ...]],
        device: str = "cpu",
    ) -> None:
        self.objective, self.draw_ids = objective, draw_ids
        self.vectors = normalize(torch.randn(min(WRITTEN, num_items), dimension)).to(device)
        self.shared = num_items > WRITTEN
        self.asked: Counter[bool] = Counter()

    def __call__(self) -> None:
        ids = self.draw_ids()
        batch = (self.embeddings(own).detach().requires_grad_() for own in (ids[0], ids[-1]))
        self.objective(*batch, *ids, encode=self.encode).loss.backward()

    def embeddings(self, ids: Tensor) -> Tensor:
        return self.vectors[ids % WRITTEN if self.shared else ids]

    def encode(self, side: str, ids: Tensor) -> Tensor:
        self.asked[torch.is_grad_enabled()] += len(ids)
        return self.embeddings(ids).requires_grad_()


class Operations(TorchDispatchMode):
    """Counts every operation, forward and backward, while it is on."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        self.count += 1
        return function(*args, **(kwargs or {}))


def least_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Return the least time of a call, after one to warm up: other work only adds to it."""
    clock = quietest_clock(0 if torch.cuda.is_initialized() else torch.get_num_threads())
    return min(in_turn({"run": run}, repeats, 1, clock)[0]["run"])


def chunk_seconds(encoder: nn.Module, items: Tensor, repeats: int) -> tuple[float, float, float]:
    """Return seconds of a chunk, forward and backward, by itself; with BatchNorm's statistics
    noted; and with another one out of the batch.
    """

    def run(keep: bool, out_of_batch: bool = False) -> None:
        noted = BatchStatistics(keep)
        with noted.recorded(encoder):
            loss = encoder(items).pow(2).mean()
        if out_of_batch:
            with noted.applied(encoder):
                loss = loss + encoder(items).pow(2).mean()
        noted.release()
        loss.backward()

    passes = (partial(run, False), partial(run, True), partial(run, True, True))
    plain, noting, both = (least_seconds(each, repeats) for each in passes)
    return plain, noting if trained_norms(encoder) else plain, both


def encoders(
    encoder: Literal["resnet18", "minilm"] = "minilm",
    batch_sizes: list[int] = [32, 256, 1024],  # noqa: B006 - a default for the command line, never changed
    num_items: int = 20_000,
    size: int | None = None,
    chunk_size: int = 64,
    repeats: int = 15,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> list[dict[str, Any]]:
    """Print a row per batch size and objective.

    Args:
        encoder: the model whose step is the yardstick.
        batch_sizes: pairs per step, B.
        num_items: N, size of the corpus.
        size: pixels of an image's side (96 by default), or tokens of a text (64).
        chunk_size: items encoded at once (on a large GPU choose 2B, the whole batch).
        repeats: timed steps per objective.
        device: cpu or cuda.
    """
    views = encoder == "resnet18"
    backbone, dimension = new_backbone(encoder)
    backbone.to(device)
    draw = torch.Generator().manual_seed(0)
    rows = []
    for batch_size in batch_sizes:
        chunk = min(chunk_size, 2 * batch_size)
        images = torch.randn(chunk, 3, size or 96, size or 96, device=device)
        tokens = torch.randint(30000, (chunk, size or 64), device=device)
        plain, noting, both = chunk_seconds(backbone, images if views else tokens, repeats)
        optimizer = torch.optim.AdamW(backbone.parameters(), lr=1e-5)
        update, chunks = least_seconds(optimizer.step, repeats), 2 * batch_size / chunk
        # Few anchors, so that each comes back after some steps and finds its state, mostly outside
        # the batch.
        visited = torch.randperm(num_items, generator=draw)[: 4 * batch_size]

        def draw_ids(visited: Tensor = visited, batch_size: int = batch_size) -> tuple[Tensor]:
            return (visited[torch.randperm(len(visited), generator=draw)[:batch_size]].to(device),)

        for name, build in OBJECTIVES.items():
            objective = build(num_left=num_items, views=views).to(device)
            step = ObjectiveStep(objective, dimension, num_items, draw_ids, device)
            for _ in range(8):
                step()
            with Operations() as operations:
                step()
            step.asked.clear()
            own = least_seconds(step, repeats)
            graphs, no_graphs = (step.asked[kind] / (repeats + 1) for kind in (True, False))
            model = (noting if objective.needs_encode else plain) * chunks + update
            encodes = (both - noting) / chunk * (graphs + no_graphs / 3)
            reference = model + own if name == "InfoNCE" else reference
            cells = {"B": batch_size, "objective": name, "operations": operations.count}
            cells |= {"model, ms": model * 1000, "objective, ms": own * 1000}
            cells |= {"ratio": (model + own) / reference, "encodes": graphs + no_graphs}
            rows.append(cells | {"with encodes": (model + own + encodes) / reference})
    print_table(Table(f"{encoder} on {device}, N = {num_items:,}", rows))
    return rows


def fill(objective: Objective, dimension: int) -> None:
    """Write an embedding of every item to the memories of an objective."""
    for memory in {each for each in objective.modules() if isinstance(each, EmbeddingMemory)}:
        for items in torch.arange(memory.num_items).split(WRITTEN):
            embeddings = normalize(torch.randn(len(items), dimension))
            memory.write(items * memory.keys_per_item, embeddings)


def corpora(
    sizes: list[int] = [10_000, 100_000, 1_000_000],  # noqa: B006
    batch_size: int = 32,
    dimension: int = 64,
    num_left: int | None = None,
    objectives: list[str] = ["SogCLR", "EMC2", "ISIR", *FILLED],  # noqa: B006
    repeats: int = 5,
) -> None:
    """Print a row per objective and size of the corpus.

    Args:
        sizes: N.
        batch_size: B.
        dimension: D.
        num_left: items on the left, such as queries; by default N.
        objectives: those to time, after InfoNCE.
        repeats: timed steps.
    """
    rows = []
    for num_items in sizes:
        for name in ["InfoNCE", *objectives]:
            before = Process().memory_info().rss
            counts = num_left or num_items, num_items
            objective = OBJECTIVES[name](num_left=counts[0], num_right=counts[1], temperature=0.05)
            fill(objective, dimension)

            def draw_ids(counts: tuple[int, int] = counts) -> tuple[Tensor, Tensor]:
                left, right = (torch.randint(count, (batch_size,)) for count in counts)
                return left, right

            step = ObjectiveStep(objective, dimension, num_items, draw_ids)
            own = least_seconds(step, repeats)
            reference = own if name == "InfoNCE" else reference
            cells = {"N": num_items, "objective": name, "ms": 1000 * own}
            cells |= {"over InfoNCE": own / reference, "state, MB": state_bytes(objective) / 1e6}
            rows.append(cells | {"memory, MB": (Process().memory_info().rss - before) / 1e6})
            del objective
    threads = torch.get_num_threads()
    print_table(Table(f"B = {batch_size}, D = {dimension}, {threads} threads", rows))


def state_bytes(module: nn.Module) -> int:
    """Return the bytes of all buffers."""
    return sum(buffer.nbytes for buffer in module.buffers())


def bytes_per_item(name: str, dimension: int) -> tuple[int, float, float]:
    """Return state that does not grow, and that of an item: on every rank, and divided by ranks."""
    small, large = 1 << 14, 1 << 15
    found = []
    for num_items in (small, large):
        objective = OBJECTIVES[name](num_left=num_items)
        draw_ids = partial(torch.randint, num_items, (1, 8))
        ObjectiveStep(objective, dimension, num_items, draw_ids)()
        banks = [each for each in objective.modules() if isinstance(each, EmbeddingMemory)]
        divided = sum(map(state_bytes, banks))
        found.append((state_bytes(objective) - divided, divided))
    # Beyond some 16,000 items all that grows is in proportion to their number, 2N.
    whole, divided = ((b - a) / (2 * (large - small)) for a, b in zip(*found, strict=True))
    return found[0][0] - 2 * small * whole, whole, divided


def state(ranks: list[int], dimension: int = 64) -> None:
    """Print bytes per item, and GB per rank, of each objective for well-known corpora.

    Args:
        ranks: numbers of ranks.
        dimension: D.
    """
    rows = []
    for name in OBJECTIVES:
        fixed, whole, divided = bytes_per_item(name, dimension)
        for corpus, items in CORPORA.items():
            cells = {"corpus": corpus, "objective": name, "bytes per item": whole + divided}
            for number in ranks:
                cells[f"GB, {number} ranks"] = (fixed + items * (whole + divided / number)) / 1e9
            rows.append(cells)
    print_table(Table(f"State per rank, D = {dimension}", rows))


class MeanColor(Tower):
    """Unit vectors (B, 3) of images."""

    modality = "image"

    def forward(self, inputs: Inputs) -> Tensor:
        return normalize(inputs["image"].mean(dim=(2, 3)), dim=1)


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
        size: pixels of a view's side.
        count: items of a request.
        images: images of the data.
        repeats: requests that are timed.
    """
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        noise_images(Path(folder), images, size=size * 3 // 2, suffix=".jpg")
        model, tower = ImageEncoder("resnet18", image_size=size), MeanColor()
        tower.prepare = model.left.prepare
        model.left = model.right = tower
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
    rows = encoders("resnet18", [4], num_items=50, size=32, repeats=1, device="cpu")
    assert rows[0]["ratio"] == 1
    corpora([1000], objectives=FILLED, repeats=1)
    for name, expected in {"SogCLR": 4, "EMC2": 12, "ISIR": 8}.items():
        assert sum(bytes_per_item(name, 8)[1:]) == expected
    items([0], size=32, count=4, images=8, repeats=1)


if __name__ == "__main__":
    command_line(encoders, corpora, state, items, check=check)
