"""What memory does a training step take: by batch with gradient caching, and in fine-tuning?

    python eval/bench/memory.py batches --encoder linear
    python eval/bench/memory.py batches --encoder resnet18 --objectives [InfoNCE,EMC2]
    python eval/bench/memory.py fine_tuning MODEL BEIR --rows '["InfoNCE 8","SogCLR+ 8"]'
    python eval/bench/memory.py fine_tuning Qwen3-Embedding-0.6B BEIR --tokens 512 --lora_rank 16
    python eval/bench/memory.py report

batches: the peak as the batch grows, over that of the smallest. Every measurement is a process: its
peak resident memory, Python and torch included, or the peak of allocated memory on a CUDA device.
glibc is told to return what is freed at once: what it would keep for later can be another 0.1 to
0.5 of the first batch's memory. On the CPU the inputs that a step keeps, out-of-batch ones
included, are in the peak, as they are in training; the last column leaves them out. MiniLM and
ResNet-18 (on two views, its BatchNorm frozen) have random weights and inputs. The linear encoder
holds next to nothing: what is left is the objective, the strictest comparison and a fast one.

fine_tuning: the peak of what torch holds beside the weights. MODEL is a text encoder, trained in
bf16 on beginnings of texts, or a name of `SHAPES`, random weights of a published model's sizes. A
row is an objective of `rows.py` and a batch size. With --lora_rank every text is repeated until it
is as long as the longest: large encoders are chosen for long texts.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch
from in_turn import new_backbone
from objectives import OBJECTIVES
from profiling import ON_GPU, seconds_per_step, watch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
import toys
from frame import RESULTS, Outcome, Settings, Store, command_line, train
from rows import TRAINER, objective_of
from tasks import beginnings, some_of

from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.encoders.batchnorm import trained_norms
from dualenc.encoders.dual import DualEncoder, Tower, unit_norm
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import ExactGlobal, NegativeCache
from dualenc.training.encoding import CachedEncoding
from dualenc.types import Inputs

MIB = 2**20
CACHED = {**OBJECTIVES, "NegativeCache": NegativeCache}
CACHED["ExactGlobal"] = partial(ExactGlobal, corpus_chunk_size=64)
FINE_TUNED = [f"InfoNCE {size}" for size in (4, 8, 16, 32, 128)] + ["InfoNCE, cached by 8 128"]
FINE_TUNED += ["SogCLR+ 8", "GlobalCache+ 8", "MomentumQueue 8", "ISIR 8"]
STORES = [RESULTS / f"fine_tuning_memory{kind}.jsonl" for kind in ("", "_512", "_adapters")]

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "head_dim")
GEMMA = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
SHAPES: dict[str, dict[str, Any]] = {
    name: kind | dict(zip(SIZES, sizes))
    for name, kind, *sizes in (
        ("Qwen3-Embedding-0.6B", {"model_type": "qwen3"}, 151_669, 1024, 3072, 28, 16, 8, 128),
        ("EmbeddingGemma", GEMMA, 262_144, 768, 1152, 24, 3, 1, 256),
        ("ModernBERT-large", {"model_type": "modernbert"}, 50_368, 1024, 2624, 28, 16),
        ("ModernBERT-base", {"model_type": "modernbert"}, 50_368, 768, 1152, 22, 12),
    )
}


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


def peak_of_batch(settings: Settings) -> Outcome:
    """Train some steps; return peak memory and the size of a batch's inputs, in MiB."""
    torch.manual_seed(0)
    encoder, size, batch_size = (settings[key] for key in ("encoder", "size", "batch_size"))
    device, num_items = torch.device(settings["device"]), settings["num_items"]
    tower = Net(encoder, size)
    kind = "image" if encoder == "resnet18" else "query-document"
    model = DualEncoder(tower, tower, kind=kind).train().to(device)
    new_objective = CACHED[settings["objective"]]
    objective = new_objective(num_left=num_items, views=encoder == "resnet18").to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(settings["steps"]):
        encoding = CachedEncoding(model, device, chunk_size=settings["chunk_size"])
        inputs = [random_inputs(encoder, batch_size, size) for _ in range(2)]
        kept = list(map(num_bytes, inputs))

        def encode(side: Any, ids: Tensor, encoding: CachedEncoding = encoding) -> Tensor:
            outside = random_inputs(encoder, len(ids), size)
            if torch.is_grad_enabled():  # then they are kept for the backward pass
                kept.append(num_bytes(outside))  # noqa: B023 - called within this iteration
            return encoding.encode(side, outside, out_of_batch=True)

        ids = torch.randperm(num_items, device=device)[:batch_size]
        left, right = encoding.encode("left", inputs[0]), encoding.encode("right", inputs[1])
        encoding.backward(objective(left, right, ids, encode=encode).loss)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        return {"peak": torch.cuda.max_memory_allocated(device) / MIB, "inputs": 0.0}
    # Of this process alone; what getrusage returns, a process may inherit from its parent.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(status.partition("VmHWM:")[2].split()[0]) / 1024
    return {"peak": peak, "inputs": sum(kept) / MIB}


def batches(
    encoder: Literal["minilm", "resnet18", "linear"] = "minilm",
    batch_sizes: list[int] = [32, 4096],  # noqa: B006 - a default for the command line, never changed
    objectives: list[str] = list(CACHED),  # noqa: B006
    chunk_size: int = 32,
    size: int | None = None,
    num_items: int | None = None,
    steps: int = 2,
    device: str = "cpu",
) -> None:
    """Print a table of objectives and batch sizes.

    Args:
        batch_sizes: pairs per step; ratios are to the first.
        size: tokens of a text (128 by default), or pixels of an image's side (64).
        num_items: N, size of the corpus; by default twice the largest batch.
        steps: training steps; chains have a state from the second on.
    """
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    shared = {"encoder": encoder, "size": size or {"minilm": 128}.get(encoder, 64), "steps": steps}
    shared |= {"chunk_size": chunk_size, "num_items": num_items or 2 * max(batch_sizes)}
    table = []
    for name in objectives:
        first: Outcome = {}
        for batch_size in batch_sizes:
            settings = {**shared, "device": device, "objective": name, "batch_size": batch_size}
            with ProcessPoolExecutor(1, get_context("spawn")) as pool:
                found = pool.submit(peak_of_batch, settings).result()
            first = first or found
            without = (found["peak"] - found["inputs"]) / (first["peak"] - first["inputs"])
            cells = {"objective": name, "B": batch_size, "peak, MiB": found["peak"]}
            cells |= {"ratio": found["peak"] / first["peak"], "inputs, MiB": found["inputs"]}
            table.append(cells | {"ratio without": without})
            print(table[-1], file=sys.stderr, flush=True)
    print_table(Table(", ".join(f"{key} {value}" for key, value in shared.items()), table))


def peak_of_training(model: str, data: PairDataset, steps: int, settings: Settings) -> Outcome:
    """Return what a short training holds beside the weights, before it saves."""
    # The trainer leaves cycles, which would hold the last model.
    gc.collect()
    name, rank = settings["objective"], settings["lora_rank"]
    adapters = {"dtype": "bfloat16", "gradient_checkpointing": True} if rank else {}
    encoder = TextEncoder(model, max_length=settings["tokens"], lora_rank=rank, **adapters)
    weights = sum(one.nbytes for one in encoder.parameters())
    objective = objective_of(name)(
        temperature=0.05, num_left=data.num_left, num_right=data.num_right
    )
    trainer = {
        "batch_size": settings["batch_size"],
        "mixed_precision": "bf16",
        "deterministic": True,
    }
    trainer |= TRAINER.get(name, {})
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    peaks: list[int] = []

    def train_once(steps: int, before_loss: Callable[[], None]) -> None:
        watch(objective, before_loss)
        # The last step is there for this call: after it the trainer saves, which takes memory.
        losses = itertools.count(1)
        watch(objective, lambda: stop() if next(losses) == steps else None)
        train(encoder, data, objective, max_steps=steps, **trainer)

    def stop() -> None:
        if ON_GPU:
            peaks.append(torch.cuda.max_memory_allocated() - weights)
        else:
            profiler.stop()

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    else:
        profiler.start()
    milliseconds = 1000 * seconds_per_step(train_once, 1, steps) / settings["batch_size"]
    shown = {"weights, MiB": round(weights / MIB)}
    if ON_GPU:
        return shown | {"MiB": round(peaks[0] / MIB), "ms per pair": round(milliseconds, 1)}
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda each: each.start_ns())
    changes = [each.nbytes() for each in events if each.name() == "[memory]"]
    return shown | {"MiB": round(max(itertools.accumulate(changes)) / MIB)}


def fine_tuning(
    model: str,
    folder: Path,
    rows: list[str] = FINE_TUNED,
    pairs: int = 1536,
    tokens: int = 32,
    lora_rank: int = 0,
    steps: int = 3,
    out: Path = Path(os.devnull),
) -> None:
    """Print the memory of each row.

    Args:
        model: folder or hub name of a text encoder, or a name of `SHAPES`.
        pairs: pairs of the data, for the tables of objectives.
        lora_rank: adapters over bf16 weights, with gradient checkpointing, in place of all weights.
        steps: over which a pair's time is taken; a training has one before them and one after.
    """
    data = some_of(beginnings(folder, words=tokens)[0], pairs)
    if lora_rank:
        sides = (as_long(texts, tokens) for texts in (data.left_items, data.right_items))
        data = PairDataset(*sides, data.left_id, data.right_id)
    shared = {"model": Path(model).name, "tokens": tokens, "lora_rank": lora_rank}
    wanted = []
    for row in rows:
        objective, _, batch_size = row.rpartition(" ")
        wanted.append({"objective": objective, "batch_size": int(batch_size), **shared})
    with tempfile.TemporaryDirectory() as temporary:
        if model in SHAPES:
            tokenizer = train_tokenizer(data.right_items[:500], 8000)
            TextEncoder(config=SHAPES[model], tokenizer=tokenizer).save(temporary)
            model = temporary
        outcomes = Store(out).get(wanted, partial(peak_of_training, model, data, steps))
    table = [settings | outcome for settings, outcome in zip(wanted, outcomes, strict=True)]
    print_table(Table("Beside the weights", table))


def as_long(texts: Sequence[str], words: int) -> list[str]:
    """Return each text repeated until it has this many words."""
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
