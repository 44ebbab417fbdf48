"""LoRA: small adapters learn the task while the transformer's own weights stay as they were.

    pip install "dualenc[lora]"
    python examples/lora.py

The saved folder has the adapters merged: whoever loads it needs no LoRA.
"""

from __future__ import annotations

from pathlib import Path

import torch
from toy_data import write_catalogue

from dualenc.data import TablePairs
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.objectives import SogCLR
from dualenc.training import RetrievalEvaluator, Trainer, TrainingResult


def small_base(texts: list[str], folder: Path) -> str:
    """A stand-in for a published model: a transformer with random weights."""
    torch.manual_seed(0)
    tokenizer = train_tokenizer(texts, vocab_size=400, max_length=16)
    size = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    }
    config = {
        "model_type": "bert",
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 16,
        **size,
    }
    TextEncoder(config=config, tokenizer=tokenizer).save(folder)
    return str(folder)


def main(folder: Path = Path("runs/example_lora"), epochs: int = 15) -> TrainingResult:
    write_catalogue(folder / "data")
    pairs = TablePairs(
        folder / "data" / "train.jsonl", left_column="query", right_column="document"
    )
    held_out = TablePairs(
        folder / "data" / "test.jsonl", left_column="query", right_column="document"
    )

    # For real: base = "sentence-transformers/all-MiniLM-L6-v2", lora_rank=8, learning_rate=5e-4.
    base = small_base([*pairs.left_items, *pairs.right_items], folder / "base")
    model = TextEncoder(base, lora_rank=16)
    print(f"trains {model.num_trainable_parameters:,} of {model.num_parameters:,} weights")

    trainer = Trainer(
        output=folder / "run", batch_size=32, epochs=epochs, learning_rate=5e-3, overwrite=True
    )
    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    objective = SogCLR(**sizes, temperature=0.05, gamma=0.5, positive_in_softmax=True)
    result = trainer.fit(model, pairs, objective, evaluator=RetrievalEvaluator(pairs=held_out))

    print(
        f"nDCG@10 on held-out queries: "
        f"{result.before['ndcg@10']:.3f} → {result.metrics['ndcg@10']:.3f}"
    )
    return result


if __name__ == "__main__":
    main()
