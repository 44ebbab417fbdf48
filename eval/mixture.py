"""One model of several sources against a model for each: nDCG@10 on the test queries of every
source.

    python eval/mixture.py "[PATH_TO_PAPERS, PATH_TO_MEDQUAD]" --epochs 2

Each PATH is a BEIR folder with judgements of train and test. A one-layer transformer is trained
from scratch, with one tokenizer of all sources, on each source alone and on all of them: in mixed
batches, in batches of one source, and with a prompt before the queries of each source. A pair is
seen `epochs` times in each of these runs, so that all sources together take as many steps as each
of them alone do in sum.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from comparison_tasks import Retrieval, beginnings

from dualenc.data import Corpus, Mixture
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.evaluation.report_page import Table, print_table
from dualenc.objectives import InfoNCE
from dualenc.training import Trainer


def main(
    paths: list[Path], epochs: int = 2, batch_size: int = 32, seeds: int = 3, words: int = 64
) -> None:
    """Train and print a table.

    Args:
        paths: BEIR folders, two or more; their names are those of the sources.
        epochs: passes over the pairs.
        batch_size: pairs in a batch.
        seeds: runs of each.
        words: of a document that are read, and tokens.
    """
    torch.set_num_threads(1)
    parts = {path.name: beginnings(path, words) for path in paths}
    train = {name: part[0] for name, part in parts.items()}
    names, prompts = list(parts), {name: f"{name}: " for name in parts}
    texts = [text for pairs in train.values() for text in pairs.right_items]
    tokenizer = train_tokenizer(texts, 8000, max_length=words)
    config = {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config |= {"intermediate_size": 256, "max_position_embeddings": words}
    together: dict[str, dict[str, Any]] = {
        "together": {},
        "together, batches of one source": {"batches": "one_source"},
        "together, with prompts": {"left_prompts": prompts},
    }
    runs = {f"{name} alone": Mixture({name: pairs}) for name, pairs in train.items()}
    runs |= {title: Mixture(train, **options) for title, options in together.items()}
    rows: list[dict[str, object]] = []
    for title, pairs in runs.items():
        found: dict[str, list[float]] = {name: [] for name in names}
        begun = time.perf_counter()
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = TextEncoder(config=config, tokenizer=tokenizer, max_length=words)
            objective = InfoNCE(
                num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.05, seed=seed
            )
            settings = {
                "batch_size": batch_size,
                "epochs": epochs,
                "learning_rate": 3e-3,
                "seed": seed,
            }
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(output=folder, save_every=None, progress=False, **settings)
                steps = trainer.fit(model, pairs, objective).steps
            for name, (_, _, test) in parts.items():
                prompt = pairs.prompts.get(name, ("", ""))[0]
                queries = Corpus(test.queries.ids, [prompt + text for text in test.queries.items])
                found[name].append(
                    Retrieval(test._replace(queries=queries))(model.eval())["ndcg@10"]
                )
        row: dict[str, object] = {"trained on": title, "steps": steps}
        for name, values in found.items():
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            row[name] = f"{statistics.mean(values):.3f} ± {spread:.3f}"
        rows.append({**row, "seconds per run": round((time.perf_counter() - begun) / seeds)})
        print(rows[-1], flush=True)
    print_table(Table("nDCG@10 on test queries", rows))


if __name__ == "__main__":
    from jsonargparse import auto_cli

    auto_cli(main)
