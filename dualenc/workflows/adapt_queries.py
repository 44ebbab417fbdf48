"""Train queries against the documents of an index, whose files do not change."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from dualenc import distributed
from dualenc.data.readers.clicks import IndexPairs
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import interpolate
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.io.files import remove, removed_if_refused
from dualenc.objectives import FrozenCorpus
from dualenc.search.documents import fingerprint, open_documents
from dualenc.search.index.open import Index, is_index
from dualenc.seeds import seed_everything
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.training.trainer import Trainer, TrainingResult
from dualenc.types import StrPath
from dualenc.workflows.adaptation_report import (
    TASK,
    AdaptResult,
    forgetting,
    quality_rows,
    write_adaptation,
)
from dualenc.workflows.adaptation_tasks import KNOWN, NEW, ClickSplit, measured_tasks, split_clicks
from dualenc.workflows.adapting import (
    SHARES,
    TOWERS,
    Interpolated,
    QuerySide,
    Trained,
    best_share,
    score_interpolations,
)
from dualenc.workflows.result_folder import check_result_folder
from dualenc.workflows.session import start_processes, writing

WORK = ".adapt"
"""Folder in the output for the vectors of a run. It marks the output of an interrupted run."""
PATIENCE = 3
EPOCHS = {"perceptron": 12, "linear": 12, "lora": 3, "all": 3}
LEARNING_RATES = {"perceptron": 1e-3, "linear": 1e-3, "lora": 2e-4, "all": 2e-5}


def adapt(
    index: str,
    clicks: str,
    *,
    out: StrPath,
    train: Trained = "perceptron",
    epochs: int | None = None,
    batch_size: int = 32,
    learning_rate: float | None = None,
    temperature: float = 0.03,
    held_out: float = 0.1,
    keep: float | None = None,
    seed: int = 0,
    query_column: str | None = None,
    document_column: str | None = None,
    label_column: str | None = None,
    split: str = "train",
    model: str | None = None,
    test: str | None = None,
    second: str | None = None,
    resume: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> AdaptResult:
    """Train queries by the exact softmax over all documents of an index.

    The vectors of the index are read and never written. OUT/model is a query model for the index.

        from dualenc import adapt

        result = adapt("index", "clicks.csv", out="adapted")
        print(result.quality)

    Args:
        index: FAISS index, folder of embeddings, BEIR folder of vectors, or what `dualenc push`
            wrote.
        clicks: table with a query and the id of a relevant document in each row, or a BEIR folder.
        out: folder to write: model, training, metrics.json, report.html.
        train: what is trained: a "perceptron" or "linear" map of query vectors (seconds), adapters
            of the text model ("lora") or "all" of it (minutes).
        epochs: maximum number of passes over the pairs; None takes 12 for a map, 3 for a model.
        batch_size: number of queries in a step.
        learning_rate: None takes 1e-3 for a map, 2e-4 for "lora", 2e-5 for "all".
        temperature: temperature τ of the softmax over all documents.
        held_out: share of the pairs to hold out by their documents, from 0 to 0.9; with 0 nothing
            is measured and `keep` must be given.
        keep: share of the original weights in the result, from 0 to 1; None takes the best share
            for held-out queries among those that do not harm queries of new documents.
        seed: random seed for the split, the initial weights and the batches.
        query_column: column with texts or vectors; None finds a usual name.
        document_column: column with ids of documents; None finds a usual name.
        label_column: column that is 0 where a document is not relevant; None finds a column of
            labels with a usual name, "none" reads none.
        split: split of a BEIR folder, a folder of tables or a hub name.
        model: model folder or name, if the index's model has moved.
        test: BEIR folder whose test queries are measured too, over the documents of the index.
        second: BEIR folder of another task whose test queries are measured, to see what is
            forgotten.
        resume: continue an interrupted training from its latest checkpoint.
        device: name of the device, such as "cpu" or "cuda:0"; None takes a GPU if there is one.
        progress: show progress bars.

    Returns:
        The quality of the original and the adapted model, and where the model is.

    Raises:
        DualencError: an argument is not usable, the model did not build the index, or `out` holds
            something else.
    """
    _check_arguments(train, held_out, keep)
    folder = Path(out)
    _check_output(folder, resume)
    chosen = start_processes(device)
    with writing(folder), removed_if_refused(folder, "training"):
        work = folder / WORK
        work.mkdir(parents=True, exist_ok=True)
        # Before anything opens the index: the report promises that it has not changed.
        checksum = fingerprint(index)
        documents = open_documents(index, work)
        clicked = IndexPairs(
            clicks,
            documents,
            query_column=query_column,
            document_column=document_column,
            label_column=label_column,
            split=split,
        )
        side = QuerySide(
            documents,
            clicked.left_modality,
            train,
            source=index,
            model=model,
            work=work,
            device=chosen,
            progress=progress,
        )
        parts = split_clicks(side.pairs(clicked), documents, held_out, seed)
        settings = _Settings(epochs, batch_size, learning_rate, temperature, seed)
        run = _Run(folder, clicks, checksum, side, parts, settings)
        # Opened before the training: a test folder that does not fit fails now and not in hours.
        tasks = measured_tasks(parts, side, test, second)
        result = _adapt(run, tasks, keep, resume)
        if distributed.is_main():
            remove(work)
        # Hold the lock until the files are complete.
        distributed.barrier()
    return result


def _check_arguments(train: Trained, held_out: float, keep: float | None) -> None:
    """Raise if arguments are out of range or leave the share of original weights undecided."""
    if train not in get_args(Trained):
        raise DualencError(
            f"train is {train!r}", fix=f"choose one of {', '.join(get_args(Trained))}"
        )
    if keep is not None and not 0 <= keep <= 1:
        raise DualencError(f"keep must be in [0, 1], got {keep}")
    if held_out == 0 and keep is None:
        raise DualencError(
            "--held-out 0 leaves no query to choose the share of the original weights by",
            fix="set --keep, for instance --keep 0.5, or hold some pairs out",
        )


def _check_output(folder: Path, resume: bool) -> None:
    """Raise if an adaptation cannot be written to a folder."""
    # An interrupted run has its work folder, which is made first and removed last.
    check_result_folder(folder, TASK, "adaptation", lambda path: (path / WORK).is_dir())
    # Training again would replace a model that took hours: only an explicit --resume goes on.
    if (folder / "training").exists() and not resume:
        raise DualencError(
            "holds an adaptation, finished or not",
            fix="continue it with --resume, or choose another --out",
            where=folder,
        )


class _Settings(NamedTuple):
    """How the queries are trained; see `adapt`."""

    epochs: int | None
    batch_size: int
    learning_rate: float | None
    temperature: float
    seed: int


@dataclass(frozen=True)
class _Run:
    """An adaptation that can start; `checksum` is that of the index before."""

    folder: Path
    clicks: str
    checksum: str
    side: QuerySide
    split: ClickSplit
    settings: _Settings


def _adapt(
    run: _Run, tasks: Mapping[str, IndexEvaluator], keep: float | None, resume: bool
) -> AdaptResult:
    """Train, measure, choose the share of the original weights, and write model and report."""
    original, adapted, training = _train(run, resume)
    # A given share may lie between the usual ones.
    shares = sorted({*SHARES} if keep is None else {*SHARES, keep})
    points = score_interpolations(original, adapted, tasks, shares)
    share, reason = _choose_share(points, keep, run.split.unmeasured)
    adapted.load_state_dict(interpolate(original, adapted, share))
    checksum = _save(run, adapted)
    result = AdaptResult(
        folder=run.folder,
        model_folder=run.folder / "model",
        keep=share,
        quality=quality_rows(points, share),
        forgetting=forgetting(points, share),
        facts={
            **_facts(run, training),
            "original weights kept": share,
            "model": str(run.folder / "model"),
            "checksum of the index": checksum,
            "chosen by": reason,
        },
        unmeasured=run.split.unmeasured,
        query_modality=run.side.modality,
    )
    # Every process returns the same result, but only one writes.
    if distributed.is_main():
        write_adaptation(result, points)
    return result


def _train(run: _Run, resume: bool) -> tuple[DualEncoder, DualEncoder, TrainingResult]:
    """Return the model before training, the one with the best weights, and the training result."""
    side = run.side
    pairs = run.split.parts.train
    # Initial weights depend on the seed alone, and not on what was embedded before.
    seed_everything(run.settings.seed)
    original = side.new_model(pairs.left_dim)
    # A model that cannot be saved should fail before the training.
    side.finished(original, run.split.trained_ids)
    evaluator = None
    if run.split.parts.held_out is not None:
        evaluator = IndexEvaluator.of_pairs(run.split.parts.held_out, side.documents)
    training = _trainer(run).fit(
        # The original is needed afterwards, to interpolate between both.
        copy.deepcopy(original),
        pairs,
        _objective(side, pairs.num_left, run.settings.temperature),
        evaluator=evaluator,
        resume=resume,
    )
    return original, load_model(training.model_folder, side.device), training


def _trainer(run: _Run) -> Trainer:
    """Return a trainer that stops when held-out queries no longer improve."""
    trained = run.side.trained
    epochs, batch_size, learning_rate, _, seed = run.settings
    num_pairs = len(run.split.parts.train)
    # A batch larger than the data would leave no step.
    batch_size = min(batch_size, num_pairs)
    is_measured = run.split.parts.held_out is not None
    return Trainer(
        output=run.folder / "training",
        batch_size=batch_size,
        # Not `or`: the trainer should refuse 0.
        epochs=EPOCHS[trained] if epochs is None else epochs,
        learning_rate=LEARNING_RATES[trained] if learning_rate is None else learning_rate,
        # Maps are too small to gain from half precision.
        mixed_precision="no" if trained in TOWERS else "auto",
        # Once per epoch.
        evaluate_every=max(1, num_pairs // batch_size) if is_measured else None,
        patience=PATIENCE if is_measured else None,
        seed=seed,
        progress=run.side.progress,
    )


def _objective(side: QuerySide, num_left: int, temperature: float) -> FrozenCorpus:
    """Return the softmax over all documents.

    With more documents than can be summed exactly, it uses those that the index finds and a sample.
    """
    # Only an index can find the nearest documents; without one, all of them are summed.
    search = None
    if is_index(side.source):
        opened = Index.open(side.source)

        def search(queries: np.ndarray, nearest: int) -> np.ndarray:
            return opened.search_rows(queries, nearest)[1]

    return FrozenCorpus(
        side.documents.vectors,
        search=search,
        num_left=num_left,
        temperature=temperature,
        # Include the positive in the sum, as a softmax does.
        positive_in_softmax=True,
    )


def _choose_share(
    points: Sequence[Interpolated], keep: float | None, unmeasured: str | None
) -> tuple[float, str]:
    """Choose the share of the original weights, and say how: given, 1, or the best measured."""
    if keep is not None:
        return keep, "--keep"
    if unmeasured is not None:
        return 1.0, f"default: the original, since {unmeasured}"
    # Only held-out queries choose: a choice by test queries would make their scores too high.
    held_out = [task for task in (NEW, KNOWN) if task in points[0].scores]
    reason = (
        "the held-out queries, whose numbers are therefore too high; measure others with --test"
    )
    return best_share(points, NEW, held_out), reason


def _save(run: _Run, adapted: DualEncoder) -> str:
    """Save the model; return the checksum of the index, and whether it is the same as before."""
    after = ""
    # Only one process reads the whole index again.
    if distributed.is_main():
        # The model remembers its documents, so that evaluations can separate new from known ones.
        run.side.finished(adapted, run.split.trained_ids).save(run.folder / "model")
        after = fingerprint(run.side.source)
    after = distributed.broadcast_object(after)
    state = "the same" if after == run.checksum else "CHANGED"
    return f"{run.checksum[:16]}, {state} after as before"


def _facts(run: _Run, training: TrainingResult) -> dict[str, object]:
    """Return the settings and counts of a training."""
    temperature = f"temperature {run.settings.temperature:g}"
    return {
        "index": run.side.source,
        "documents": len(run.side.documents),
        "queries from": run.clicks,
        "pairs in training": len(run.split.parts.train),
        "documents in training": len(run.split.trained_ids),
        "trained": run.side.trained,
        "objective": f"FrozenCorpus, {temperature}, batches of {run.settings.batch_size}",
        "steps": training.steps,
        "seconds": round(training.seconds),
        "seed": run.settings.seed,
    }
