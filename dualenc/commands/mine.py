"""`dualenc mine`: hard negatives for training, found by a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dualenc.commands.options import BatchSize, ColumnOptions
from dualenc.io.files import check_folder_target, check_writable
from dualenc.io.terminal import printable
from dualenc.search.hard_negatives import Rule


def mine(
    model: str,
    data: str,
    *,
    out: str,
    rule: Rule,
    form: Literal["flagembedding", "sentence-transformers"] = "flagembedding",
    split: str = "train",
    columns: ColumnOptions,
    batch_size: BatchSize = 32,
    device: str | None = None,
) -> None:
    """Mine hard negatives: documents that a model ranks high for a query and that are not judged
    relevant.

    Known positives are removed by id and by text. Documents that score too close to the positive
    are removed as likely relevant: by default above 95 % of its score (Moreira et al. 2024).
    Embeddings stay in OUT-embeddings. The same command resumes an interrupted run. The processes of
    `accelerate launch` share the work.

    Args:
        model: model folder or name, of kind query-document or vector.
        data: training pairs: BEIR folder, csv / tsv / jsonl / parquet file, mined negatives, or
            data set by hub name.
        out: file to write: {"query", "pos", "neg", "pos_scores", "neg_scores", …}, one query a
            line; see form.
        form: rows as FlagEmbedding and `dualenc train` read them. Or as the losses of
            sentence-transformers train on them: anchor, positive, negative_1, negative_2, …, a row
            for each positive, without scores; queries with fewer negatives than num_negatives are
            left out.
        split: of a BEIR folder or a data set that has several.
        batch_size: items per forward pass.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.data.corpus import corpora
    from dualenc.data.readers.sources import open_pairs
    from dualenc.data.store.vector_shards import are_embeddings
    from dualenc.evaluation.report_page import Table, print_table
    from dualenc.search.mining import check_mined, check_modalities, mine_negatives
    from dualenc.workflows.session import embed_into, open_model, start_processes, writing

    target = Path(out)
    folder = Path(f"{target}-embeddings")
    # Output places are refused before hours of work.
    check_mined(target)
    check_writable(target.parent)
    check_folder_target(folder, are_embeddings, "embeddings of mining")
    device_to_use = start_processes(device)
    pairs = open_pairs(data, **vars(columns), split=split)
    left, right = corpora(pairs)
    check_modalities(left, right, form)
    encoder = open_model(model, ("query-document", "vector"), device_to_use)
    embedding: dict[str, Any] = {"batch_size": batch_size, "notes": {"model": model}}
    with writing(out):
        queries = embed_into(folder / "queries", encoder.left, left, side="left", **embedding)
        documents = embed_into(
            folder / "documents", encoder.right, right, side="right", **embedding
        )
        report = mine_negatives(
            queries, documents, pairs, out, rule=rule, form=form, device=device_to_use
        )
    if distributed.is_main():
        rows = [
            {"what": name.replace("_", " "), "number": count}
            for name, count in vars(report).items()
        ]
        print_table(Table("Mined", rows))
        summary = f"{report.written:,} rows with {report.negatives:,} negatives → {out}"
        print(printable(f"{summary}; embeddings in {folder}"))
    distributed.barrier()
