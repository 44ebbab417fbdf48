"""The memory that a training step takes, by objective and batch: the peak of what torch holds,
beside the weights.

    python eval/bench/training_memory.py MODEL PATH_TO_BEIR --rows '["InfoNCE 8","InfoNCE, cached by
    8 128"]' python eval/bench/training_memory.py Qwen3-Embedding-0.6B PATH_TO_BEIR --tokens 512
    --lora_rank 16

MODEL is a text encoder, fine-tuned in bf16 on beginnings of texts, or a name of `SHAPES`: random
weights of a published model's sizes, which take the memory of its own. A row is an objective of
`small_batch.py` and a batch size. Counted are tensors that exist beside the weights: gradients, the
state of the optimizer and of the objective, a momentum encoder, activations.

On a GPU the seconds of a pair are there as well, and with --lora_rank every text is repeated until
it is as long as the longest: large encoders are chosen for long texts.
"""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rivals
import torch
from jsonargparse import auto_cli
from profiling import StepClock

sys.path.insert(0, str(Path(__file__).parents[1]))
from comparison_tasks import beginnings, some_of
from small_batch import OBJECTIVES, TRAINER
from torch.profiler import ProfilerActivity, profile

from dualenc.data import PairDataset
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.training import Trainer

STEPS = 3
ROWS = (
    "InfoNCE 4",
    "InfoNCE 8",
    "InfoNCE 16",
    "InfoNCE 32",
    "InfoNCE 128",
    "InfoNCE, cached by 8 128",
)
ROWS += ("SogCLR+ 8", "GlobalCache+ 8", "MomentumQueue 8", "ISIR 8")

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-Embedding-0.6B": {
        "model_type": "qwen3",
        "vocab_size": 151_669,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "EmbeddingGemma": {
        "model_type": "gemma3_text",
        "vocab_size": 262_144,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "use_bidirectional_attention": True,
    },
    "ModernBERT-large": {
        "model_type": "modernbert",
        "vocab_size": 50_368,
        "hidden_size": 1024,
        "intermediate_size": 2624,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "ModernBERT-base": {
        "model_type": "modernbert",
        "vocab_size": 50_368,
        "hidden_size": 768,
        "intermediate_size": 1152,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
    },
}


def random_folder(shape: str, texts: Sequence[str], folder: Path) -> Path:
    """A model of random weights of a published shape, and a small tokenizer of these texts."""
    encoder = TextEncoder(config=SHAPES[shape], tokenizer=train_tokenizer(texts, 8000))
    encoder.save(folder / "model")
    return folder / "model"


def as_long(texts: Sequence[str], words: int) -> list[str]:
    """Each text repeated until it has so many words."""
    parts = [text.split() or ["none"] for text in texts]
    return [" ".join((own * (1 + words // len(own)))[:words]) for own in parts]


def peak_bytes(
    encoder: TextEncoder,
    weights: int,
    data: PairDataset,
    objective_name: str,
    batch_size: int,
    steps: int,
) -> tuple[int, float]:
    """The most bytes that a short training holds beside those of the weights before it saves, and
    seconds of a pair."""
    objective = OBJECTIVES[objective_name](
        temperature=0.05, num_left=data.num_left, num_right=data.num_right
    )
    on_gpu = torch.cuda.is_available()
    clock = StepClock(1, steps)
    peaks: list[int] = []
    profiler = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def before_loss() -> None:
        clock()
        if on_gpu:
            peaks.append(torch.cuda.max_memory_allocated())
        elif clock.calls == steps + 2:
            # The last step is there for this call: after it the trainer saves, which takes memory
            # of its own.
            profiler.stop()

    rivals.watch(objective, before_loss)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        torch.set_num_threads(1)
        profiler.start()
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            output=output,
            batch_size=batch_size,
            max_steps=steps + 2,
            mixed_precision="bf16",
            save_every=None,
            progress=False,
            **TRAINER.get(objective_name, {}),
        )
        trainer.fit(encoder, data, objective)
    seconds = clock.seconds_per_step / batch_size
    if on_gpu:
        return peaks[-1] - weights, seconds
    held, most = 0, 0
    for event in sorted(
        profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()
    ):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most, seconds


def main(
    model: str,
    folder: Path,
    rows: Sequence[str] = ROWS,
    pairs: int = 1536,
    tokens: int = 32,
    lora_rank: int = 0,
    steps: int = STEPS,
    out: Path | None = None,
) -> None:
    """Print the memory of each row.

    Args:
        model: folder or hub name of a text encoder, or a name of `SHAPES`.
        folder: BEIR folder.
        rows: see above.
        pairs: of the data, for the tables of objectives.
        tokens: longest text.
        lora_rank: adapters over bf16 weights, with gradient checkpointing, in place of all weights.
        steps: over which a pair's time is taken; a training has one before them and one after.
        out: file to which the rows are added as lines of JSON.
    """
    data = some_of(beginnings(folder, words=tokens)[0], pairs)
    if lora_rank:
        sides = (as_long(texts, tokens) for texts in (data.left_items, data.right_items))
        data = PairDataset(*sides, data.left_id, data.right_id)
    settings: dict[str, Any] = {"max_length": tokens, "lora_rank": lora_rank}
    if lora_rank:
        settings |= {"dtype": "bfloat16", "gradient_checkpointing": True}
    with tempfile.TemporaryDirectory() as temporary:
        if model in SHAPES:
            model = str(random_folder(model, data.right_items[:500], Path(temporary)))
        for row in rows:
            name, _, batch_size = row.rpartition(" ")
            encoder = TextEncoder(model, **settings)
            weights = sum(one.nbytes for one in encoder.parameters())
            most, seconds = peak_bytes(encoder, weights, data, name, int(batch_size), steps)
            cells = {"objective": name, "batch_size": int(batch_size), "tokens": tokens}
            cells |= {"weights, MiB": round(weights / 2**20), "MiB": round(most / 2**20)}
            if torch.cuda.is_available():
                cells["ms per pair"] = round(1000 * seconds, 1)
            print(cells, flush=True)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(cells) + "\n")
            del encoder
            # The trainer leaves cycles, which would hold this model while the next one is measured.
            gc.collect()


if __name__ == "__main__":
    auto_cli(main)
