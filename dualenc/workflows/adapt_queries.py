"""Train queries against the documents of an index, whose files do not change."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, get_args

from dualenc import distributed
from dualenc.data.logs.click_log import ClickLog, LogColumns
from dualenc.data.logs.click_model import KnownPropensities
from dualenc.data.logs.open_log import open_log
from dualenc.data.pairs import PairDataset
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.lora import merge_adapters
from dualenc.errors import DualencError
from dualenc.evaluation.report_page import Table
from dualenc.io.files import remove, removed_if_refused
from dualenc.search.documents import fingerprint, open_documents
from dualenc.seeds import seed_everything
from dualenc.training.index_evaluator import IndexEvaluator
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
from dualenc.workflows.adaptation_log import (
    LearnedLog,
    day_of,
    document_ids,
    learn_log,
    with_inputs,
)
from dualenc.workflows.adaptation_report import (
    ROCCHIO,
    TASK,
    AdaptResult,
    finding_of,
    forgetting,
    quality_rows,
    write_adaptation,
)
from dualenc.workflows.adaptation_tasks import (
    FOLDS,
    ClickFolds,
    first_documents,
    fold_clicks,
    held_out_tasks,
    measured_tasks,
)
from dualenc.workflows.adaptation_training import Trainings, TrainingSettings
from dualenc.workflows.adapting import (
    BASE,
    ORIGINAL,
    SHARES,
    TOWERS,
    Ends,
    Interpolated,
    QuerySide,
    Trained,
)
from dualenc.workflows.changed_results import changed_results, snippets_of
from dualenc.workflows.gate import Gate
from dualenc.workflows.last_tenth import (
    LATER,
    LastTenth,
    last_tenth,
    rows_of_queries,
    scores_without_training,
)
from dualenc.workflows.previous_run import (
    MAP,
    MODEL,
    WORK,
    PreviousRun,
    check_previous,
    is_unfinished,
)
from dualenc.workflows.replaced_model import (
    log_of_sentences,
    texts_without_model,
    with_sentences,
)
from dualenc.workflows.result_folder import check_result_folder
from dualenc.workflows.session import start_processes, writing
from dualenc.workflows.trained_pairs import RECORD, Seen, TrainedPairs

logger = logging.getLogger("dualenc.workflows")

ALPHAS = (DEFAULT_ALPHA,)
"""Values of `Choice.alpha` to choose from. Folds of few pairs understate what inf, which weighs all
documents alike, costs new documents: with it, the choice lowers them on SciFact."""


def adapt(
    index: str,
    clicks: StrPath | Sequence[StrPath] = (),
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
    position_column: str | None = None,
    session_column: str | None = None,
    time_column: str | None = None,
    action_column: str | None = None,
    impressions_column: str | None = None,
    weight_column: str | None = None,
    weights: Mapping[str, float] | None = None,
    click_model: StrPath | None = None,
    split: str = "train",
    model: str | None = None,
    test: str | None = None,
    second: str | None = None,
    require_gain: float | None = None,
    start_from: StrPath | None = None,
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
        clicks: one log or several: clicks, impressions, events, results lists, UBI, scores of a
            teacher, or a BEIR folder; see `dualenc.data.logs.open_log`. None is needed if `model`
            replaces the model of the index, which is gone.
        out: folder to write: model, training, metrics.json, report.html.
        train: what is trained: a "perceptron" or "linear" map of query vectors (seconds), adapters
            of the text model ("lora") or "all" of it (minutes).
        epochs: number of passes over the pairs; None takes 12 for a map, 3 for a model. Trainings
            of a text model, or on more than 5,000 pairs, end earlier if held-out queries do not
            improve.
        batch_size: number of queries in a step.
        learning_rate: None takes 1e-3 for a map, 2e-4 for "lora", 2e-5 for "all".
        temperature: temperature τ of the softmax over all documents.
        held_out: share of the pairs that each of five folds (two of more than 5,000 pairs, one for
            a text model) holds out by their documents, from 0 to 0.9; with 0 nothing is measured
            and `keep` must be given. The final training has all pairs.
        keep: share of the original weights in the result, from 0 to 1; None takes the best share
            for held-out queries among those that do not harm queries of new documents.
        seed: random seed for the split, the initial weights and the batches.
        query_column: column with texts, vectors or images; None finds a usual name whose values
            fit, and "none" reads no such column, here and below.
        document_column: column with ids of documents, or lists of those that were shown.
        label_column: column that says whether, or how often, the document was clicked, or lists of
            clicked ids or ranks.
        position_column: column with positions in the results list, from 1.
        session_column: column that names the results list or session of a row.
        time_column: column with times. With times, a model of the earlier part of the log is
            measured by the queries of its last tenth.
        action_column: column with what was done: click, cart, purchase, impression.
        impressions_column: column with the number of times that the document was shown.
        weight_column: column with relevance that is taken as it is, such as scores of a teacher.
        weights: weights of actions, such as {"click": 1, "purchase": 5}; by default 1 for all.
        click_model: JSON file with known propensities, see `KnownPropensities.read`; None estimates
            them from the log.
        split: split of a BEIR folder, a folder of tables or a hub name.
        model: model folder or name, if the index's model has moved; or another text model, if it is
            gone and the index keeps its texts: then queries of that model are trained, on the first
            sentences of the texts, too.
        test: BEIR folder whose test queries are measured too, over the documents of the index.
        second: BEIR folder of another task whose test queries are measured, to see what is
            forgotten.
        require_gain: gain in nDCG@10 that the 95% interval of held-out queries must reach: those of
            the last tenth of the log if it has times, or else those held out by document. Otherwise
            the model is the original, and `AdaptResult.gate` says so.
        start_from: output of an earlier run on the same index, whose model training begins at, and
            which is the original then. Only queries that it was not trained on are held out. The
            share is chosen between the trained weights and that model's, or those of the model of
            the index.
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
    _check_start(start_from, folder, train)
    chosen = start_processes(device)
    with writing(folder), removed_if_refused(folder, "training"):
        work = folder / WORK
        work.mkdir(parents=True, exist_ok=True)
        # Before anything opens the index: the report promises that it has not changed.
        checksum = fingerprint(index)
        documents = open_documents(index, work)
        columns = LogColumns(
            query=query_column,
            document=document_column,
            clicked=label_column,
            position=position_column,
            session=session_column,
            time=time_column,
            action=action_column,
            impressions=impressions_column,
            weight=weight_column,
        )
        has_log = isinstance(clicks, str | Path) or bool(clicks)
        texts = texts_without_model(index, documents, model, has_log=has_log)
        if texts is not None:
            _check_replacement(start_from, second)
        known = None if click_model is None else KnownPropensities.read(click_model)
        log = None
        if has_log:
            log = open_log(clicks, documents, columns=columns, weights=weights, split=split)
        if texts is not None:
            log = _log_with_sentences(log, texts, documents, known, seed)
        assert log is not None
        logger.info("%s", log.finding)
        side = QuerySide(
            documents,
            log.queries.modality,
            train,
            source=index,
            model=model,
            work=work,
            device=chosen,
            progress=progress,
            texts=texts,
        )
        previous = None if start_from is None else PreviousRun.open(start_from, side)
        seen = None if previous is None else Seen(previous.record, log.queries, documents)
        learned = learn_log(with_inputs(log, side), documents, known)
        later = last_tenth(learned, documents, seed, seen)
        # What measures the model of the earlier part has no part in the choice either.
        pairs = learned.pairs if later is None else later.earlier
        # A fold of a text model takes long.
        most_folds = FOLDS if train in TOWERS else 1
        folds = fold_clicks(pairs, held_out, seed, most_folds=most_folds, seen=seen)
        for line in learned.findings + _unseen(seen, learned, later):
            logger.info("%s", line)
        settings = TrainingSettings(epochs, batch_size, learning_rate, temperature, seed)
        # Trainings that begin at another model are others.
        begins = folder / "training" / ("" if previous is None else previous.name)
        trainings = Trainings(begins, side, settings, resume)
        run = _Run(folder, log, checksum, side, learned, later, folds, trainings, previous)
        # Opened before the training: a test folder that does not fit fails now and not in hours.
        tasks = measured_tasks(run.trained_ids, side, test, second)
        result = _adapt(run, tasks, keep, require_gain)
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
    check_result_folder(folder, TASK, "adaptation", is_unfinished)
    # Training again would replace a model that took hours: only an explicit --resume goes on.
    if not resume and any((folder / name).exists() for name in ("training", "model")):
        raise DualencError(
            "holds an adaptation, finished or not",
            fix="continue it with --resume, or choose another --out",
            where=folder,
        )


def _check_start(start_from: StrPath | None, folder: Path, train: Trained) -> None:
    """Raise if a run cannot continue from another one, whatever that is."""
    if start_from is None:
        return
    if train == "lora":
        raise DualencError(
            "--train lora cannot continue --from a run, whose adapters are merged into its weights",
            fix="continue with --train all",
        )
    if Path(start_from).resolve() == folder.resolve():
        raise DualencError(
            "--from is the output itself", fix="name an earlier run, or another --out", where=folder
        )
    check_previous(start_from, train)


def _check_replacement(start_from: StrPath | None, second: str | None) -> None:
    """Raise for options that need the model of the index, which is gone."""
    given = {"--from": start_from, "--second": second}
    for name, value in given.items():
        if value is not None:
            raise DualencError(
                f"{name} needs the model of the index, and --model names another one",
                fix="leave it out",
            )


def _log_with_sentences(
    log: ClickLog | None,
    texts: Sequence[str],
    documents: Embeddings,
    known: KnownPropensities | None,
    seed: int,
) -> ClickLog:
    """Return first sentences as queries for their documents, beside what a log says is relevant."""
    sentences = log_of_sentences(texts, seed)
    if log is None:
        return sentences
    return with_sentences(learn_log(log, documents, known), log.queries, sentences)


def _unseen(seen: Seen | None, learned: LearnedLog, later: LastTenth | None) -> list[str]:
    """Return how many pairs and queries a previous run was not trained on, a line each."""
    if seen is None:
        return []
    pairs = learned.pairs
    counts = len(pairs) - int(seen.holds(pairs).sum()), int(seen.may_be_known(pairs).sum())
    lines = [
        f"{counts[0]:,} of {len(pairs):,} pairs are new to the run of --from; "
        f"{counts[1]:,} queries may be held out"
    ]
    if later is not None and later.num_seen:
        lines.append(
            f"{LATER}: {later.num_seen:,} queries are not measured: the run of --from was trained "
            "on them"
        )
    return lines


@dataclass(frozen=True)
class _Run:
    """An adaptation that can start.

    `asked` is the log with its queries as they are, `checksum` that of the index before, `previous`
    the run that it continues from.
    """

    folder: Path
    asked: ClickLog
    checksum: str
    side: QuerySide
    learned: LearnedLog
    later: LastTenth | None
    clicked: ClickFolds
    trainings: Trainings
    previous: PreviousRun | None

    @cached_property
    def document_ids(self) -> list[str]:
        """Ids of the documents in pairs."""
        return document_ids(self.learned.pairs, self.side.documents)

    @property
    def trained_ids(self) -> list[str]:
        """Ids of the documents in pairs, also of previous runs."""
        before = [] if self.previous is None else self.previous.record.document_ids()
        return list(dict.fromkeys([*self.document_ids, *before]))

    def ends(self) -> Ends:
        """Return the model that training begins at, and that of the index if it is another."""
        untrained = self.side.new_model(self.learned.pairs.left_dim)
        return Ends(untrained) if self.previous is None else self.previous.ends(untrained)

    def record(self, share: float, of: str) -> TrainedPairs:
        """Return what a model with a share of the weights of an end was trained on."""
        before = TrainedPairs({})
        if self.previous is not None and (share, of) != (1, BASE):
            before = self.previous.record
        if share == 1:
            return before
        pairs, documents = self.learned.pairs, self.side.documents
        return before.with_pairs_of(TrainedPairs.of(pairs, self.asked.queries, documents))


def _adapt(
    run: _Run,
    tasks: Mapping[str, IndexEvaluator],
    keep: float | None,
    require_gain: float | None,
) -> AdaptResult:
    """Choose by folds, train on all pairs, measure, and write model and report."""
    # Initial weights depend on the seed alone, and not on what was embedded before.
    seed_everything(run.trainings.settings.seed)
    ends = run.ends()
    # A model that cannot be saved should fail before the training.
    run.side.finished(ends.original, run.trained_ids)
    # A given share may lie between the usual ones.
    shares = sorted({*SHARES} if keep is None else {*SHARES, keep})
    choice, held_out = _choose(run, ends, shares, keep)
    compared = dict(choice.compared)
    if run.later is not None:
        held_out, by_time = _measure_later(run, ends, choice)
        compared |= by_time
    gate = None
    if require_gain is not None:
        gate = Gate.of(require_gain, choice.compared if run.later is None else by_time)
    share, of = (choice.keep, choice.of) if gate is None or gate.passed else (1.0, ORIGINAL)
    adapted, steps = _merged_copy(ends.original), 0
    points: list[Interpolated] = []
    if share < 1:
        adapted, steps = run.trainings.on_all(
            "all", ends.original, run.learned.pairs, choice.alpha, choice.steps
        )
    if tasks:
        points = ends.score(adapted, tasks, shares)
    adapted.load_state_dict(ends.mix(adapted, share, of))
    compared |= _compare(points, tasks, share, of, run.side.documents)
    result = AdaptResult(
        folder=run.folder,
        model_folder=run.folder / MODEL,
        keep=share,
        alpha=choice.alpha,
        quality=_with_rocchio(quality_rows(compared), run.later, ends.original),
        forgetting=forgetting(points, share, of),
        facts={
            **_facts(run, choice, steps),
            f"{of} weights kept": share,
            "checksum of the index": _save(run, adapted, share, of),
            "chosen by": choice.reason,
        },
        finding=finding_of(choice),
        unmeasured=choice.unmeasured,
        query_modality=run.side.modality,
        gate=gate,
        of=of,
        start_from=None if run.previous is None else run.previous.folder,
    )
    # All processes embed queries together.
    examples = None if held_out is None else _examples(run, ends.original, held_out)
    # Every process returns the same result, but only one writes.
    if distributed.is_main():
        write_adaptation(result, examples, choice.curves, points)
    return result


class _HeldOut(NamedTuple):
    """Held-out queries, a model that has not seen them, and the pairs that number them."""

    evaluator: IndexEvaluator
    model: DualEncoder
    pairs: PairDataset


def _measure_later(run: _Run, ends: Ends, choice: Choice) -> tuple[_HeldOut, dict[str, Compared]]:
    """Train on the earlier part of the log as chosen, and measure the queries of its last tenth."""
    later = run.later
    assert later is not None
    adapted = _merged_copy(ends.original)
    if choice.keep < 1:
        adapted, _ = run.trainings.on_all(
            "earlier", ends.original, later.earlier, choice.alpha, choice.steps
        )
    points = ends.score(adapted, later.tasks, sorted({choice.keep, 1.0}))
    adapted.load_state_dict(ends.mix(adapted, choice.keep, choice.of))
    compared = _compare(points, later.tasks, choice.keep, choice.of, run.side.documents)
    return _HeldOut(later.evaluator, adapted, later.later), compared


def _merged_copy(model: DualEncoder) -> DualEncoder:
    """Return a copy that takes interpolated weights, in which LoRA adapters are merged."""
    merged = merge_adapters(model)
    assert isinstance(merged, DualEncoder)
    if merged is model:
        return copy.deepcopy(model)
    return merged.to(next(model.parameters()).device)


def _with_rocchio(
    rows: Sequence[Mapping[str, object]], later: LastTenth | None, original: DualEncoder
) -> list[Mapping[str, object]]:
    """Add to rows of the last tenth the scores of queries that are moved without training."""
    if later is None:
        return list(rows)
    scores = scores_without_training(later, original)
    added = {task: {ROCCHIO: float(own.mean())} for task, own in scores.items()}
    return [{**row, **added.get(str(row["queries of"]), {})} for row in rows]


def _examples(run: _Run, original: DualEncoder, held_out: _HeldOut) -> Table:
    """Return the held-out queries whose results changed most."""
    rows = rows_of_queries(held_out.pairs)
    queries = run.asked.queries

    def text(name: str) -> str:
        row = rows[name]
        return queries.text(row) if queries.modality == "text" else f"query {row}"

    snippet = snippets_of(run.side.source)
    return changed_results(held_out.evaluator, original, held_out.model, text, snippet)


def _choose(
    run: _Run, ends: Ends, shares: Sequence[float], keep: float | None
) -> tuple[Choice, _HeldOut | None]:
    """Train on every fold, and choose by the held-out queries of all.

    Returns:
        The choice; the held-out queries of the first fold, with its model as chosen.
    """
    folds, documents = run.clicked.folds, run.side.documents
    if run.clicked.unmeasured is not None:
        return unmeasured_choice(keep, run.clicked.unmeasured), None
    # With few pairs that end would be chance; the share of the original weights does as well.
    stops_early = run.side.trained not in TOWERS or run.clicked.has_many
    trials: list[list[Trial]] = []
    groups: list[dict[str, Integers]] = []
    first: dict[float, DualEncoder] = {}
    for number, fold in enumerate(folds):
        tasks = held_out_tasks(fold, documents)
        trials.append([])
        for alpha in ALPHAS:
            adapted, steps = run.trainings.on_fold(
                f"fold-{number}", ends.original, fold, alpha, stops_early
            )
            points = ends.score(adapted, tasks, shares)
            trials[-1].append(Trial(alpha, steps, points))
            if number == 0:
                first[alpha] = adapted
        groups.append({task: first_documents(each, documents) for task, each in tasks.items()})
    choice = choose(HeldOut.of_folds(trials, groups), keep)
    # Rounding may differ by process, and all must make the same choice.
    choice = distributed.broadcast_object(choice)
    model = first[choice.alpha]
    model.load_state_dict(ends.mix(model, choice.keep, choice.of))
    held_out = folds[0].held_out
    assert held_out is not None
    evaluator = IndexEvaluator.of_pairs(held_out, documents)
    return choice, _HeldOut(evaluator, model, held_out)


def _compare(
    points: Sequence[Interpolated],
    tasks: Mapping[str, IndexEvaluator],
    keep: float,
    of: str,
    documents: Embeddings,
) -> dict[str, Compared]:
    """Return the scores of test queries before and after."""
    scores = {(point.keep, point.of): point.scores for point in points}
    base = scores.get((1, BASE))
    return {
        task: Compared(
            scores[1, ORIGINAL][task],
            scores[keep, of][task],
            first_documents(each, documents),
            None if base is None else base[task],
        )
        for task, each in tasks.items()
    }


def _save(run: _Run, adapted: DualEncoder, share: float, of: str) -> str:
    """Save the model, and what another run needs to continue from it.

    Returns:
        The checksum of the index, and whether it is the same as before.
    """
    after = ""
    # Only one process reads the whole index again.
    if distributed.is_main():
        record = run.record(share, of)
        # The model remembers its documents, so that evaluations can separate new from known ones.
        ids = run.document_ids if run.previous is None else record.document_ids()
        run.side.finished(adapted, ids).save(run.folder / MODEL)
        if run.side.trained in TOWERS:
            adapted.save(run.folder / MAP)
        record.write(run.folder / RECORD)
        after = fingerprint(run.side.source)
    after = distributed.broadcast_object(after)
    state = "the same" if after == run.checksum else "CHANGED"
    return f"{run.checksum[:16]}, {state} after as before"


def _replacement_facts(side: QuerySide) -> dict[str, object]:
    """Return which model replaces that of the index, and where its training begins."""
    if side.texts is None:
        return {}
    start = "this model with a linear map, fitted on texts of documents, to the stored vectors"
    return {"replaces the model of the index": side.model, "original": start}


def _facts(run: _Run, choice: Choice, steps: int) -> dict[str, object]:
    """Return the settings and counts of a training."""
    settings = run.trainings.settings
    temperature = f"temperature {settings.temperature:g}"
    weights = "documents weigh alike"
    if not math.isinf(choice.alpha):
        weights = f"a document weighs its clicks + {choice.alpha:g}"
    return {
        "index": run.side.source,
        **({} if run.previous is None else {"continued from": str(run.previous.folder)}),
        "documents": len(run.side.documents),
        "log": run.asked.finding,
        **({"relevance": "; ".join(run.learned.findings)} if run.learned.findings else {}),
        **({} if run.later is None else {f"{LATER} from": day_of(run.later.begins)}),
        "pairs": len(run.learned.pairs),
        "documents in pairs": len(run.document_ids),
        "folds": len(run.clicked.folds),
        "trained": run.side.trained,
        **_replacement_facts(run.side),
        "objective": (f"FrozenCorpus, {temperature}, batches of {settings.batch_size}, {weights}"),
        "steps on all pairs": steps,
        "seed": settings.seed,
        "model": str(run.folder / MODEL),
    }
