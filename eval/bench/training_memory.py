"""The memory that a training step allocates, by objective and batch: the peak of what torch holds, on a CPU.

    python eval/bench/training_memory.py MODEL PATH_TO_BEIR --rows "[InfoNCE 8,MomentumQueue 8,InfoNCE 128 by 8]"

MODEL is a text encoder, fine-tuned in bf16 on beginnings of texts. A row is an objective of `small_batch.py`, a batch
size, and behind "by" the number of items whose gradients are cached at a time. Counted are tensors that exist beside
the weights: gradients, the state of the optimizer and of the objective, a momentum encoder, activations.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from jsonargparse import auto_cli

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison_tasks import beginnings, some_of
from small_batch import OBJECTIVES
from torch.profiler import ProfilerActivity, profile

from dualenc.encoders import TextEncoder
from dualenc.evaluation.report import Table, print_table
from dualenc.training import Trainer

STEPS = 3
ROWS = ("InfoNCE 4", "InfoNCE 8", "InfoNCE 16", "InfoNCE 32", "InfoNCE 128", "InfoNCE 128 by 8")
ROWS += ("SogCLR+ 8", "GlobalCache+ 8", "MomentumQueue 8", "ISIR 8")


def peak_bytes(model: str, folder: Path, row: str, pairs: int, tokens: int) -> int:
    """The most bytes that a short training holds beside the weights."""
    name, batch_size, *chunk = row.replace(" by ", " ").rsplit(maxsplit=2 if " by " in row else 1)
    data, _, _ = beginnings(folder, words=tokens)
    data = some_of(data, pairs)
    encoder = TextEncoder(model, max_length=tokens)
    objective = OBJECTIVES[name](temperature=0.05, num_left=data.num_left, num_right=data.num_right)
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            output=output,
            batch_size=int(batch_size),
            chunk_size=int(chunk[0]) if chunk else None,
            max_steps=STEPS,
            mixed_precision="bf16",
            save_every=None,
            progress=False,
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            trainer.fit(encoder, data, objective)
    held, most = 0, 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def main(model: str, folder: Path, rows: Sequence[str] = ROWS, pairs: int = 1536, tokens: int = 32) -> None:
    """Print the memory of each row.

    Args:
        model: folder or hub name of a text encoder.
        folder: BEIR folder.
        rows: see above.
        pairs: of the data, for the tables of objectives.
        tokens: longest text.
    """
    torch.set_num_threads(1)
    table = [{"row": row, "MiB": round(peak_bytes(model, folder, row, pairs, tokens) / 2**20)} for row in rows]
    print_table(Table(f"Memory beside the weights, texts of {tokens} tokens", table))


if __name__ == "__main__":
    auto_cli(main)
