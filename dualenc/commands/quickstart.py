"""`dualenc quickstart`: train, embed, index, search and evaluate on text that every machine has."""

from __future__ import annotations

import shlex
import time

from cyclopts.types import PositiveInt, UInt32

from dualenc.commands.index import print_index
from dualenc.commands.options import RankingOptions, SearchOptions
from dualenc.commands.output import print_line
from dualenc.commands.search import search

SEARCHES = (
    "sort a list of numbers",
    "solve a system of linear equations",
    "read a file line by line",
)
FEW_STEPS = 100  # the model hardly learns in fewer
NEXT = """\
Next commands:
  dualenc search {out}/index "your own question"
  dualenc evaluate retrieval {out}/model {out}/data --split test --bm25
  dualenc adapt {out}/index your_clicks.csv --out adapted
  dualenc embed {out}/model your_texts.jsonl --out your-embeddings
  dualenc recipe text-pairs > mine.yaml && dualenc train mine.yaml data.path=your.csv"""


def quickstart(
    *,
    out: str = "quickstart-run",
    max_docs: int = 16000,
    test_docs: PositiveInt = 1000,
    steps: PositiveInt | None = None,
    seed: UInt32 = 0,
) -> None:
    """Train a small text encoder from scratch on the documentation already on this machine; needs
    no network.

    A query is the summary line of a docstring, its document the qualified name and the rest.
    Sources are parsed only.

    Args:
        out: folder for the data, the model, the embeddings and the index; replaced by the next
            quickstart.
        max_docs: maximum number of documents in the corpus.
        test_docs: functions that are held out from training, to measure on.
        steps: training steps of 128 pairs; by default up to 600, as many as take about two minutes.
        seed: random seed.
    """
    from dualenc.evaluation.report_page import Table, print_table
    from dualenc.workflows import run_quickstart
    from dualenc.workflows.session import describe_embeddings

    start = time.perf_counter()
    result = run_quickstart.quickstart(
        out=out, max_docs=max_docs, test_docs=test_docs, steps=steps, seed=seed
    )
    print_line(describe_embeddings(result.embeddings, f"{result.folder}/embeddings"))
    print_index(result.index, f"{result.folder}/index")
    # BM25 is in the table, since a small model that is not better than it has learned little.
    rows = [
        {"system": system, "nDCG@10": metrics["ndcg@10"], "recall@10": metrics["recall@10"]}
        for system, metrics in result.metrics.items()
    ]
    title = (
        f"{result.num_test:,} held-out functions, searched among {result.num_documents:,} documents"
    )
    print_table(Table(title, rows))
    # As a user would type them, with the model loaded from its folder.
    for query in SEARCHES:
        search(
            f"{result.folder}/index", query, k=3, ranking=RankingOptions(), options=SearchOptions()
        )
    if result.steps < FEW_STEPS:
        print(
            f"{result.steps} steps are too few to learn much; "
            "for more: dualenc quickstart --steps 300"
        )
    next_words = NEXT.format(out=shlex.quote(str(result.folder)))
    print(f"Done in {time.perf_counter() - start:.0f} s.\n\n{next_words}")
