"""`dualenc adapt`: train queries against the documents of an index, without changing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter, validators
from cyclopts.types import NormFloat, PositiveFloat, PositiveInt, UInt32

from dualenc.commands.options import BatchSize
from dualenc.commands.output import QUERY, print_line, print_next
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from dualenc.workflows.adaptation_report import AdaptResult


@dataclass(frozen=True)
class AdaptOptions:
    """The trained part, the training pairs and the length of training.

    Args:
        train: what is trained: a perceptron or a linear map of the query vectors (seconds),
            adapters of the text model (lora) or all of it (minutes).
        epochs: number of passes over the pairs; by default 12 for a map, 3 for a text model, whose
            training, as any on over 5,000 pairs, ends earlier if held-out queries do not improve.
        batch_size: queries in a step.
        learning_rate: learning rate; by default 1e-3 for a map, 2e-4 (lora) or 2e-5 (all).
        temperature: temperature τ of the softmax over all documents.
        held_out: share of the pairs that each fold holds out, by their documents; 0 measures
            nothing and needs --keep. The final training has all pairs.
        keep: share of the original weights in the result, from 0 to 1; by default the best share
            for held-out queries among those that do not harm queries of new documents. If held-out
            queries name too few documents to measure that, it is 0.5 where that lowers no mean of
            held-out queries, or else 1, the original.
        require_gain: gain in nDCG@10 that held-out queries must show by their 95% interval: those
            of the last tenth of the log if it has times, or else those held out by document.
            Otherwise the model is the original, and the exit code is 1.
        seed: random seed for the split, the initial weights and the batches.
    """

    train: Literal["perceptron", "linear", "lora", "all"] = "perceptron"
    epochs: PositiveInt | None = None
    batch_size: BatchSize = 32
    learning_rate: PositiveFloat | None = None
    temperature: Annotated[float, Parameter(validator=validators.Number(gte=1e-3, lte=10))] = 0.03
    held_out: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=0.9))] = 0.2
    keep: NormFloat | None = None
    require_gain: Annotated[float | None, Parameter(validator=validators.Number(gte=-1, lte=1))] = (
        None
    )
    seed: UInt32 = 0


@dataclass(frozen=True)
class LogOptions:
    """How logs are read, and which other queries are measured.

    Args:
        query_column: column with texts, vectors or images of queries; by default, as for the other
            columns, one with a usual name whose values fit. `none` reads no such column.
        document_column: column with ids of documents, or lists of the ids that were shown.
        label_column: column that says whether, or how often, the document was clicked (0: shown
            only), or lists of the ids or ranks that were clicked.
        position_column: column with the position in the results list, from 1.
        session_column: column that names the results list or session of a row.
        time_column: column with times. With times, the last tenth of the log is held out, too.
        action_column: column with what was done: click, cart, purchase, impression.
        impressions_column: column with the number of times that the document was shown.
        weight_column: column with relevance that is taken as it is, such as scores of a teacher.
        weights: weights of actions, such as click=1 cart=2 purchase=5; by default 1 for all.
        click_model: JSON file with known propensities, in place of those estimated from the log.
        split: split of a BEIR folder, a folder of tables or a hub name.
        model: model of the index, if it has moved; or another text model, if it is gone.
        test: BEIR folder whose test queries are measured too, over the documents of the index.
        second: BEIR folder of another task whose test queries are measured too, to see what the
            model forgets.
    """

    query_column: str | None = None
    document_column: str | None = None
    label_column: str | None = None
    position_column: str | None = None
    session_column: str | None = None
    time_column: str | None = None
    action_column: str | None = None
    impressions_column: str | None = None
    weight_column: str | None = None
    weights: Annotated[list[str] | None, Parameter(consume_multiple=True)] = None
    click_model: str | None = None
    split: str = "train"
    model: str | None = None
    test: str | None = None
    second: str | None = None


def adapt(
    index: str,
    *logs: str,
    out: str,
    columns: LogOptions,
    options: AdaptOptions,
    start_from: Annotated[str | None, Parameter(name="--from")] = None,
    resume: bool = False,
    device: str | None = None,
) -> None:
    """Train queries by the exact softmax over all documents of an index.

    The vectors of the index are read and never written. OUT/model is a query model for the same
    index: `dualenc search INDEX --model OUT/model "…"`. The report compares nDCG@10 with the
    original model for held-out queries whose documents are in no training pair, and for others.

    If the model of the index is gone, --model names another text model: its queries learn to find
    the vectors of the index, from the texts that it keeps, with logs or without.

    Args:
        index: FAISS index, folder of embeddings, BEIR folder of vectors, or what `dualenc push`
            wrote.
        logs: one or several: clicks, impressions, events, results lists (csv, tsv, jsonl, parquet,
            folders of them), UBI, scores of a teacher, or BEIR folders.
        out: folder to write: model, training, metrics.json, report.html.
        start_from: output of an earlier run on this index, whose model training begins at: the
            original of the report and of --keep. Only queries that it was not trained on are held
            out.
        resume: continue an interrupted training from its latest checkpoint.
        device: device, such as cpu or cuda:0; by default a GPU if there is one.
    """
    # Imported here: with torch at the top, `--help` would take seconds.
    from dualenc import distributed
    from dualenc.workflows import adapt_queries

    read = {**vars(columns), "weights": _weights(columns.weights)}
    result = adapt_queries.adapt(
        index,
        logs,
        out=out,
        start_from=start_from,
        resume=resume,
        device=device,
        **read,
        **vars(options),
    )
    # Every process has the result; only one prints it.
    if distributed.is_main():
        _print_result(result)
        # A model that is not better is not to be used next.
        if result.gate is None or result.gate.passed:
            print_next(*_next_command(index, result))
    if result.gate is not None:
        result.gate.check()


def _weights(words: list[str] | None) -> dict[str, float] | None:
    """Return the weights that words such as click=1 give."""
    if words is None:
        return None
    weights = {}
    for word in words:
        name, equals, value = word.rpartition("=")
        try:
            weights[name] = float(value)
        except ValueError:
            equals = ""
        if not equals or not name:
            raise DualencError(
                f"--weights has {word!r}", fix="give weights such as --weights click=1 purchase=5"
            )
    return weights


def _print_result(result: AdaptResult) -> None:
    """Print the quality, what was forgotten, and where the files are."""
    from dualenc.evaluation.plots import MISSING, can_draw
    from dualenc.evaluation.report_page import print_table

    print_line(result.finding)
    if result.quality:
        print_table(result.short_table())
    for line in result.notices():
        print_line(line)
    # The page without curves is not a failure: matplotlib is an extra.
    if not can_draw():
        print(f"report.html lacks curves: {MISSING}")
    print_line(f"checksum of the index: {result.facts['checksum of the index']}")
    print_line(f"model, metrics and report.html are in {result.folder}")


def _next_command(index: str, result: AdaptResult) -> tuple[list[str], str | None]:
    """Return how to use the model: search an index or an engine, or evaluate over embeddings."""
    from dualenc.search.engines.pushed_folder import is_pushed
    from dualenc.search.index.open import is_index

    model = f"{result.folder}/model"
    # Only an index or an engine can be searched; embeddings are only good for measuring.
    if is_index(index) or is_pushed(index):
        query = {"text": QUERY, "image": "QUERY.jpg", "vector": "QUERY.npy"}[result.query_modality]
        return ["search", index, "--model", model], query
    return ["evaluate", "retrieval", model, "BEIR-FOLDER", "--documents", index], None
