"""Vectors: an adapter over embeddings that are there already, here word counts hashed to 128
numbers.

    python examples/vectors.py

The texts are never seen: with vectors from an API or a large model only the marked place changes.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np
import torch
from toy_data import write_catalogue

from dualenc.data import VectorPairs
from dualenc.encoders import VectorEncoder
from dualenc.objectives import GlobalCache
from dualenc.training import RetrievalEvaluator, Trainer, TrainingResult


def hashed(texts: list[str], dim: int = 128) -> np.ndarray:
    """Counts of words by hash, (N, dim); stands for whatever embeds your texts."""
    vectors = np.zeros((len(texts), dim), dtype=np.float32)
    for row, text in enumerate(texts):
        for word in text.split():
            vectors[row, zlib.crc32(word.encode()) % dim] += 1
    return vectors


def main(folder: Path = Path("runs/example_vectors")) -> TrainingResult:
    # Your data: .npy files of shape (N, D), folders that `dualenc embed` wrote, or a parquet or
    # jsonl table with two columns of vectors; with judgements, BeirPairs.
    write_catalogue(folder / "data")
    for part in ("train", "test"):
        rows = [
            json.loads(line)
            for line in (folder / "data" / f"{part}.jsonl").read_text("utf-8").splitlines()
        ]
        for side in ("query", "document"):
            np.save(folder / "data" / f"{part}-{side}.npy", hashed([row[side] for row in rows]))
    pairs, held_out = (
        VectorPairs(folder / "data" / f"{part}-query.npy", folder / "data" / f"{part}-document.npy")
        for part in ("train", "test")
    )

    # Also "mlp"; and right_tower="identity" adapts queries only, so that an index of the documents
    # stays as it is.
    torch.manual_seed(0)
    model = VectorEncoder(input_dim=128, tower="linear")

    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    objective = GlobalCache(**sizes, temperature=0.05, positive_in_softmax=True)
    trainer = Trainer(
        output=folder / "run", batch_size=16, epochs=20, learning_rate=1e-2, overwrite=True
    )
    result = trainer.fit(model, pairs, objective, evaluator=RetrievalEvaluator(pairs=held_out))

    print(
        f"nDCG@10 on held-out queries: "
        f"{result.before['ndcg@10']:.3f} → {result.metrics['ndcg@10']:.3f}"
    )
    print(f"dualenc index {result.model_folder} documents.npy --out index")
    return result


if __name__ == "__main__":
    main()
