"""How the time of an objective grows with the corpus: a step on embeddings, forward and backward,
over InfoNCE's.

    python eval/bench/corpus_size.py --sizes [10000,100000,1000000,10000000]
    python eval/bench/corpus_size.py --sizes [10000000] --num_left 100000 --dimension 256

Every item has been seen: caches are full. Items outside the batch come from a table and cost
nothing here. State is what the objective's buffers take, memory what the process has grown by since
before it was built (what an earlier objective has left is used first: time one at a time to see it
all).

    python eval/bench/corpus_size.py --ranks [1,8,64] --dimension 256

prints what the state of larger corpora takes on each rank: that of two small ones after a step,
extrapolated.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from in_turn import in_turn, quietest_clock
from jsonargparse import auto_cli
from psutil import Process
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import (
    EMC2,
    ISIR,
    SACLR,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SogCLR,
)
from dualenc.objectives.memory import EmbeddingMemory

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": InfoNCE,
    "SogCLR": SogCLR,
    "EMC2": EMC2,
    "ISIR": ISIR,
    "NegativeCache": lambda **common: NegativeCache(refresh=0.0, **common),
    "GlobalCache": GlobalCache,
    "GlobalCache, pool=65536": lambda **common: GlobalCache(pool=65_536, **common),
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


def state_bytes(build: Callable[..., Objective], num_items: int, dimension: int) -> tuple[int, int]:
    """Bytes of state of N items on each side that every rank holds whole, and that ranks divide
    among them."""
    criterion = build(num_left=num_items)
    stepper(criterion, 8, dimension)()
    divided = sum(
        b.nbytes for m in criterion.modules() if isinstance(m, EmbeddingMemory) for b in m.buffers()
    )
    return sum(b.nbytes for b in criterion.buffers()) - divided, divided


def print_state(ranks: list[int], dimension: int) -> None:
    """A line per corpus and objective: bytes per item, and GB per rank."""
    rows: list[dict[str, object]] = []
    small, large = 1 << 14, 1 << 15
    for name, build in {**OBJECTIVES, "ISogCLR": ISogCLR, "SACLR": SACLR}.items():
        (whole, divided), (more_whole, more_divided) = (
            state_bytes(build, n, dimension) for n in (small, large)
        )
        # Beyond some 16,000 items all that grows is in proportion to their number, 2N.
        per_item, per_divided = (
            more / (2 * (large - small)) for more in (more_whole - whole, more_divided - divided)
        )
        fixed = whole - 2 * small * per_item
        for corpus, items in CORPORA.items():
            row: dict[str, object] = {
                "corpus": corpus,
                "objective": name,
                "bytes per item": per_item + per_divided,
            }
            for number in ranks:
                row[f"GB, {number} ranks"] = (
                    fixed + items * (per_item + per_divided / number)
                ) / 1e9
            rows.append(row)
    print_table(Table(f"State per rank, D = {dimension}", rows))


def main(
    sizes: list[int] = [10_000, 100_000, 1_000_000],  # noqa: B006 - a default for the command line, never changed
    batch_size: int = 32,
    dimension: int = 64,
    num_left: int | None = None,
    objectives: list[str] | None = None,
    repeats: int = 5,
    ranks: list[int] | None = None,
) -> None:
    """Print a line per objective and size of the corpus.

    Args:
        sizes: N.
        batch_size: B.
        dimension: D.
        num_left: items on the left, such as queries; by default N.
        objectives: those to time, after InfoNCE; by default all.
        repeats: timed steps.
        ranks: print the state per rank of well-known corpora instead, on so many ranks.
    """
    if ranks is not None:
        print_state(ranks, dimension)
        return
    if unknown := set(objectives or []) - set(OBJECTIVES):
        raise SystemExit(f"objectives: no {min(unknown)!r}; there are {', '.join(OBJECTIVES)}")
    chosen = (
        OBJECTIVES
        if objectives is None
        else {name: OBJECTIVES[name] for name in ["InfoNCE", *objectives]}
    )
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
    print_table(
        Table(f"B = {batch_size}, D = {dimension}, {torch.get_num_threads()} threads", rows)
    )


if __name__ == "__main__":
    auto_cli(main)
