"""The trainer of sentence-transformers with its own loss and with objectives of this package: same
loop, same data.

    python eval/integrations_text.py PATH_TO_PAPERS --pairs 4000 --epochs 4 --seeds 3

A transformer from scratch learns to find abstracts by their titles. Every row is
`SentenceTransformerTrainer` with the same arguments, order of batches and start; only the loss
differs. Quality is nDCG@10 on the test titles, over the abstracts of test and training.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

from dualenc.data.readers.beir import read_beir
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.evaluation.report_page import Table, print_table
from dualenc.integrations.sentence_transformers import GlobalLoss, GlobalLossTrainer, with_ids
from dualenc.objectives import GlobalCache, InfoNCE, SogCLR

CONFIG = {
    "model_type": "bert",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
LOSSES = ("MultipleNegativesRankingLoss", "InfoNCE", "SogCLR, positive_in_softmax", "GlobalCache")


def read_pairs(folder: Path, split: str, limit: int | None) -> tuple[list[str], list[str]]:
    """Titles and abstracts of a split."""
    collection = read_beir(folder, split)
    row_of = {name: row for row, name in enumerate(collection.corpus.ids)}
    names = collection.queries.ids[:limit]
    titles = [str(collection.queries[row]) for row in range(len(names))]
    documents = [next(iter(collection.qrels[name])) for name in names]
    return titles, [str(collection.corpus[row_of[name]]) for name in documents]


def build_loss(
    name: str, model: SentenceTransformer, texts: Any, temperature: float
) -> torch.nn.Module:
    if name == "MultipleNegativesRankingLoss":
        directions = ("query_to_doc", "doc_to_query")
        return MultipleNegativesRankingLoss(
            model, scale=1 / temperature, directions=directions, partition_mode="per_direction"
        )
    sizes = {"num_left": texts.num_left, "num_right": texts.num_right, "temperature": temperature}
    if name == "InfoNCE":
        return GlobalLoss(model, InfoNCE(temperature=temperature), texts)
    if name == "GlobalCache":
        return GlobalLoss(model, GlobalCache(**sizes), texts)
    return GlobalLoss(model, SogCLR(**sizes, positive_in_softmax=True), texts)


def train(
    name: str, start: Path, pairs: Dataset, evaluator: Any, seed: int, settings: argparse.Namespace
) -> Any:
    """One run: nDCG@10 and seconds of training."""
    dataset, texts = with_ids(pairs)
    torch.manual_seed(seed)
    model = SentenceTransformer(str(start), device="cpu")
    with tempfile.TemporaryDirectory() as output:
        arguments = SentenceTransformerTrainingArguments(
            output,
            per_device_train_batch_size=settings.batch_size,
            num_train_epochs=settings.epochs,
            learning_rate=settings.learning_rate,
            warmup_steps=0.1,
            seed=seed,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_strategy="no",
            use_cpu=not torch.cuda.is_available(),
            dataloader_drop_last=True,
        )
        loss = build_loss(name, model, texts, settings.temperature)
        # The library's own loss takes no notice of the column of ids.
        trainer = GlobalLossTrainer(model, arguments, train_dataset=dataset, loss=loss)
        if name == "MultipleNegativesRankingLoss":
            trainer.objective = InfoNCE()
        begin = time.perf_counter()
        trainer.train()
        seconds = time.perf_counter() - begin
    return evaluator(model)["cosine_ndcg@10"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("papers", type=Path)
    parser.add_argument("--pairs", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-3)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--losses", nargs="+", default=LOSSES, choices=LOSSES)
    settings = parser.parse_args()

    titles, abstracts = read_pairs(settings.papers, "train", settings.pairs)
    test_titles, test_abstracts = read_pairs(settings.papers, "test", None)
    documents = {str(row): text for row, text in enumerate(test_abstracts + abstracts)}
    queries = {f"q{row}": text for row, text in enumerate(test_titles)}
    relevant = {f"q{row}": {str(row)} for row in range(len(test_titles))}
    evaluator = InformationRetrievalEvaluator(
        queries, documents, relevant, batch_size=128, show_progress_bar=False
    )
    tokenizer = train_tokenizer([*titles, *abstracts], vocab_size=8192)
    pairs = Dataset.from_dict({"anchor": titles, "positive": abstracts})

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in settings.losses:
            runs = []
            for seed in range(settings.seeds):
                torch.manual_seed(seed)
                start = Path(folder) / f"start-{seed}"
                TextEncoder(config=CONFIG, tokenizer=tokenizer, max_length=64).save(start)
                runs.append(train(name, start, pairs, evaluator, seed, settings))
                print(name, seed, runs[-1], flush=True)
            scores, seconds = zip(*runs)
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            quality = f"{statistics.mean(scores):.3f} ± {spread:.3f}"
            rows.append(
                {"loss": name, "nDCG@10": quality, "seconds": round(statistics.mean(seconds))}
            )
    print_table(Table("SentenceTransformerTrainer", rows))


if __name__ == "__main__":
    main()
