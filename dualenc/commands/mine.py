"""`dualenc mine`: mine hard negatives with a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dualenc.commands.options import BatchSize, ColumnOptions
from dualenc.commands.output import print_line


# The fields of `dualenc.search.hard_negatives.Rule`, whose package imports faiss.
@dataclass(frozen=True)
class RuleOptions:
    """Selection of negatives among a query's nearest documents.

    Args:
        num_negatives: maximum number of negatives per query.
        first_rank: first rank of the window, counted from 1 without the known positives; 11 skips
            the first ten.
        last_rank: last rank of the window.
        relative: maximum share of the mean score of the query's positives: s ≤ s⁺ − (1 −
            relative)·|s⁺|, which is relative·s⁺ for a positive score. Moreira et al. 2024 (arXiv
            2407.15831, TopK-PercPos) find 0.95 best. null: no limit.
        pick: take the best of the remaining candidates, or a random sample.
        seed: random seed of the samples, which are drawn per query.
    """

    num_negatives: int = 8
    first_rank: int = 1
    last_rank: int = 100
    relative: float | None = 0.95
    pick: Literal["top", "random"] = "top"
    seed: int = 0


def mine(
    model: str,
    data: str,
    *,
    out: str,
    rule: RuleOptions,
    form: Literal["flagembedding", "sentence-transformers"] = "flagembedding",
    split: str = "train",
    columns: ColumnOptions,
    batch_size: BatchSize = 32,
    device: str | None = None,
) -> None:
    """Mine hard negatives: documents that a model ranks high for a query and that are not judged
    relevant.

    Known positives are removed by id and by text. Documents that score too close to the positive
    are removed as likely relevant: by default above 95% of its score (Moreira et al. 2024).
    Embeddings stay in OUT-embeddings. The same command resumes an interrupted run. The processes of
    `accelerate launch` share the work.

    Args:
        model: model folder or name, of kind query-document or vector.
        data: training pairs: BEIR folder, csv / tsv / jsonl / parquet file, mined negatives, or
            data set by hub name.
        out: file to write: {"query", "pos", "neg", "pos_scores", "neg_scores", …}, one query a
            line; see form.
        form: flagembedding for rows as FlagEmbedding and `dualenc train` read them.
            sentence-transformers for rows that its losses train on: anchor, positive, negative_1,
            negative_2, …, a row for each positive, without scores; queries with fewer negatives
            than num_negatives are left out.
        split: split of a BEIR folder or a data set that has several.
        batch_size: items per forward pass.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.evaluation.report_page import Table, print_table
    from dualenc.workflows import mine_negatives

    mined = mine_negatives.mine(
        model,
        data,
        out=out,
        form=form,
        split=split,
        batch_size=batch_size,
        device=device,
        **vars(rule),
        **vars(columns),
    )
    # The processes of `accelerate launch` share the work and return the same counts.
    if not distributed.is_main():
        return
    # Every reason for a dropped candidate has its row: a window that drops too much shows there.
    counted = vars(mined.counts).items()
    rows = [{"what": name.replace("_", " "), "number": count} for name, count in counted]
    print_table(Table("Mined", rows))
    counts = f"{mined.counts.written:,} rows with {mined.counts.negatives:,} negatives"
    print_line(f"{counts} → {out}; embeddings in {mined.embeddings}")
