"""What would training the text model itself be worth, with all documents embedded again or with
their vectors frozen?

    python eval/adapting_text.py DATA VECTORS scifact MODEL                      # and --way
    queries, --way lora

Beside `adapting.py`, whose folders, groups of queries and results these are.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from adapting_table import RESULTS
from adapting_task import Task
from comparison_table import Runs, Settings

from dualenc.data import PairDataset
from dualenc.data.corpus import RetrievalSet
from dualenc.data.readers.beir import read_beir
from dualenc.encoders import DualEncoder, IndexEncoder, TextEncoder
from dualenc.io.provenance import Provenance
from dualenc.objectives import FrozenCorpus, Objective, SogCLR
from dualenc.search.embed.encode import embed
from dualenc.training import Trainer


def main(
    data: Path,
    vectors: Path,
    task: str,
    model: str,
    way: Literal["whole", "queries", "lora"] = "whole",
    epochs: int = 3,
    temperature: float = 0.05,
    rate: float = 8e-5,
    tokens: int = 256,
    seed: int = 0,
    results: Path = RESULTS,
) -> None:
    """Train the text model, with settings that are not tuned, by batches of 32.

    Args:
        data, vectors: folders of all tasks.
        task: name of the task.
        model: folder or hub name of the text model that made the vectors.
        way: "whole": `SogCLR` with the positive in the softmax, and all documents embedded again;
            "queries" and "lora": `FrozenCorpus`, the query tower whole or by adapters of rank 16,
            and the documents' vectors as they are.
        epochs: passes over the training pairs.
        temperature, rate: τ and learning rate.
        tokens: of a text in training; documents are embedded by 256, in bfloat16.
        seed: of the training.
        results: where finished runs are added.
    """
    torch.set_num_threads(1)
    opened = Task(data, vectors, task)
    train = read_beir(data / task, "train")
    test = read_beir(data / task, "test")
    settings = {
        "task": task,
        "method": f"text, {way}",
        "epochs": epochs,
        "temperature": temperature,
        "rate": rate,
    }
    settings |= {"tokens": tokens, "seed": seed}

    def compute(missing: list[Settings]) -> Iterator[tuple[Settings, dict[str, Any]]]:
        for one in missing:
            torch.manual_seed(seed)
            base = TextEncoder(model, max_length=tokens, lora_rank=16 if way == "lora" else 0)
            encoder, pairs, objective = (
                whole(base, opened, train) if way == "whole" else queries(base, opened, train)
            )
            with torch.no_grad():
                objective.log_temperature.fill_(math.log(temperature))
            with tempfile.TemporaryDirectory() as folder:
                options = {
                    "epochs": epochs,
                    "learning_rate": rate,
                    "seed": seed,
                    "save_every": None,
                }
                trainer = Trainer(output=folder, mixed_precision="auto", progress=False, **options)
                begun = time.process_time()
                trained = trainer.fit(encoder, pairs, objective)
                spent = time.process_time() - begun
                encoder = encoder.eval()
                if way == "whole":
                    encoder = TextEncoder(str(trained.model_folder), max_length=256).eval()
            documents = opened.documents.numpy()
            begun = time.process_time()
            if way == "whole":
                again = embed(encoder.right, test.corpus, autocast="bfloat16", progress=False)
                documents = again.vectors[again.rows_of(opened.document_ids)]
            embedding = time.process_time() - begun
            tested = embed(encoder.left, test.queries, batch_size=32, progress=False)
            per_query = opened.quality_of(tested.ids, tested.vectors, documents, opened.test)
            measures = {
                "spent": round(spent, 1),
                "embedding": round(embedding, 1),
                "done": trained.steps,
            }
            yield one, {**opened.grouped(per_query), **measures}

    Runs(results).get([settings], compute)


Parts = tuple[DualEncoder, PairDataset, Objective]
"""A model, its training pairs and its objective."""


def whole(model: TextEncoder, task: Task, texts: RetrievalSet) -> Parts:
    """Both towers, against moving averages over the documents of the training pairs."""
    pairs = task.text_pairs(texts)
    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    return model, pairs, SogCLR(gamma=0.5, positive_in_softmax=True, **sizes)


def queries(model: TextEncoder, task: Task, texts: RetrievalSet) -> Parts:
    """The query tower, against the vectors of all documents."""
    encoder = IndexEncoder(model, Provenance(dim=task.documents.shape[1]))
    items, left_id = task.texts(texts)
    documents = task.documents.numpy()
    pairs = PairDataset(items, documents, left_id, task.pairs[:, 1], right_modality="vector")
    return (
        encoder,
        pairs,
        FrozenCorpus(documents, num_left=pairs.num_left, positive_in_softmax=True),
    )


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
