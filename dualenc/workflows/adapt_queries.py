"""Train queries against the documents of an index, whose files do not change."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from dualenc import distributed
from dualenc.data.document_splits import DocumentSplit
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.clicks import IndexPairs
from dualenc.data.store.vector_shards import Embeddings
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
from dualenc.training.log import read_metrics
from dualenc.training.trainer import Trainer, TrainingResult
from dualenc.types import Integers, StrPath
from dualenc.workflows.adaptation_choice import (
    DEFAULT_ALPHA,
    Choice,
    Compared,
    HeldOut,
    Trial,
    choose,
    unmeasured_choice,
)
from dualenc.workflows.adaptation_report import (
    TASK,
    AdaptResult,
    finding_of,
    forgetting,
    quality_rows,
    write_adaptation,
)
from dualenc.workflows.adaptation_tasks import (
    ClickFolds,
    first_documents,
    fold_clicks,
    held_out_tasks,
    measured_tasks,
)
from dualenc.workflows.adapting import (
    SHARES,
    TOWERS,
    Interpolated,
    QuerySide,
    Trained,
    score_interpolations,
)
from dualenc.workflows.result_folder import check_result_folder
from dualenc.workflows.session import start_processes, writing

WORK = ".adapt"
"""Folder in the output for the vectors of a run. It marks the output of an interrupted run."""
PATIENCE = 3
EPOCHS = {"perceptron": 12, "linear": 12, "lora": 3, "all": 3}
FOLDS = 5
MANY_PAIRS = 5000
"""From so many pairs on, two folds hold enough queries out."""
ALPHAS = (math.inf, DEFAULT_ALPHA)
"""Weights of documents to choose from, see `Choice.alpha`."""
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
    held_out: float = 0.2,
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
        held_out: share of the pairs that each of five folds (two of more than 5,000 pairs, one for
            a text model) holds out by their documents, from 0 to 0.9; with 0 nothing is measured
            and `keep` must be given. The final training has all pairs.
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
        pairs = side.pairs(clicked)
        folds = fold_clicks(pairs, documents, held_out, _num_folds(train, len(pairs)), seed)
        settings = _Settings(epochs, batch_size, learning_rate, temperature, seed)
        run = _Run(folder, clicks, checksum, side, folds, settings)
        # Opened before the training: a test folder that does not fit fails now and not in hours.
        tasks = measured_tasks(folds.trained_ids, side, test, second)
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


def _num_folds(train: Trained, num_pairs: int) -> int:
    """Return the number of folds: fewer where each takes long, or holds enough queries out."""
    if train not in TOWERS:
        return 1
    return FOLDS if num_pairs <= MANY_PAIRS else 2


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
    clicked: ClickFolds
    settings: _Settings

    @property
    def epochs(self) -> int:
        """Maximum number of passes over the pairs."""
        given = self.settings.epochs
        return EPOCHS[self.side.trained] if given is None else given

    def batch_size(self, pairs: PairDataset) -> int:
        """Return the batch size: one larger than the data would leave no step."""
        return min(self.settings.batch_size, len(pairs))


def _adapt(
    run: _Run, tasks: Mapping[str, IndexEvaluator], keep: float | None, resume: bool
) -> AdaptResult:
    """Choose by folds, train on all pairs, measure, and write model and report."""
    # Initial weights depend on the seed alone, and not on what was embedded before.
    seed_everything(run.settings.seed)
    original = run.side.new_model(run.clicked.pairs.left_dim)
    # A model that cannot be saved should fail before the training.
    run.side.finished(original, run.clicked.trained_ids)
    # A given share may lie between the usual ones.
    shares = sorted({*SHARES} if keep is None else {*SHARES, keep})
    choice = _choose(run, original, shares, keep, resume)
    adapted, steps = copy.deepcopy(original), 0
    points: list[Interpolated] = []
    if choice.keep < 1:
        adapted, steps = _train_all(run, original, choice, resume)
    if tasks:
        points = score_interpolations(original, adapted, tasks, shares)
    adapted.load_state_dict(interpolate(original, adapted, choice.keep))
    compared = {**choice.compared, **_compare(points, tasks, choice.keep, run.side.documents)}
    result = AdaptResult(
        folder=run.folder,
        model_folder=run.folder / "model",
        keep=choice.keep,
        alpha=choice.alpha,
        quality=quality_rows(compared),
        forgetting=forgetting(points, choice.keep),
        facts={
            **_facts(run, choice, steps),
            "checksum of the index": _save(run, adapted),
            "chosen by": choice.reason,
        },
        finding=finding_of(choice),
        unmeasured=choice.unmeasured,
        query_modality=run.side.modality,
    )
    # Every process returns the same result, but only one writes.
    if distributed.is_main():
        write_adaptation(result, choice.curves, points)
    return result


def _choose(
    run: _Run, original: DualEncoder, shares: Sequence[float], keep: float | None, resume: bool
) -> Choice:
    """Train on every fold, and choose by the held-out queries of all."""
    folds, documents = run.clicked.folds, run.side.documents
    if run.clicked.unmeasured is not None:
        return unmeasured_choice(keep, run.clicked.unmeasured)
    alphas = ALPHAS if run.side.trained in TOWERS else (DEFAULT_ALPHA,)
    trials: list[list[Trial]] = []
    groups: list[dict[str, Integers]] = []
    for number, fold in enumerate(folds):
        tasks = held_out_tasks(fold, documents)
        trials.append([])
        for alpha in alphas:
            name = f"fold-{number}-{_name_of(alpha)}"
            adapted, epochs = _train_fold(run, original, fold, alpha, name, resume)
            points = score_interpolations(original, adapted, tasks, shares)
            trials[-1].append(Trial(alpha, epochs, points))
        groups.append({task: first_documents(each, documents) for task, each in tasks.items()})
    choice = choose(HeldOut.of_folds(trials, groups), keep)
    # Rounding may differ by process, and all must make the same choice.
    return distributed.broadcast_object(choice)


def _name_of(alpha: float) -> str:
    """Return how folders name a value of α."""
    return "alike" if math.isinf(alpha) else f"alpha-{alpha:g}"


def _train_fold(
    run: _Run, original: DualEncoder, fold: DocumentSplit, alpha: float, name: str, resume: bool
) -> tuple[DualEncoder, float]:
    """Train on a fold until its held-out queries do not improve.

    Returns:
        The best model; the number of passes over the pairs after which it was the best.
    """
    assert fold.held_out is not None
    pairs = fold.train
    batch_size = run.batch_size(pairs)
    trainer = _trainer(
        run,
        pairs,
        name,
        epochs=run.epochs,
        # Once per epoch.
        evaluate_every=max(1, len(pairs) // batch_size),
        patience=PATIENCE,
    )
    evaluator = IndexEvaluator.of_pairs(fold.held_out, run.side.documents)
    training = _fit(run, trainer, original, pairs, alpha, evaluator, resume)
    step = distributed.from_main(partial(_best_step, Path(trainer.output), evaluator.primary))
    return load_model(training.model_folder, run.side.device), step * batch_size / len(pairs)


def _best_step(folder: Path, metric: str) -> int:
    """Return the step of a training after which it was best, by its log."""
    name = f"evaluation/{metric}"
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if name in line]
    after = [line for line in lines if line["step"] > 0]
    return int(max(after, key=itemgetter(name))["step"])


def _train_all(
    run: _Run, original: DualEncoder, choice: Choice, resume: bool
) -> tuple[DualEncoder, int]:
    """Train on all pairs for as many passes as were best for the folds; return model and steps."""
    pairs = run.clicked.pairs
    epochs = run.epochs if choice.epochs is None else choice.epochs
    steps = max(1, round(epochs * len(pairs) / run.batch_size(pairs)))
    # Another choice is another training.
    name = f"all-{_name_of(choice.alpha)}-{steps}"
    trainer = _trainer(run, pairs, name, max_steps=steps)
    training = _fit(run, trainer, original, pairs, choice.alpha, None, resume)
    return load_model(training.model_folder, run.side.device), training.steps


def _trainer(run: _Run, pairs: PairDataset, name: str, **length: Any) -> Trainer:
    """Return a trainer of a fold or of all pairs, with `length` as its further settings."""
    trained, settings = run.side.trained, run.settings
    rate = settings.learning_rate
    return Trainer(
        output=run.folder / "training" / name,
        batch_size=run.batch_size(pairs),
        # Not `or`: the trainer should refuse 0.
        learning_rate=LEARNING_RATES[trained] if rate is None else rate,
        # Maps are too small to gain from half precision.
        mixed_precision="no" if trained in TOWERS else "auto",
        seed=settings.seed,
        progress=run.side.progress,
        **length,
    )


def _fit(
    run: _Run,
    trainer: Trainer,
    original: DualEncoder,
    pairs: PairDataset,
    alpha: float,
    evaluator: IndexEvaluator | None,
    resume: bool,
) -> TrainingResult:
    """Train a copy of the original; a finished training is only read."""
    weights = None
    if not math.isinf(alpha):
        weights = np.bincount(pairs.right_id, pairs.weights, len(run.side.documents)) + alpha
    return trainer.fit(
        # The original is needed afterwards, to interpolate between both.
        copy.deepcopy(original),
        pairs,
        _objective(run.side, pairs.num_left, run.settings.temperature, weights),
        evaluator=evaluator,
        resume=resume,
    )


def _objective(
    side: QuerySide, num_left: int, temperature: float, weights: np.ndarray | None
) -> FrozenCorpus:
    """Return the softmax over all documents, weighted by (N,) weights.

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
        weights=weights,
        search=search,
        num_left=num_left,
        temperature=temperature,
        # Include the positive in the sum, as a softmax does.
        positive_in_softmax=True,
    )


def _compare(
    points: Sequence[Interpolated],
    tasks: Mapping[str, IndexEvaluator],
    keep: float,
    documents: Embeddings,
) -> dict[str, Compared]:
    """Return the scores of test queries before and after."""
    by_share = {point.keep: point.scores for point in points}
    return {
        task: Compared(by_share[1][task], by_share[keep][task], first_documents(each, documents))
        for task, each in tasks.items()
    }


def _save(run: _Run, adapted: DualEncoder) -> str:
    """Save the model; return the checksum of the index, and whether it is the same as before."""
    after = ""
    # Only one process reads the whole index again.
    if distributed.is_main():
        # The model remembers its documents, so that evaluations can separate new from known ones.
        run.side.finished(adapted, run.clicked.trained_ids).save(run.folder / "model")
        after = fingerprint(run.side.source)
    after = distributed.broadcast_object(after)
    state = "the same" if after == run.checksum else "CHANGED"
    return f"{run.checksum[:16]}, {state} after as before"


def _facts(run: _Run, choice: Choice, steps: int) -> dict[str, object]:
    """Return the settings and counts of a training."""
    temperature = f"temperature {run.settings.temperature:g}"
    weights = "documents weigh alike"
    if not math.isinf(choice.alpha):
        weights = f"a document weighs its clicks + {choice.alpha:g}"
    return {
        "index": run.side.source,
        "documents": len(run.side.documents),
        "queries from": run.clicks,
        "pairs": len(run.clicked.pairs),
        "documents in pairs": len(run.clicked.trained_ids),
        "folds": len(run.clicked.folds),
        "trained": run.side.trained,
        "objective": (
            f"FrozenCorpus, {temperature}, batches of {run.settings.batch_size}, {weights}"
        ),
        "steps on all pairs": steps,
        "seed": run.settings.seed,
        "original weights kept": choice.keep,
        "model": str(run.folder / "model"),
    }
