"""`dualenc mine`: hard negatives for training, found by a model."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dualenc.commands.checks import MAX_ITEMS, MAX_SEED, check_options
from dualenc.commands.options import ColumnOptions
from dualenc.errors import DualencError
from dualenc.files import check_folder_target, check_writable
from dualenc.hard_negatives import Rule
from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.search.mining import Report


def mine(
    model: str,
    data: str,
    *,
    out: str,
    rule: Rule,
    cross_encoder: str | None = None,
    form: Literal["flagembedding", "tevatron", "sentence-transformers"] = "flagembedding",
    factory: str = "exact",
    embeddings: str | None = None,
    split: str = "train",
    columns: ColumnOptions,
    batch_size: int = 32,
    dtype: Literal["float16", "float32"] = "float32",
    device: str | None = None,
) -> None:
    """Mine hard negatives: documents that a model ranks high for a query and that are not judged relevant.

    Known positives are removed by id and by text. Documents that score too close to the positive are removed as likely
    relevant: by default above 95 % of its score (Moreira et al. 2024); of several limits the lowest counts. The same
    command resumes an interrupted run. The processes of `accelerate launch` share the work.

    Args:
        model: model folder or name, of kind query-document or vector.
        data: training pairs: BEIR folder, csv / tsv / jsonl / parquet file, mined negatives, or data set by hub name.
        out: file to write: {"query", "pos", "neg", "pos_scores", "neg_scores", …}, one query a line; see form.
        cross_encoder: folder or name of a sentence-transformers CrossEncoder that scores pairs and candidates again;
            its scores then count for order and limits, and are kept.
        form: rows as FlagEmbedding or as Tevatron reads them; dualenc reads both. Or as the losses of
            sentence-transformers train on them: anchor, positive, negative_1, negative_2, …, a row for each positive,
            without scores; queries with fewer negatives than num_negatives are left out.
        factory: exact, or a FAISS factory string (auto chooses one) for a corpus too large to compare with.
        embeddings: folder to keep the embeddings in; by default OUT-embeddings.
        split: of a BEIR folder or a data set that has several.
        batch_size: items per forward pass, of the cross-encoder too.
        dtype: precision of the stored vectors.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc import distributed
    from dualenc.commands.output import embed_into, open_model, start_processes, writing
    from dualenc.data.corpus import corpora
    from dualenc.data.sources import open_pairs
    from dualenc.search.mining import mine_negatives
    from dualenc.search.rerank import open_cross_encoder

    folder = Path(embeddings or f"{Path(out)}-embeddings")
    _check(rule, Path(out), folder, factory, batch_size)
    device_to_use = start_processes(device)
    pairs = open_pairs(data, **vars(columns), split=split)
    left, right = corpora(pairs)
    if "image" in (left.modality, right.modality):
        raise DualencError(
            f"{data}: holds images, and rows of mined negatives hold texts; give texts or vectors"
        )
    encoder = open_model(model, ("query-document", "vector"), device_to_use)
    options: dict[str, Any] = {"rule": rule, "form": form, "factory": factory}
    if cross_encoder is not None:
        opened = open_cross_encoder(cross_encoder, batch_size=batch_size, device=str(device_to_use))
        options["rescore"], options["rescored_by"] = opened
    embedding: dict[str, Any] = {"batch_size": batch_size, "model": model, "dtype": dtype}
    with writing(out):
        queries = embed_into(folder / "queries", encoder.left, left, side="left", **embedding)
        documents = embed_into(folder / "documents", encoder.right, right, side="right", **embedding)
        report = mine_negatives(queries, documents, pairs, Path(out), **options)
    if distributed.is_main():
        _print_report(report)
        summary = f"{report.written:,} rows with {report.negatives:,} negatives → {out}"
        print(printable(f"{summary}; embeddings in {folder}"))
    distributed.barrier()


def _check(rule: Rule, target: Path, folder: Path, factory: str, batch_size: int) -> None:
    """Refuse options and output places that would fail after hours of work."""
    from dualenc.data.vector_shards import are_embeddings
    from dualenc.search.build import check_factory
    from dualenc.search.mining import check_mined

    check_options(
        1, MAX_ITEMS, num_negatives=rule.num_negatives, last_rank=rule.last_rank, batch_size=batch_size
    )
    check_options(0, MAX_SEED, seed=rule.seed)
    if factory != "exact":
        check_factory(factory)
    check_mined(target)
    check_writable(target.parent)
    check_folder_target(folder, are_embeddings, "embeddings of mining")


def _print_report(report: Report) -> None:
    """Print the histogram of scores and the counts."""
    from dualenc.evaluation.report import Table, print_table

    edges, counts = report.histogram()
    rows: list[dict[str, Any]] = []
    for bin_number, (low, high) in enumerate(itertools.pairwise(edges)):
        in_bin = {name: int(bins[bin_number]) for name, bins in counts.items()}
        rows.append({"score": f"{low:.2f} to {high:.2f}", **in_bin})
    print_table(Table("Scores", rows))
    numbers = {name.replace("_", " "): number for name, number in vars(report).items() if name != "scores"}
    print_table(Table("Mined", [{"what": name, "number": number} for name, number in numbers.items()]))
