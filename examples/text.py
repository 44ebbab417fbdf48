"""Query–document: a text encoder that learns which product a customer means.

    python examples/text.py

With your own data and a published model only the two marked places change.
"""

from __future__ import annotations

from pathlib import Path

import torch
from toy_data import write_catalogue

from dualenc.data import TablePairs
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.objectives import GlobalCache
from dualenc.training import RetrievalEvaluator, Trainer, TrainingResult


def main(folder: Path = Path("runs/example_text")) -> TrainingResult:
    # Your data: any csv, jsonl, parquet or hub data set with two columns, or
    # BeirPairs("my_beir_folder").
    write_catalogue(folder / "data")
    pairs = TablePairs(
        folder / "data" / "train.jsonl", left_column="query", right_column="document"
    )
    held_out = TablePairs(
        folder / "data" / "test.jsonl", left_column="query", right_column="document"
    )

    # A published model: model = TextEncoder("sentence-transformers/all-MiniLM-L6-v2"), and a
    # learning_rate of 2e-5.
    torch.manual_seed(0)
    texts = [*pairs.left_items, *pairs.right_items]
    tokenizer = train_tokenizer(texts, vocab_size=400, max_length=16)
    config = {
        "model_type": "bert",
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "max_position_embeddings": 16,
    }
    model = TextEncoder(config=config, tokenizer=tokenizer)

    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    objective = GlobalCache(**sizes, temperature=0.05, positive_in_softmax=True)
    trainer = Trainer(
        output=folder / "run", batch_size=16, epochs=12, learning_rate=2e-3, overwrite=True
    )
    result = trainer.fit(model, pairs, objective, evaluator=RetrievalEvaluator(pairs=held_out))

    print(
        f"nDCG@10 on held-out queries: "
        f"{result.before['ndcg@10']:.3f} → {result.metrics['ndcg@10']:.3f}"
    )
    print(f"{result.model_folder} loads in sentence_transformers.SentenceTransformer too")
    return result


if __name__ == "__main__":
    main()
