"""`dualenc index`: build a FAISS index, or add BM25 or texts to one."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from dualenc.commands.options import (
    BatchSize,
    BuildOptions,
    SourceOptions,
    TableNames,
    given_options,
    refuse_together,
)
from dualenc.commands.output import QUERY, print_line, print_next
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.workflows.build_index import IndexResult

RECALL_TOLERANCE = 0.01
"""A target counts as reached this far below it: recall is measured with a few hundred queries."""

Hidden = Parameter(show=False)


def index(
    source: str,
    data: str | None = None,
    *,
    out: str | None = None,
    build: BuildOptions,
    bm25: bool = False,
    texts: bool = False,
    ids: str | None = None,
    model: str | None = None,
    side: Literal["left", "right"] | None = None,
    items: SourceOptions,
    table: TableNames,
    batch_size: BatchSize = 32,
    device: str | None = None,
    append: Annotated[bool, Hidden] = False,
    remove: Annotated[str | None, Hidden] = None,
    verify: Annotated[bool, Hidden] = False,
) -> None:
    """Build a FAISS index from EMBEDDINGS, a FILE of vectors, or MODEL and DATA.

    Prints recall@10 against exact search and the latency of a query. If half of the memory does not
    hold the codes that refine an index, these are stored in a separate file.

    --bm25 also indexes the words of the texts, for `search --hybrid`. --texts keeps the texts, so
    that BM25 can follow `dualenc append` and `dualenc remove`. `dualenc index INDEX [DATA] --bm25
    --texts` adds them to an index.

    FILE is a FAISS file or a .npy matrix that other software wrote: `dualenc index vectors.npy
    texts.parquet --out index --texts`. Row i of the table describes vector i, unless the vectors
    have ids: those in a FAISS file, or of --ids.

    Vectors in a table of PostgreSQL stay there: `dualenc index postgresql://user@host/database
    --table docs --model MODEL --out docs-table` records where they are, and searches, adapt,
    evaluate and check take that folder.

    Args:
        source: folder of embeddings, FAISS file, .npy matrix, model folder or name; with --bm25 or
            --texts also an index; or postgresql://user@host/database with --table.
        data: data to embed with a model: BEIR folder, folder of images, table, tars, or hub name;
            with FILE the texts of its vectors, with their ids and --columns.
        out: folder to write: index.faiss, items.arrow, order.npy, meta.json.
        bm25: index the words of the texts beside the vectors.
        texts: keep the whole texts beside the vectors, for `dualenc append`, `dualenc remove` and
            `dualenc migrate`.
        ids: ids of the vectors of FILE: .txt with an id per line, .npy, or a table (--id-column).
        model: name of the model that made the vectors of FILE or of a table, to be recorded.
        side: side of the model, left or right; by default documents, or the side that encodes what
            the data holds.
        batch_size: items per forward pass.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    # Both before the import of the workflow, so that these mistakes are reported at once.
    _refuse_old_flags(append, remove, verify)
    if "://" in source:
        others: dict[str, Any] = {
            "DATA": data,
            "--bm25": bm25,
            "--texts": texts,
            "--ids": ids,
            "--side": side,
        }
        for group in (build, items):
            others |= given_options(group)
        del others["--metric"], others["--columns"]
        refuse_together("a table", others)
        _record_table(source, table, out, items, build, model)
        return
    refuse_together("--table without postgresql://", given_options(table))
    _check_together(data, out, build, side, items, reads_texts=bm25 or texts, ids=ids)
    from dualenc.workflows import build_index

    result = build_index.index(
        source,
        data,
        out=out,
        bm25=bm25,
        texts=texts,
        ids=ids,
        model=model,
        side=side,
        batch_size=batch_size,
        device=device,
        **vars(build),
        **vars(items),
    )
    print_index(result, source if out is None else out)


def _record_table(
    target: str,
    table: TableNames,
    out: str | None,
    items: SourceOptions,
    build: BuildOptions,
    model: str | None,
) -> None:
    """Record where the vectors of a table are."""
    if table.table is None or out is None:
        raise DualencError(
            "a table needs its name and a folder to write", fix="give --table TABLE --out FOLDER"
        )
    try:
        workflow = importlib.import_module("dualenc.workflows.record_table")
    except ImportError as error:
        raise DualencError(str(error), fix="pip install 'dualenc[postgres]'") from None
    recorded = workflow.record_table(
        target,
        table.table,
        out,
        names=table.columns(),
        columns=items.columns or (),
        model=model,
        metric=build.metric,
    )
    print_line(f"{recorded.count:,} vectors of dimension {recorded.dim} stay in the table → {out}")
    print_next(["search", out], QUERY)


def _refuse_old_flags(append: bool, remove: str | None, verify: bool) -> None:
    """Raise with the name of the command that has replaced a flag."""
    flags = {
        "--append": (append, "dualenc append INDEX MODEL DATA"),
        "--remove": (remove is not None, "dualenc remove INDEX IDS"),
        "--verify": (verify, "dualenc verify FOLDER"),
    }
    for flag, (is_given, verb) in flags.items():
        if is_given:
            raise DualencError(f"{flag} is now a separate command", fix=f"use {verb}")


def _check_together(
    data: str | None,
    out: str | None,
    build: BuildOptions,
    side: str | None,
    items: SourceOptions,
    *,
    reads_texts: bool,
    ids: str | None,
) -> None:
    """Raise if options would be ignored."""
    if out is None:
        added = {"--side": side, "--ids": ids, **given_options(build)}
        refuse_together("an index without --out", added)
    if data is None:
        reading = {} if reads_texts else given_options(items)
        if ids is not None:
            reading.pop("--id-column", None)
        refuse_together("EMBEDDINGS without DATA", {"--side": side, **reading})


def print_index(result: IndexResult, folder: str) -> None:
    """Print kind, recall and speed of an index, and the texts that were added."""
    # Texts that are added to an index come without a build.
    if result.num_vectors:
        _print_measurements(result, folder)
    if result.num_bm25:
        print_line(f"BM25 over {result.num_bm25:,} texts → {folder}")
    if result.num_texts:
        print_line(f"{result.num_texts:,} texts kept → {folder}")


def _print_measurements(result: IndexResult, folder: str) -> None:
    """Print kind, recall@10, latency and size of an index that was built."""
    built = result.provenance
    settings = "".join(f", {name}={value}" for name, value in built.search_parameters.items())
    kind = f"{built.factory}{settings}, {built.metric}"
    size = f"{result.num_vectors:,} vectors of dimension {result.dim}"
    print_line(f"{size} ({kind}) → {folder}")
    if built.recall_at_10 is None:
        return
    recall = built.recall_at_10
    print(f"recall@10 against exact search: {recall:.4f} ({built.recall_queries} queries)")
    target = built.target_recall or 0
    if recall < target - RECALL_TOLERANCE:
        advice = "give a --factory of finer codes or Refine(SQfp16)"
        print(f"this misses the target of {target:g}; {advice}")
    times = ", ".join(f"{name} {value:.2f} ms" for name, value in built.latency_ms.items())
    print(f"a query alone: {times}; {built.bytes_per_vector:,} bytes per vector")
