"""What an objective adds to a training step: the time of a step with it, over the time of the step
with InfoNCE.

    python eval/bench/objectives.py --encoder minilm --batch_sizes [32,256,1024]
    python eval/bench/objectives.py --encoder resnet18 --batch_sizes [32,256,1024] --device cuda

The step of the model is that of 2B items, forward and backward chunk by chunk, and one update; for
objectives that ask for out-of-batch items it includes noting BatchNorm's statistics, as training
does. The objective is timed alone, forward and backward, on embeddings of such a batch. ratio =
(model + objective) / (model + InfoNCE). Out-of-batch items come from a table here, so the ratio is
without them; their number is shown, and "with encodes" adds the model's time for them, normalised
by the batch's statistics (with gradient in full, without gradient a third). "operations" counts the
objective's kernels and views, forward and backward: what launching costs on a GPU. ResNet-18 trains
on two views of images, MiniLM on pairs of texts. On a single CPU thread the clock is CPU time,
which other processes on the machine disturb little.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from in_turn import in_turn, new_backbone, quietest_clock
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dualenc.encoders import BatchStatistics
from dualenc.encoders.batchnorm import trained_norms
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

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "DCL": DCL,
    "HCL": HCL,
    "SigLIP": SigLIP,
    "SogCLR": SogCLR,
    "ISogCLR": ISogCLR,
    "SACLR row": SACLR,
    "SACLR-1 matrix": lambda **common: SACLR(form="matrix", negatives=1, **common),
    "GlobalCache": GlobalCache,
    "GlobalCache pool=65536": lambda **common: GlobalCache(pool=65_536, **common),
    "NegativeCache ρ=0": lambda **common: NegativeCache(refresh=0.0, **common),
    "EMC2": EMC2,
    "ISIR": ISIR,
}


class Model:
    """An encoder, and random items for it: images of `size` pixels, texts of `size` tokens."""

    def __init__(
        self, name: Literal["resnet18", "minilm"], size: int, device: torch.device
    ) -> None:
        self.views, self.device = name == "resnet18", device
        encoder, self.dimension = new_backbone(name)
        self.encoder, self.size = encoder.to(device), size
        self.chunk_seconds: dict[int, tuple[float, float, float]] = {}

    def items(self, count: int) -> Tensor:
        if self.views:
            return torch.randn(count, 3, self.size, self.size, device=self.device)
        return torch.randint(0, 30000, (count, self.size), device=self.device)

    def step_times(
        self, batch_size: int, chunk_size: int, repeats: int
    ) -> tuple[float, float, float]:
        """Seconds of a step for 2B items, of one that notes BatchNorm's statistics, of one more
        out-of-batch item.

        A step is as many chunks as it takes, and an update.
        """
        size = min(chunk_size, 2 * batch_size)
        items = self.items(size)

        def run(keep: bool, out_of_batch: bool = False) -> None:
            noted = BatchStatistics(keep)
            with noted.recorded(self.encoder):
                loss = self.encoder(items).pow(2).mean()
            if out_of_batch:
                with noted.applied(self.encoder):
                    loss = loss + self.encoder(items).pow(2).mean()
            noted.release()
            loss.backward()

        if size not in self.chunk_seconds:
            passes = [partial(run, keep=False), partial(run, keep=True)]
            # Without BatchNorm both are the same.
            measured = least_seconds(
                passes if trained_norms(self.encoder) else passes[:1], repeats, self.device
            )
            # By itself: it leaves more memory to its successor, which would run up to 0.05 faster
            # for it.
            (both,) = least_seconds(
                [partial(run, keep=True, out_of_batch=True)], repeats, self.device
            )
            self.chunk_seconds[size] = measured[0], measured[-1], both
        plain, noting, both = self.chunk_seconds[size]
        optimizer = torch.optim.AdamW(self.encoder.parameters(), lr=1e-5)
        (update,), chunks = (
            least_seconds([optimizer.step], repeats, self.device),
            2 * batch_size / size,
        )
        return plain * chunks + update, noting * chunks + update, (both - noting) / size


def least_seconds(
    runs: Sequence[Callable[[], Any]], repeats: int, device: torch.device
) -> list[float]:
    """Least time of each call, after one to warm up: whatever else the machine does only adds to
    it."""

    def finished(run: Callable[[], Any]) -> None:
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    clock = quietest_clock(torch.get_num_threads() if device.type == "cpu" else 0)
    times, _ = in_turn(
        {number: partial(finished, run) for number, run in enumerate(runs)}, repeats, 1, clock
    )
    return [min(times[number]) for number in range(len(runs))]


class Operations(TorchDispatchMode):
    """Counts every operation, forward and backward, while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


@dataclass
class FrozenItems:
    """An embedding for every item of the corpus: what `encode` gives, at no cost; counts what was
    asked for."""

    vectors: Tensor
    with_gradient: int = 0
    without_gradient: int = 0

    def encode(self, side: str, ids: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.with_gradient += len(ids)
        else:
            self.without_gradient += len(ids)
        return self.vectors[ids].requires_grad_()


def time_objective(
    criterion: Objective, model: Model, batch_size: int, num_items: int, repeats: int
) -> tuple[float, int, float, float]:
    """Seconds and operations per step of the objective alone; items encoded per step with and
    without gradient."""
    draw = torch.Generator().manual_seed(0)
    vectors = nn.functional.normalize(
        torch.randn(num_items, model.dimension, generator=draw), dim=1
    )
    items = FrozenItems(vectors.to(model.device))
    # Few anchors, so that each comes back after some steps and finds its state, mostly outside the
    # batch.
    visited = torch.randperm(num_items, generator=draw)[: 4 * batch_size]

    def step() -> None:
        ids = visited[torch.randperm(len(visited), generator=draw)[:batch_size]].to(model.device)
        left, right = (items.vectors[ids].detach().requires_grad_() for _ in range(2))
        criterion(left, right, ids, encode=items.encode).loss.backward()

    for _ in range(8):
        step()
    with Operations() as operations:
        step()
    items.with_gradient = items.without_gradient = 0
    (seconds,) = least_seconds([step], repeats, model.device)
    return (
        seconds,
        operations.count,
        items.with_gradient / (repeats + 1),
        items.without_gradient / (repeats + 1),
    )


def compare(
    model: Model, batch_size: int, num_items: int, chunk_size: int, repeats: int
) -> list[dict[str, object]]:
    """One row per objective."""
    plain, noting, per_item = model.step_times(batch_size, chunk_size, repeats)
    rows: list[dict[str, object]] = []
    reference = 0.0
    for name, build in OBJECTIVES.items():
        criterion = build(num_left=num_items, views=model.views).to(model.device)
        own_seconds, operations, graphs, no_graphs = time_objective(
            criterion, model, batch_size, num_items, repeats
        )
        base = noting if criterion.needs_encode else plain
        reference = reference or base + own_seconds
        row: dict[str, object] = {"B": batch_size, "objective": name, "operations": operations}
        row |= {
            "model, ms": base * 1000,
            "objective, ms": own_seconds * 1000,
            "ratio": (base + own_seconds) / reference,
        }
        encodes = per_item * (graphs + no_graphs / 3)
        rows.append(
            row
            | {
                "encodes": graphs + no_graphs,
                "with encodes": (base + own_seconds + encodes) / reference,
            }
        )
    return rows


def main(
    encoder: Literal["resnet18", "minilm"] = "minilm",
    batch_sizes: list[int] = [32, 256, 1024],  # noqa: B006 - a default for the command line, never changed
    num_items: int = 20_000,
    image_size: int = 96,
    text_length: int = 64,
    chunk_size: int = 64,
    repeats: int = 15,
    device: str = "cuda" if torch.cuda.is_available() else "cpu",
) -> None:
    """Print one line per batch size and objective.

    Args:
        encoder: the model whose step is the yardstick.
        batch_sizes: pairs per step, B.
        num_items: N, size of the corpus.
        image_size: of ResNet-18's input, in pixels.
        text_length: of MiniLM's input, in tokens.
        chunk_size: items encoded at once (on a large GPU choose 2B, the whole batch).
        repeats: timed steps per objective.
        device: cpu or cuda.
    """
    where = torch.device(device)
    model = Model(encoder, image_size if encoder == "resnet18" else text_length, where)
    rows = [
        row for size in batch_sizes for row in compare(model, size, num_items, chunk_size, repeats)
    ]
    threads = (
        f"{torch.get_num_threads()} threads"
        if where.type == "cpu"
        else torch.cuda.get_device_name(where)
    )
    print_table(Table(f"{encoder} on {device} ({threads}), N = {num_items:,}", rows))


if __name__ == "__main__":
    auto_cli(main)
