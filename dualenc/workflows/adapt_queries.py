"""Train queries against the documents of an index, whose files do not change."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np

from dualenc import distributed
from dualenc.data.bad_rows import BadRows
from dualenc.data.pairs import PairDataset
from dualenc.data.readers.beir import check_judged, read_corpus, read_judged_queries
from dualenc.data.readers.clicks import DocumentSplit, IndexPairs, split_by_documents
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import interpolate
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.evaluation.report_page import check_report_target
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.io.files import (
    check_folder_target,
    check_writable,
    remove,
    removed_if_refused,
)
from dualenc.io.reading import read_json_object
from dualenc.io.targets import check_outside
from dualenc.objectives import FrozenCorpus
from dualenc.search.documents import fingerprint, open_documents
from dualenc.search.embed.encode import embed
from dualenc.search.index.open import Index, is_index
from dualenc.seeds import seed_everything
from dualenc.training.index_evaluator import IndexEvaluator
from dualenc.training.trainer import Trainer, TrainingResult
from dualenc.types import StrPath
from dualenc.workflows.adaptation_report import (
    METRICS,
    PAGE,
    SECOND,
    TASK,
    AdaptResult,
    forgetting,
    quality_rows,
    write_results,
)
from dualenc.workflows.adapting import (
    SHARES,
    TOWERS,
    Interpolated,
    QuerySide,
    Trained,
    best_share,
    score_interpolations,
)
from dualenc.workflows.session import start_processes, writing

WORK = ".adapt"
"""Folder in the output for the vectors of a run. It marks the output of an interrupted run."""
MAX_HELD_OUT = 1000
"""Maximum number of held-out queries of either kind."""
NEW = "new documents"
KNOWN = "documents in training"
PATIENCE = 3
MIN_DOCUMENTS = 30
"""Fewer documents of held-out queries cannot show whether adapting harms unclicked documents."""
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
    check_outside(folder)
    check_writable(folder)
    check_folder_target(folder, _is_own_folder, "adaptation")
    check_report_target(folder / PAGE)
    if (folder / "training").exists() and not resume:
        raise DualencError(
            "holds an adaptation, finished or not",
            fix="continue it with --resume, or choose another --out",
            where=folder,
        )
    chosen = start_processes(device)
    with writing(folder), removed_if_refused(folder, "training"):
        work = folder / WORK
        work.mkdir(parents=True, exist_ok=True)
        # Compared at the end: the report promises that the index has not changed.
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
        parts = split_by_documents(pairs, held_out, MAX_HELD_OUT, seed)
        # The model remembers these, so that evaluations can separate new documents from known ones.
        trained_ids = [documents.ids[row] for row in sorted(set(parts.train.right_id.tolist()))]
        unmeasured = _why_unmeasured(parts, held_out)
        # Only held-out queries choose the share: test queries must not.
        held_out_tasks = _held_out_tasks(parts, documents)
        tasks = held_out_tasks | _beir_tasks(test, second, side, trained_ids)
        settings = _Settings(train, epochs, batch_size, learning_rate, temperature, seed, progress)
        original, adapted, trained = _train(
            folder / "training", index, side, pairs, parts, trained_ids, settings, resume
        )
        # A given share may lie between the usual ones.
        shares = sorted({*SHARES} if keep is None else {*SHARES, keep})
        points = score_interpolations(original, adapted, tasks, shares)
        choice = _choose_share(points, keep, unmeasured, list(held_out_tasks))
        adapted.load_state_dict(interpolate(original, adapted, choice.keep))
        # Every process returns the same result, but only one writes and reads the whole index.
        after = ""
        if distributed.is_main():
            side.finished(adapted, trained_ids).save(folder / "model")
            after = fingerprint(index)
        after = distributed.broadcast_object(after)
        state = "the same" if after == checksum else "CHANGED"
        facts = {
            "index": index,
            "documents": len(documents),
            "queries from": clicks,
            "pairs in training": len(parts.train),
            "documents in training": len(trained_ids),
            "trained": train,
            "objective": f"FrozenCorpus, temperature {temperature:g}, batches of {batch_size}",
            "steps": trained.steps,
            "seconds": round(trained.seconds),
            "seed": seed,
            "original weights kept": choice.keep,
            "model": str(folder / "model"),
            "checksum of the index": f"{checksum[:16]}, {state} after as before",
            "chosen by": choice.reason,
        }
        result = AdaptResult(
            folder=folder,
            model_folder=folder / "model",
            keep=choice.keep,
            quality=quality_rows(points, choice.keep),
            forgetting=forgetting(points, choice.keep),
            facts=facts,
            unmeasured=unmeasured,
            query_modality=clicked.left_modality,
        )
        if distributed.is_main():
            write_results(result, points)
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


def _is_own_folder(folder: Path) -> bool:
    """Return True if a folder holds an adaptation, finished or not."""
    # metrics.json is written last, the work folder first.
    if (folder / METRICS).is_file():
        return read_json_object(folder / METRICS).get("task") == TASK
    return (folder / WORK).is_dir()


class ShareChoice(NamedTuple):
    """The share of the original weights in the result, and how it was chosen."""

    keep: float
    reason: str


def _choose_share(
    points: Sequence[Interpolated], keep: float | None, unmeasured: str | None, tasks: Sequence[str]
) -> ShareChoice:
    """Choose the share of the original weights: given, the original, or the best measured."""
    if keep is not None:
        return ShareChoice(keep, "--keep")
    if unmeasured is not None:
        return ShareChoice(1.0, f"default: the original, since {unmeasured}")
    reason = (
        "the held-out queries, whose numbers are therefore too high; measure others with --test"
    )
    return ShareChoice(best_share(points, NEW, tasks), reason)


def _why_unmeasured(parts: DocumentSplit, share: float) -> str | None:
    """Return why held-out queries cannot show the effect on new documents; None if they can."""
    if share == 0:
        return "no query was held out"
    if parts.new is None:
        documents = f"the documents of each are in over {share:.0%} of the pairs"
        return f"no query could be held out: {documents}"
    count = len(np.unique(parts.new.right_id))
    if count < MIN_DOCUMENTS:
        few = f"fewer than {MIN_DOCUMENTS} cannot tell"
        return f"held-out queries name {count} documents, and {few}"
    return None


def _held_out_tasks(parts: DocumentSplit, documents: Embeddings) -> dict[str, IndexEvaluator]:
    """Return evaluators of the held-out queries, by whether their documents are in training."""
    named = {NEW: parts.new, KNOWN: parts.known}
    return {
        name: IndexEvaluator.of_pairs(part, documents)
        for name, part in named.items()
        if part is not None
    }


def _beir_tasks(
    test: str | None, second: str | None, side: QuerySide, trained_ids: Sequence[str]
) -> dict[str, IndexEvaluator]:
    """Return evaluators of the test queries of two BEIR folders.

    Those of `test` are divided by whether a relevant document is in training.
    """
    tasks = {}
    if test is not None:
        evaluator = _beir_task(test, "test", side, side.documents)
        known, new = divide_by_training(evaluator.qrels, trained_ids)
        for part, qrels in ((NEW, new), (KNOWN, known)):
            # The mean over an empty part is undefined.
            if qrels:
                tasks[f"{Path(test).name}: {part}"] = evaluator.among(list(qrels))
    if second is not None:
        documents = _second_documents(second, side)
        name = f"{SECOND}: {Path(second).name}"
        tasks[name] = _beir_task(second, "second", side, documents)
    return tasks


def _beir_task(folder: str, name: str, side: QuerySide, documents: Embeddings) -> IndexEvaluator:
    """Return an evaluator of the test queries of a BEIR folder over documents."""
    bad_rows = BadRows(folder)
    queries, qrels = read_judged_queries(Path(folder), "test", documents.ids, bad_rows)
    bad_rows.report()
    check_judged(folder, qrels, documents.ids, side.source)
    return IndexEvaluator(side.inputs(queries, f"{name}-queries"), qrels, documents)


def _second_documents(folder: str, side: QuerySide) -> Embeddings:
    """Return the documents of a second task, as vectors.

    A folder without documents, or with those of the index, is measured over the index.
    """
    bad_rows = BadRows(folder)
    corpus = read_corpus(folder, bad_rows=bad_rows) if any(Path(folder).glob("corpus*")) else None
    bad_rows.report()
    # Compare all ids: some in common prove nothing, since row numbers are ids too.
    if corpus is None or set(corpus.ids) == set(side.documents.ids):
        return side.documents
    if corpus.modality != "text" or side.text is None:
        return open_documents(folder, side.work / "second")
    out = side.work / "second-documents"
    # Half precision, as `open_documents` stores vectors.
    return embed(side.text.right, corpus, out, dtype="float16", progress=side.progress)


def _objective(
    index: str, documents: Embeddings, num_left: int, temperature: float
) -> FrozenCorpus:
    """Return the softmax over all documents.

    With more documents than can be summed exactly, it uses those that the index finds and a sample.
    """
    # Only an index can find the nearest documents; without one, all of them are summed.
    search = None
    if is_index(index):
        opened = Index.open(index)

        def search(queries: np.ndarray, nearest: int) -> np.ndarray:
            return opened.search_rows(queries, nearest)[1]

    return FrozenCorpus(
        documents.vectors,
        search=search,
        num_left=num_left,
        temperature=temperature,
        # Include the positive in the sum, as a softmax does.
        positive_in_softmax=True,
    )


class _Settings(NamedTuple):
    """How a model is trained; see `adapt`."""

    train: Trained
    epochs: int | None
    batch_size: int
    learning_rate: float | None
    temperature: float
    seed: int
    progress: bool

    def trainer(self, output: Path, parts: DocumentSplit) -> Trainer:
        """Return a trainer that stops when held-out queries no longer improve."""
        # A batch larger than the data would leave no step.
        batch_size = min(self.batch_size, len(parts.train))
        is_measured = parts.held_out is not None
        # Not `or`: the trainer should refuse 0.
        epochs = EPOCHS[self.train] if self.epochs is None else self.epochs
        learning_rate = self.learning_rate
        if learning_rate is None:
            learning_rate = LEARNING_RATES[self.train]
        return Trainer(
            output=output,
            batch_size=batch_size,
            epochs=epochs,
            learning_rate=learning_rate,
            # Maps are too small to gain from half precision.
            mixed_precision="no" if self.train in TOWERS else "auto",
            # Once per epoch.
            evaluate_every=max(1, len(parts.train) // batch_size) if is_measured else None,
            patience=PATIENCE if is_measured else None,
            seed=self.seed,
            progress=self.progress,
        )


def _train(
    output: Path,
    index: str,
    side: QuerySide,
    pairs: PairDataset,
    parts: DocumentSplit,
    trained_ids: Sequence[str],
    settings: _Settings,
    resume: bool,
) -> tuple[DualEncoder, DualEncoder, TrainingResult]:
    """Return the model before training, the one with the best weights, and the training result."""
    seed_everything(settings.seed)
    original = side.new_model(pairs.left_dim)
    # A model that cannot be saved should fail before the training.
    side.finished(original, trained_ids)
    documents = side.documents
    evaluator = None
    if parts.held_out is not None:
        evaluator = IndexEvaluator.of_pairs(parts.held_out, documents)
    objective = _objective(index, documents, pairs.num_left, settings.temperature)
    result = settings.trainer(output, parts).fit(
        # The original is needed afterwards, to interpolate between both.
        copy.deepcopy(original),
        parts.train,
        objective,
        evaluator=evaluator,
        resume=resume,
    )
    return original, load_model(result.model_folder, side.device), result
