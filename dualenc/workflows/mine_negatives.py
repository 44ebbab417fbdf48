"""Mine hard negatives for training with a model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Unpack

from dualenc.data.corpus import corpora
from dualenc.data.readers.sources import open_pairs
from dualenc.data.store.vector_shards import are_embeddings
from dualenc.io.files import check_folder_target, check_writable
from dualenc.search.hard_negatives import Rule
from dualenc.search.mining import (
    Form,
    Report,
    check_mined,
    check_modalities,
    mine_negatives,
)
from dualenc.types import StrPath
from dualenc.workflows.pair_columns import PairColumns
from dualenc.workflows.session import embed_into, open_model, start_processes, writing


@dataclass(frozen=True)
class MiningReport:
    """Counts of a mining run, and its output. The same on every process.

        report = mine("runs/first/model", "data/scifact", out="mined.jsonl")
        print(report.counts.negatives)

    Attributes:
        file: the file with the mined negatives, which `MinedPairs` reads.
        embeddings: folder with the embeddings of queries and documents.
        counts: how many queries, candidates and negatives there were, and what was dropped.
    """

    file: Path
    embeddings: Path
    counts: Report


def mine(
    model: str,
    data: str,
    *,
    out: StrPath,
    num_negatives: int = 8,
    first_rank: int = 1,
    last_rank: int = 100,
    relative: float | None = 0.95,
    pick: Literal["top", "random"] = "top",
    seed: int = 0,
    form: Form = "flagembedding",
    split: str = "train",
    batch_size: int = 32,
    device: str | None = None,
    progress: bool = True,
    **columns: Unpack[PairColumns],
) -> MiningReport:
    """Mine hard negatives: documents that a model ranks high and that are not judged relevant.

    Known positives are removed by id and by text. Documents that score too close to the positive
    are removed as likely relevant (Moreira et al. 2024, arXiv 2407.15831). The same call resumes an
    interrupted run. Same as `dualenc mine`.

        report = dualenc.mine("runs/first/model", "data/scifact", out="mined.jsonl")
        pairs = dualenc.data.MinedPairs(report.file)

    Args:
        model: model folder or name, of kind query-document or vector.
        data: training pairs: a BEIR folder, a table, mined negatives, or a hub name.
        out: file to write, .jsonl. Embeddings stay in OUT-embeddings.
        num_negatives: maximum number of negatives per query.
        first_rank: first rank of the window, counted from 1 without the known positives.
        last_rank: last rank of the window.
        relative: maximum share of the mean score of the query's positives; None for no limit.
        pick: take the best of the remaining candidates ("top"), or a random sample ("random").
        seed: random seed of the samples.
        form: "flagembedding" for {"query", "pos", "neg", …} rows, which `dualenc train` reads too;
            "sentence-transformers" for rows with anchor, positive, negative_1, …
        split: split of a data set that has several.
        batch_size: number of items per forward pass.
        device: torch device such as "cpu" or "cuda:0"; by default a GPU if there is one.
        progress: show progress bars.
        columns: how the columns of a table are read, see
            `dualenc.workflows.pair_columns.PairColumns`.

    Returns:
        The counts, the written file and the folder of embeddings.

    Raises:
        DualencError: if a rank or number is out of range, or the file holds something else.
    """
    rule = Rule(num_negatives, first_rank, last_rank, relative, pick, seed)
    target = Path(out)
    folder = Path(f"{target}-embeddings")
    # Before the model is loaded and hours of embedding: what would be refused at the end.
    check_mined(target)
    check_writable(target.parent)
    check_folder_target(folder, are_embeddings, "embeddings of mining")
    device_to_use = start_processes(device)
    pairs = open_pairs(data, split=split, **columns)
    # Distinct items of both sides, each embedded once. Their modalities are known before the model
    # is loaded.
    left, right = corpora(pairs)
    check_modalities(left, right, form)
    encoder = open_model(model, ("query-document", "vector"), device_to_use)
    settings: dict[str, Any] = {
        "batch_size": batch_size,
        "notes": {"model": model},
        "progress": progress,
    }
    # The lock keeps other runs from the same work folder; processes of this run share it.
    with writing(out):
        queries = embed_into(folder / "queries", encoder.left, left, side="left", **settings)
        documents = embed_into(folder / "documents", encoder.right, right, side="right", **settings)
        counts = mine_negatives(
            queries,
            documents,
            pairs,
            out,
            rule=rule,
            form=form,
            device=device_to_use,
            progress=progress,
        )
    return MiningReport(target, folder, counts)
