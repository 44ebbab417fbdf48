"""`dualenc adapt`: train queries against the documents of an index, which stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators
from cyclopts.types import NormFloat, PositiveFloat, PositiveInt, UInt32

from dualenc.commands.options import BatchSize


@dataclass(frozen=True)
class AdaptOptions:
    """What is trained, on which pairs, and how long.

    Args:
        train: a perceptron or a linear map of the query vectors (seconds), adapters of the text
            model (lora) or all of it (minutes).
        epochs: passes over the pairs at most; training ends earlier where held-out queries gain
            nothing. By default 12 of a map, 3 of a text model.
        batch_size: queries in a step.
        learning_rate: by default 1e-3 of a map, 2e-4 (lora) or 2e-5 (all).
        temperature: τ of the softmax over all documents.
        held_out: share of the pairs to hold out, by their documents; 0 trains on all pairs,
            measures nothing and needs --keep.
        keep: share of the original weights in the result, from 0 to 1; by default the best one for
            held-out queries among those that cost queries of new documents nothing. Where held-out
            queries name too few documents to measure that, the default is 1, the original.
        seed: of everything random.
    """

    train: Literal["perceptron", "linear", "lora", "all"] = "perceptron"
    epochs: PositiveInt | None = None
    batch_size: BatchSize = 32
    learning_rate: PositiveFloat | None = None
    temperature: Annotated[float, Parameter(validator=validators.Number(gte=1e-3, lte=10))] = 0.03
    held_out: Annotated[float, Parameter(validator=validators.Number(gte=0, lte=0.9))] = 0.1
    keep: NormFloat | None = None
    seed: UInt32 = 0


@dataclass(frozen=True)
class ClickOptions:
    """Where the queries are.

    Args:
        query_column: of a table, with texts or vectors, where it has no usual name.
        document_column: of a table, with ids of documents, where it has no usual name.
        label_column: of a table, 0 where the document was not clicked or is not relevant; by
            default a column with a usual name that holds labels; none reads none.
        split: of a BEIR folder, a folder of tables or a hub name.
        model: the model of the index, if it has moved.
        test: BEIR folder whose test queries are measured, too; its documents are those of the
            index.
        second: BEIR folder of another task, whose test queries are measured, too: what does the
            model forget?
    """

    query_column: str | None = None
    document_column: str | None = None
    label_column: str | None = None
    split: str = "train"
    model: str | None = None
    test: str | None = None
    second: str | None = None


def adapt(
    index: str,
    clicks: str,
    *,
    out: str,
    columns: ClickOptions,
    options: AdaptOptions,
    resume: bool = False,
    device: str | None = None,
) -> None:
    """Train queries by the exact softmax over all documents of an index, whose vectors are read and
    never written.

    OUT/model is a query model for the same index: `dualenc search INDEX --model OUT/model "…"`. The
    report has nDCG@10 of held-out queries whose documents no training pair names, and of others,
    beside the model as it was.

    Args:
        index: FAISS index, folder of embeddings, BEIR folder of vectors, or what `dualenc push`
            wrote.
        clicks: table with a query and the id of a relevant document in each row, or a BEIR folder.
        out: folder to write: model, training, metrics.json, report.html.
        resume: continue an interrupted training from its latest checkpoint.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    from dualenc.commands.adapt_index import adapt_index

    adapt_index(index, clicks, Path(out), columns, options, resume, device)
