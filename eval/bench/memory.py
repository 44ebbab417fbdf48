"""What memory does a step of fine-tuning take? The peak of what torch holds beside the weights.

    python eval/bench/memory.py fine_tuning MODEL BEIR
    python eval/bench/memory.py fine_tuning MODEL BEIR --lora_rank 16
    python eval/bench/memory.py report

On a CPU. MODEL is a text encoder, trained in bf16 on beginnings of texts. A row is an objective of
`rows.py` and a batch size.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from in_turn import NOWHERE, shown
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from frame import RESULTS, Outcome, Settings, Store, command_line, train
from rows import TRAINER, objective_of, sizes_of
from tasks import beginnings, some_of

from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder
from dualenc.evaluation.report_page import Table, print_table

MIB = 2**20
FINE_TUNED = [f"InfoNCE {size}" for size in (4, 8, 16, 32, 128)] + ["InfoNCE, cached by 8 128"]
FINE_TUNED += ["SogCLR+ 8", "GlobalCache+ 8", "MomentumQueue 8", "ISIR 8"]
STORES = [RESULTS / f"fine_tuning_memory{kind}.jsonl" for kind in ("", "_512", "_adapters")]
STEPS = 5
"""Steps of fine-tuning. The profile ends in the last: after it the trainer saves, in memory."""


def peak_of_training(model: str, data: PairDataset, settings: Settings) -> Outcome:
    """Return what a short training holds beside the weights, before it saves."""
    # The trainer leaves cycles, which would hold the last model.
    gc.collect()
    name, rank = settings["objective"], settings["lora_rank"]
    adapters = {"dtype": "bfloat16", "gradient_checkpointing": True} if rank else {}
    encoder = TextEncoder(model, max_length=settings["tokens"], lora_rank=rank, **adapters)
    weights = sum(one.nbytes for one in encoder.parameters())
    objective = objective_of(name)(temperature=0.05, **sizes_of(data))
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
    tokens: int = 32,
    lora_rank: int = 0,
    out: Path = NOWHERE,
) -> list[Outcome]:
    """Print the memory of each row, with tables of objectives for 1,536 pairs.

    Args:
        lora_rank: adapters over bf16 weights, with gradient checkpointing, in place of all weights.
    """
    data = some_of(beginnings(folder, words=tokens)[0], 1536)
    if lora_rank:
        sides = (as_long(texts, tokens) for texts in (data.left_items, data.right_items))
        data = PairDataset(*sides, data.left_id, data.right_id)
    shared = {"model": Path(model).name, "tokens": tokens, "lora_rank": lora_rank}
    split = [row.rpartition(" ") for row in rows]
    wanted = [{"objective": name, "batch_size": int(size), **shared} for name, _, size in split]
    return shown("Beside the weights", wanted, partial(peak_of_training, model, data), out)


def as_long(texts: Sequence[str], words: int) -> list[str]:
    """Return each text repeated until it has this many words: adapters are for long ones."""
    parts = [text.split() or ["none"] for text in texts]
    return [" ".join((own * (1 + words // len(own)))[:words]) for own in parts]


def report() -> None:
    """Print the tables of stores of fine-tuning."""
    for file in STORES:
        table = [each.settings | each.outcome for each in Store(file).runs]
        print_table(Table(f"{file.stem}: beside the weights", table))


def check(folder: Path) -> None:
    """AdamW holds two numbers for each weight, beside its gradient."""
    model = str(toys.text_model(folder / "model", hidden_size=512))
    [found] = fine_tuning(model, toys.beir(folder / "beir"), ["InfoNCE 2"])
    assert 2 <= found["MiB"] / found["weights, MiB"] < 4


if __name__ == "__main__":
    command_line(fine_tuning, report, check=check)
