"""How the time of an objective grows with the corpus: a step on embeddings, forward and backward, over InfoNCE's.

    python eval/bench/corpus_size.py --sizes [10000,100000,1000000,10000000]

Every item has been seen: caches are full. Items outside the batch come from a table and cost nothing here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import in_turn, quietest_clock
from jsonargparse import auto_cli
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.evaluation.report import Table, print_table
from dualenc.objectives import ISIR, GlobalCache, InfoNCE, NegativeCache, Objective, SogCLR
from dualenc.objectives.feature_cache import FeatureCache

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "SogCLR": SogCLR,
    "ISIR": ISIR,
    "NegativeCache": lambda **common: NegativeCache(refresh=0.0, **common),
    "GlobalCache": GlobalCache,
    "GlobalCache, pool=None": lambda **common: GlobalCache(pool=None, **common),
}
WRITTEN = 1 << 16


def stepper(criterion: Objective, num_items: int, batch_size: int, dimension: int) -> Callable[[], None]:
    """A step of an objective that has seen all of N items."""
    draw = torch.Generator().manual_seed(0)
    for cache in {module for module in criterion.modules() if isinstance(module, FeatureCache)}:
        for items in torch.arange(num_items).split(WRITTEN):
            cache.write(items, normalize(torch.randn(len(items), dimension, generator=draw), dim=1))

    def encode(side: str, ids: Tensor) -> Tensor:
        return normalize(torch.randn(len(ids), dimension, generator=draw), dim=1).requires_grad_()

    def step() -> None:
        ids = torch.randint(num_items, (batch_size,), generator=draw).unique()
        left, right = (encode("", ids) for _ in range(2))
        criterion(left, right, ids, encode=encode).loss.backward()

    return step


def main(
    sizes: list[int] = [10_000, 100_000, 1_000_000],  # noqa: B006 - a default for the command line, never changed
    batch_size: int = 32,
    dimension: int = 64,
    repeats: int = 5,
) -> None:
    """Print a line per objective and size of the corpus.

    Args:
        sizes: N.
        batch_size: B.
        dimension: D.
        repeats: timed steps.
    """
    rows: list[dict[str, object]] = []
    for num_items in sizes:
        reference = 0.0
        for name, build in OBJECTIVES.items():
            step = stepper(build(num_left=num_items, temperature=0.05), num_items, batch_size, dimension)
            times, _ = in_turn({name: step}, repeats, 1, quietest_clock(torch.get_num_threads()))
            milliseconds = 1000 * min(times[name])
            reference = reference or milliseconds
            rows.append(
                {"N": num_items, "objective": name, "ms": milliseconds, "over InfoNCE": milliseconds / reference}
            )
    print_table(Table(f"B = {batch_size}, D = {dimension}, {torch.get_num_threads()} threads", rows))


if __name__ == "__main__":
    auto_cli(main)
