"""What memory does a training step take: by batch with gradient caching, and in fine-tuning?

    python eval/bench/memory.py batches --encoder linear
    python eval/bench/memory.py batches --encoder resnet18 --objectives [InfoNCE,EMC2]
    python eval/bench/memory.py fine_tuning MODEL BEIR --rows '["InfoNCE 8","SogCLR+ 8"]'
    python eval/bench/memory.py fine_tuning MODEL BEIR --lora_rank 16
    python eval/bench/memory.py report

batches: the peak as the batch grows, over that of the smallest. Every measurement is a process: its
peak resident memory, Python and torch included. The inputs that a step keeps, out-of-batch ones
included, are in the peak, as they are in training; the last column leaves them out. MiniLM and
ResNet-18 (on two views, its BatchNorm frozen) have random weights and inputs. The linear encoder
holds next to nothing: what is left is the objective, the strictest comparison and a fast one.

fine_tuning: the peak of what torch holds beside the weights, on a CPU. MODEL is a text encoder,
trained in bf16 on beginnings of texts. A row is an objective of `rows.py` and a batch size.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from in_turn import in_new_process, memory_of_process, new_backbone
from objectives import OBJECTIVES
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from frame import RESULTS, Outcome, Settings, Store, command_line, train
from rows import TRAINER, objective_of
from tasks import beginnings, some_of

from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder
from dualenc.encoders.batchnorm import trained_norms
from dualenc.encoders.dual import DualEncoder, Tower, unit_norm
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import ExactGlobal, NegativeCache
from dualenc.training.encoding import CachedEncoding
from dualenc.types import Inputs

MIB = 2**20
CACHED = {**OBJECTIVES, "NegativeCache": NegativeCache}
CACHED["ExactGlobal"] = partial(ExactGlobal, corpus_chunk_size=64)
CHUNK = 32
"""Items whose activations gradient caching holds at once."""
FINE_TUNED = [f"InfoNCE {size}" for size in (4, 8, 16, 32, 128)] + ["InfoNCE, cached by 8 128"]
FINE_TUNED += ["SogCLR+ 8", "GlobalCache+ 8", "MomentumQueue 8", "ISIR 8"]
STORES = [RESULTS / f"fine_tuning_memory{kind}.jsonl" for kind in ("", "_512", "_adapters")]
STEPS = 5
"""Steps of fine-tuning. The profile ends in the last: after it the trainer saves, in memory."""


class Net(Tower):
    """Unit vectors of a backbone with random weights: "minilm", "resnet18" or "linear"."""

    def __init__(self, encoder: str, size: int) -> None:
        super().__init__()
        linear = encoder == "linear"
        self.net, self.dim = (nn.Linear(size, 384), 384) if linear else new_backbone(encoder)
        for norm in trained_norms(self.net):
            norm.requires_grad_(False)

    def forward(self, inputs: Inputs) -> Tensor:
        return unit_norm(self.net(*inputs.values()))


def random_inputs(encoder: str, count: int, size: int) -> Inputs:
    """Return random items, prepared: `size` tokens, pixels, or numbers."""
    if encoder == "resnet18":
        return {"pixels": torch.rand(count, 3, size, size)}
    if encoder == "linear":
        return {"numbers": torch.randn(count, size)}
    tokens = torch.randint(0, 30000, (count, size))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def num_bytes(inputs: Inputs) -> int:
    """Return the size of prepared items."""
    return sum(tensor.nbytes for tensor in inputs.values())


def peak_of_batch(
    encoder: str, size: int, name: str, batch_size: int, num_items: int
) -> tuple[float, float]:
    """Train two steps; return peak memory and the size of a batch's inputs, in MiB."""
    torch.manual_seed(0)
    tower, views = Net(encoder, size), encoder == "resnet18"
    model = DualEncoder(tower, tower, kind="image" if views else "query-document").train()
    objective = CACHED[name](num_left=num_items, views=views)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    # Chains have a state from the second step on.
    for _ in range(2):
        encoding = CachedEncoding(model, torch.device("cpu"), chunk_size=CHUNK)
        inputs = [random_inputs(encoder, batch_size, size) for _ in range(2)]
        kept = list(map(num_bytes, inputs))

        def encode(side: Any, ids: Tensor, encoding: CachedEncoding = encoding) -> Tensor:
            outside = random_inputs(encoder, len(ids), size)
            if torch.is_grad_enabled():  # then they are kept for the backward pass
                kept.append(num_bytes(outside))  # noqa: B023 - called within this iteration
            return encoding.encode(side, outside, out_of_batch=True)

        ids = torch.randperm(num_items)[:batch_size]
        left, right = encoding.encode("left", inputs[0]), encoding.encode("right", inputs[1])
        encoding.backward(objective(left, right, ids, encode=encode).loss)
        optimizer.step()
        optimizer.zero_grad()
    # Of this process alone; what getrusage returns, a process may inherit from its parent.
    return memory_of_process("VmHWM"), sum(kept) / MIB


def batches(
    encoder: Literal["minilm", "resnet18", "linear"] = "minilm",
    batch_sizes: list[int] = [32, 4096],  # noqa: B006 - a default for the command line, never changed
    objectives: list[str] = list(CACHED),  # noqa: B006
    size: int | None = None,
) -> None:
    """Print a table of objectives and batch sizes; a corpus is twice the largest batch.

    Args:
        batch_sizes: pairs per step; ratios are to the first.
        size: tokens of a text (128 by default), or pixels of an image's side (64).
    """
    # glibc returns what is freed at once, and keeps none of it for later.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    size, table = size or {"minilm": 128}.get(encoder, 64), []
    for name in objectives:
        found = []
        for batch_size in batch_sizes:
            work = (encoder, size, name, batch_size, 2 * max(batch_sizes))
            peak, inputs = in_new_process(peak_of_batch, *work)
            found.append((peak, peak - inputs))
            row = {"objective": name, "B": batch_size, "peak, MiB": peak, "inputs, MiB": inputs}
            ratios = [own / first for own, first in zip(found[-1], found[0], strict=True)]
            table.append({**row, "ratio": ratios[0], "ratio without": ratios[1]})
    print_table(Table(f"{encoder}, size {size}, chunks of {CHUNK}", table))


def peak_of_training(model: str, data: PairDataset, settings: Settings) -> Outcome:
    """Return what a short training holds beside the weights, before it saves."""
    # The trainer leaves cycles, which would hold the last model.
    gc.collect()
    name, rank = settings["objective"], settings["lora_rank"]
    adapters = {"dtype": "bfloat16", "gradient_checkpointing": True} if rank else {}
    encoder = TextEncoder(model, max_length=settings["tokens"], lora_rank=rank, **adapters)
    weights = sum(one.nbytes for one in encoder.parameters())
    sizes = {"num_left": data.num_left, "num_right": data.num_right}
    objective = objective_of(name)(temperature=0.05, **sizes)
    trainer = {"batch_size": settings["batch_size"], "mixed_precision": "bf16"}
    trainer |= {"deterministic": True, **TRAINER.get(name, {})}
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    losses = itertools.count(1)
    objective.register_forward_pre_hook(
        lambda *_: profiler.stop() if next(losses) == STEPS else None
    )
    profiler.start()
    train(encoder, data, objective, max_steps=STEPS, **trainer)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    changes = [each.nbytes() for each in events if each.name() == "[memory]"]
    peak = max(itertools.accumulate(changes))
    return {"weights, MiB": round(weights / MIB), "MiB": round(peak / MIB)}


def fine_tuning(
    model: str,
    folder: Path,
    rows: list[str] = FINE_TUNED,
    pairs: int = 1536,
    tokens: int = 32,
    lora_rank: int = 0,
    out: Path = Path(os.devnull),
) -> None:
    """Print the memory of each row.

    Args:
        pairs: pairs of the data, for the tables of objectives.
        lora_rank: adapters over bf16 weights, with gradient checkpointing, in place of all weights.
    """
    data = some_of(beginnings(folder, words=tokens)[0], pairs)
    if lora_rank:
        sides = (as_long(texts, tokens) for texts in (data.left_items, data.right_items))
        data = PairDataset(*sides, data.left_id, data.right_id)
    shared = {"model": Path(model).name, "tokens": tokens, "lora_rank": lora_rank}
    split = [row.rpartition(" ") for row in rows]
    wanted = [{"objective": name, "batch_size": int(size), **shared} for name, _, size in split]
    outcomes = Store(out).get(wanted, partial(peak_of_training, model, data))
    table = [settings | outcome for settings, outcome in zip(wanted, outcomes, strict=True)]
    print_table(Table("Beside the weights", table))


def as_long(texts: Sequence[str], words: int) -> list[str]:
    """Return each text repeated until it has this many words: adapters are for long ones."""
    parts = [text.split() or ["none"] for text in texts]
    return [" ".join((own * (1 + words // len(own)))[:words]) for own in parts]


def report(results: list[Path] = STORES) -> None:
    """Print the tables of stores of fine-tuning."""
    for file in results:
        table = [each.settings | each.outcome for each in Store(file).runs]
        print_table(Table(f"{file.stem}: beside the weights", table))


def check(folder: Path) -> None:
    """AdamW holds two numbers for each weight, beside its gradient."""
    model = str(toys.text_model(folder / "model", hidden_size=512))
    fine_tuning(model, toys.beir(folder / "beir"), ["InfoNCE 2"], out=folder / "runs.jsonl")
    [run] = Store(folder / "runs.jsonl").runs
    assert 2 <= run.outcome["MiB"] / run.outcome["weights, MiB"] < 4
    batches("linear", [2], ["InfoNCE"])


if __name__ == "__main__":
    command_line(batches, fine_tuning, report, check=check)
