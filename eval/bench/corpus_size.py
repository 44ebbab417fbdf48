"""How the time of an objective grows with the corpus: a step on embeddings, forward and backward, over InfoNCE's.

    python eval/bench/corpus_size.py --sizes [10000,100000,1000000,10000000]
    python eval/bench/corpus_size.py --sizes [10000000] --num_left 100000 --dimension 256

Every item has been seen: caches are full. Items outside the batch come from a table and cost nothing here. State is
what the objective's buffers take, memory what the process has grown by since before it was built (what an earlier
objective has left is used first: time one at a time to see it all).

    python eval/bench/corpus_size.py --state true --dimension 256

prints what the state of larger corpora takes: that of two small ones after a step, extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from common import in_turn, quietest_clock
from jsonargparse import auto_cli
from psutil import Process
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.evaluation.report import Table, print_table
from dualenc.objectives import EMC2, ISIR, SACLR, GlobalCache, InfoNCE, ISogCLR, NegativeCache, Objective, SogCLR
from dualenc.objectives.memory import EmbeddingMemory

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "SogCLR": SogCLR,
    "EMC2": EMC2,
    "ISIR": ISIR,
    "NegativeCache": lambda **common: NegativeCache(refresh=0.0, **common),
    "GlobalCache": GlobalCache,
    "GlobalCache, pool=None": lambda **common: GlobalCache(pool=None, **common),
}
WRITTEN = 1 << 16
# Items of both sides.
CORPORA = {
    "MS MARCO": 500_000 + 8_800_000,
    "CC12M": 2 * 12_000_000,
    "LAION-400M": 2 * 400_000_000,
    "10⁹ pairs": 2 * 10**9,
}


def stepper(criterion: Objective, batch_size: int, dimension: int) -> Callable[[], None]:
    """A step of an objective that has seen all of its items."""
    draw = torch.Generator().manual_seed(0)
    for memory in {module for module in criterion.modules() if isinstance(module, EmbeddingMemory)}:
        for items in torch.arange(memory.num_items).split(WRITTEN):
            embeddings = normalize(torch.randn(len(items), dimension, generator=draw), dim=1)
            memory.write(items * memory.keys_per_item, embeddings)

    def encode(side: str, ids: Tensor) -> Tensor:
        return normalize(torch.randn(len(ids), dimension, generator=draw), dim=1).requires_grad_()

    def step() -> None:
        sizes = criterion.num_left or 1, criterion.num_right or 1
        left_id, right_id = (torch.randint(size, (batch_size,), generator=draw) for size in sizes)
        left, right = encode("", left_id), encode("", right_id)
        criterion(left, right, left_id, right_id, encode=encode).loss.backward()

    return step


def state_bytes(build: Callable[..., Objective], num_items: int, dimension: int) -> int:
    """Bytes of state of N items on each side."""
    criterion = build(num_left=num_items)
    stepper(criterion, 8, dimension)()
    return sum(buffer.nbytes for buffer in criterion.buffers())


def print_state(dimension: int) -> None:
    """A line per corpus and objective: bytes per item, and GB."""
    rows: list[dict[str, object]] = []
    small, large = 1 << 14, 1 << 15
    for name, build in {**OBJECTIVES, "ISogCLR": ISogCLR, "SACLR": SACLR}.items():
        least = state_bytes(build, small, dimension)
        # Beyond some 16,000 items all that grows is in proportion to their number, 2N.
        per_item = (state_bytes(build, large, dimension) - least) / (2 * (large - small))
        fixed = least - 2 * small * per_item
        for corpus, items in CORPORA.items():
            row: dict[str, object] = {"corpus": corpus, "objective": name, "bytes per item": per_item}
            row["GB"] = (fixed + items * per_item) / 1e9
            rows.append(row)
    print_table(Table(f"State, D = {dimension}", rows))


def main(
    sizes: list[int] = [10_000, 100_000, 1_000_000],  # noqa: B006 - a default for the command line, never changed
    batch_size: int = 32,
    dimension: int = 64,
    num_left: int | None = None,
    objectives: list[str] | None = None,
    repeats: int = 5,
    state: bool = False,
) -> None:
    """Print a line per objective and size of the corpus.

    Args:
        sizes: N.
        batch_size: B.
        dimension: D.
        num_left: items on the left, such as queries; by default N.
        objectives: those to time, after InfoNCE; by default all.
        repeats: timed steps.
        state: print the state of well-known corpora instead.
    """
    if state:
        print_state(dimension)
        return
    if unknown := set(objectives or []) - set(OBJECTIVES):
        raise SystemExit(f"objectives: no {min(unknown)!r}; there are {', '.join(OBJECTIVES)}")
    chosen = OBJECTIVES if objectives is None else {name: OBJECTIVES[name] for name in ["InfoNCE", *objectives]}
    rows: list[dict[str, object]] = []
    for num_items in sizes:
        reference = 0.0
        for name, build in chosen.items():
            before = Process().memory_info().rss
            criterion = build(num_left=num_left or num_items, num_right=num_items, temperature=0.05)
            step = stepper(criterion, batch_size, dimension)
            times, _ = in_turn({name: step}, repeats, 1, quietest_clock(torch.get_num_threads()))
            milliseconds = 1000 * min(times[name])
            reference = reference or milliseconds
            row: dict[str, object] = {"N": num_items, "objective": name, "ms": milliseconds}
            row["over InfoNCE"] = milliseconds / reference
            row["state, MB"] = sum(buffer.nbytes for buffer in criterion.buffers()) / 1e6
            row["memory, MB"] = (Process().memory_info().rss - before) / 1e6
            rows.append(row)
            del criterion, step
    print_table(Table(f"B = {batch_size}, D = {dimension}, {torch.get_num_threads()} threads", rows))


if __name__ == "__main__":
    auto_cli(main)
