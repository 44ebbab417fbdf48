"""One model of several sources against a model for each: nDCG@10 on every source's test queries.

    python eval/mixture.py "[PAPERS, MEDQUAD]" --epochs 2

Each source is a BEIR folder. A one-layer transformer is trained from scratch, with one tokenizer of
all sources, on each source alone and on all of them: in mixed batches, in batches of one source,
and with a prompt before the queries of each source. Each run meets a pair `epochs` times, so that
all sources together take as many steps as each of them alone do in sum.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import toys
from frame import Outcome, Settings, Store, command_line, train
from mined import print_runs
from tasks import BERT, Retrieval, beginnings

from dualenc.data import Corpus, Mixture
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.objectives import InfoNCE


def run(
    paths: Sequence[Path],
    epochs: int = 2,
    batch_size: int = 32,
    seeds: int = 3,
    words: int = 64,
    results: str = os.devnull,
) -> None:
    """Train on sources alone and together, and print a table; texts are cut after `words`."""
    parts = {path.name: beginnings(path, words) for path in paths}
    sources = {name: pairs for name, (pairs, *_) in parts.items()}
    texts = [text for pairs in sources.values() for text in pairs.right_items]
    tokenizer = train_tokenizer(texts, 8000, max_length=words)
    mixtures = {f"{name} alone": Mixture({name: pairs}) for name, pairs in sources.items()} | {
        "together": Mixture(sources),
        "together, batches of one source": Mixture(sources, batches="one_source"),
        "together, with prompts": Mixture(sources, left_prompts={n: f"{n}: " for n in sources}),
    }
    trainer = {"batch_size": batch_size, "epochs": epochs, "learning_rate": 3e-3}

    def measure(settings: Settings) -> Outcome:
        pairs, seed = mixtures[settings["trained on"]], settings["seed"]
        torch.manual_seed(seed)
        config = BERT | {"max_position_embeddings": words}
        model = TextEncoder(config=config, tokenizer=tokenizer, max_length=words)
        sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
        objective = InfoNCE(**sizes, temperature=0.05, seed=seed)
        begun = time.perf_counter()
        outcome: Outcome = {"steps": train(model, pairs, objective, seed=seed, **trainer).steps}
        for name, (_, _, test) in parts.items():
            prompt = pairs.prompts.get(name, ("", ""))[0]
            queries = Corpus(test.queries.ids, [prompt + text for text in test.queries.items])
            outcome |= {name: Retrieval(test._replace(queries=queries))(model)["ndcg@10"]}
        return outcome | {"seconds per run": round(time.perf_counter() - begun)}

    common = {"sources": list(sources), "words": words, **trainer}
    rows, store = list(mixtures), Store(Path(results))
    wanted = [{**common, "trained on": row, "seed": seed} for row in rows for seed in range(seeds)]
    store.get(wanted, measure)
    print_runs("nDCG@10 on test queries", store.runs)


def check(folder: Path) -> None:
    """Count the steps of sources alone and together."""
    paths = [toys.beir(folder / name) for name in ("one", "two")]
    run(paths, batch_size=4, seeds=1, words=16, results=str(folder / "runs.jsonl"))
    steps = [each.outcome["steps"] for each in Store(folder / "runs.jsonl").runs]
    assert steps == [18, 18, 36, 36, 36]


if __name__ == "__main__":
    command_line(run, check=check)
