"""What would training the text model itself be worth, beside the map of `adapting.py`?

    python eval/adapting_text.py DATA VECTORS scifact MODEL    # and --way queries, --way lora

Folders, groups of queries and results are those of `adapting.py`. "whole" is `SogCLR` with the
positive in the softmax, and all documents are embedded again, by 256 tokens in bfloat16. "queries"
and "lora" are `FrozenCorpus`: the query tower whole, or adapters of rank 16, over the documents'
vectors as they are. Settings are not tuned.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from adapting import STORE, Task, scores_of
from frame import Outcome, Settings, Store, command_line, train
from toys import beir, text_model

from dualenc.data import PairDataset, open_corpus
from dualenc.data.readers.beir import read_beir
from dualenc.encoders import IndexEncoder, TextEncoder
from dualenc.io.provenance import Provenance
from dualenc.objectives import FrozenCorpus, SogCLR
from dualenc.search.embed.encode import embed
from dualenc.training.index_evaluator import IndexEvaluator


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
    results: Path = STORE,
) -> None:
    """Train the text model `model`, which made the vectors, by batches of 32."""
    opened = Task(data, vectors, task)
    queries, test = open_corpus(data / task, part="queries"), read_beir(data / task)
    text_of = dict(zip(queries.ids, queries.items, strict=True))
    used, left_id = np.unique(opened.pairs[:, 0], return_inverse=True)
    texts = [text_of[opened.query_ids[row]] for row in used.tolist()]

    def run(settings: Settings) -> Outcome:
        torch.manual_seed(seed)
        encoder = TextEncoder(model, max_length=tokens, lora_rank=16 if way == "lora" else 0)
        documents, right_id = opened.documents.numpy(), opened.pairs[:, 1]
        common = {"temperature": temperature, "positive_in_softmax": True, "num_left": len(texts)}
        objective, modality = FrozenCorpus(documents, **common), "vector"
        if way == "whole":
            rows, right_id = np.unique(right_id, return_inverse=True)
            items = dict(zip(test.corpus.ids, test.corpus.items, strict=True))
            documents = [items[opened.index.ids[row]] for row in rows.tolist()]
            objective, modality = SogCLR(gamma=0.5, num_right=len(rows), **common), "text"
        else:
            encoder = IndexEncoder(encoder, Provenance(dim=documents.shape[1]))
        pairs = PairDataset(texts, documents, left_id, right_id, right_modality=modality)
        options = {"epochs": epochs, "learning_rate": rate, "seed": seed}
        trained = train(encoder, pairs, objective, mixed_precision="auto", **options)
        index, begun, embedding = opened.index, time.process_time(), 0.0
        if way == "whole":
            with tempfile.TemporaryDirectory() as folder:
                trained.model.save(folder)
                encoder = TextEncoder(folder, max_length=256).eval()
            index = embed(encoder.right, test.corpus, autocast="bfloat16", progress=False)
            embedding = time.process_time() - begun
        evaluator = IndexEvaluator(test.queries, opened.test.qrels, index)
        outcome = opened.grouped(scores_of(encoder, evaluator))
        outcome |= {"spent": round(trained.seconds, 1), "embedding": round(embedding, 1)}
        return outcome | {"done": trained.steps}

    own = {"temperature": temperature, "rate": rate, "tokens": tokens, "seed": seed}
    wanted = {"task": task, "method": f"text, {way}", "epochs": epochs} | own
    Store(results).get([wanted], run)


def check(folder: Path) -> None:
    """Train at a rate of nearly zero, which leaves the queries where they are."""
    model, corpus = text_model(folder / "model"), beir(folder / "data" / "toy")
    loaded, collection = TextEncoder(str(model)).eval(), read_beir(corpus)
    corpora = {"corpus": collection.corpus, "queries": open_corpus(corpus, part="queries")}
    for side, items in corpora.items():
        embed(loaded.left, items, folder / "vectors" / "toy" / side, progress=False)
    paths = folder / "data", folder / "vectors", "toy", str(model)
    unadapted = Task(*paths[:3])
    expected = unadapted.grouped(unadapted.scores())["all"]
    for way in ("whole", "queries", "lora"):
        main(*paths, way=way, epochs=1, rate=1e-12, results=folder / "runs.jsonl")
    found = [each.outcome["all"] for each in Store(folder / "runs.jsonl").runs]
    assert np.allclose(found, [expected] * 3, atol=0.02)


if __name__ == "__main__":
    command_line(main, check=check)
