"""Adaptation of queries to an index: queries are read and divided, a model is trained, measured,
saved and reported."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dualenc import distributed
from dualenc.commands.output import RESULT
from dualenc.data.bad_rows import BadRows
from dualenc.data.readers.beir import check_judged, read_corpus, read_judged_queries
from dualenc.data.readers.clicks import DocumentSplit, IndexPairs, split_by_documents
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import interpolate
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.evaluation.metrics import paired_bootstrap
from dualenc.evaluation.plots import MISSING, can_draw, lines
from dualenc.evaluation.report_page import (
    Figure,
    Table,
    check_report_target,
    print_table,
    write_report,
)
from dualenc.evaluation.retrieval import divide_by_training
from dualenc.io.files import (
    check_folder_target,
    check_writable,
    remove,
    removed_if_refused,
    write_json,
)
from dualenc.io.reading import read_json_object
from dualenc.io.targets import check_outside
from dualenc.io.terminal import printable
from dualenc.objectives import FrozenCorpus
from dualenc.search.documents import fingerprint, open_documents
from dualenc.search.embed.encode import embed
from dualenc.search.engines.engine import is_pushed
from dualenc.search.index.open import Index, is_index
from dualenc.seeds import seed_everything
from dualenc.training.adapting import (
    SHARES,
    TOWERS,
    IndexEvaluator,
    Interpolated,
    QuerySide,
    best_share,
    harmless_share,
    score_interpolations,
)
from dualenc.training.trainer import Trainer, TrainingResult
from dualenc.workflows.session import start_processes, writing

if TYPE_CHECKING:
    from dualenc.commands.adapt import AdaptOptions, ClickOptions

TASK = "adapt"
WORK = ".adapt"
"""Folder for vectors of a run in its output; by it a run that was interrupted is known."""
MAX_HELD_OUT = 1000  # queries of either kind
NEW = "new documents"
KNOWN = "documents in training"
SECOND = "second task"
PATIENCE = 3
MIN_DOCUMENTS = 30
"""Fewer documents of held-out queries cannot show whether adapting harms documents without a
click."""
EPOCHS = {"perceptron": 12, "linear": 12, "lora": 3, "all": 3}
LEARNING_RATES = {"perceptron": 1e-3, "linear": 1e-3, "lora": 2e-4, "all": 2e-5}


def adapt_index(
    index: str,
    clicks: str,
    folder: Path,
    columns: ClickOptions,
    options: AdaptOptions,
    resume: bool,
    device: str | None,
) -> None:
    """Adapt queries to an index, and write the model and the report to a folder."""
    if options.held_out == 0 and options.keep is None:
        problem = "--held-out 0 leaves no query to choose the share of the original weights by"
        raise DualencError(
            f"{problem}; set --keep, for instance --keep 0.5, or hold some pairs out"
        )
    check_outside(folder)
    check_writable(folder)
    check_folder_target(folder, _is_own_folder, "adaptation")
    check_report_target(folder / "report.html")
    if (folder / "training").exists() and not resume:
        remedy = "continue it with --resume, or choose another --out"
        raise DualencError(f"{folder}: holds an adaptation, finished or not; {remedy}")
    place = start_processes(device)
    with writing(folder), removed_if_refused(folder, "training"):
        work = folder / WORK
        work.mkdir(parents=True, exist_ok=True)
        checksum = fingerprint(index)
        documents = open_documents(index, work)
        clicked = IndexPairs(
            clicks,
            documents,
            query_column=columns.query_column,
            document_column=columns.document_column,
            label_column=columns.label_column,
            split=columns.split,
        )
        side = QuerySide(
            documents,
            clicked.left_modality,
            options.train,
            source=index,
            model=columns.model,
            work=work,
            device=place,
        )
        pairs = side.pairs(clicked)
        parts = split_by_documents(pairs, options.held_out, MAX_HELD_OUT, options.seed)
        trained_ids = [documents.ids[row] for row in sorted(set(parts.train.right_id.tolist()))]
        unmeasured = _why_unmeasured(parts, options.held_out)
        named = {NEW: parts.new, KNOWN: parts.known}
        tasks = {
            name: IndexEvaluator.of_pairs(part, documents)
            for name, part in named.items()
            if part is not None
        }
        held_out = list(tasks)
        tasks |= _beir_tasks(columns, side, trained_ids)

        seed_everything(options.seed)
        original = side.new_model(pairs.left_dim)
        # A model that cannot be saved fails here, and not after the training.
        side.finished(original, trained_ids)
        objective = _objective(index, documents, pairs.num_left, options)
        output = folder / "training"
        trained = _train(
            copy.deepcopy(original), parts, documents, objective, output, options, resume
        )
        adapted = load_model(trained.model_folder, place)
        shares = {*SHARES} if options.keep is None else {*SHARES, options.keep}
        points = score_interpolations(original, adapted, tasks, sorted(shares))
        if options.keep is not None:
            keep, choice = options.keep, "--keep"
        elif unmeasured is not None:
            keep, choice = 1.0, f"default: the original, since {unmeasured}"
        else:
            keep = best_share(points, NEW, held_out)
            choice = "the held-out queries, whose numbers are therefore too high; measure others with --test"
        adapted.load_state_dict(interpolate(original, adapted, keep))
        if distributed.is_main():
            side.finished(adapted, trained_ids).save(folder / "model")
            after = fingerprint(index)
            same = "the same" if after == checksum else "CHANGED"
            facts = {
                "index": index,
                "documents": len(documents),
                "queries from": clicks,
                "pairs in training": len(parts.train),
                "documents in training": len(trained_ids),
                "trained": options.train,
                "objective": f"FrozenCorpus, temperature {options.temperature:g}, batches of {options.batch_size}",
                "steps": trained.steps,
                "seconds": round(trained.seconds),
                "seed": options.seed,
                "original weights kept": keep,
                "model": str(folder / "model"),
                "checksum of the index": f"{checksum[:16]}, {same} after as before",
            }
            facts["chosen by"] = choice
            _report(folder, facts, points, keep)
            if unmeasured is not None:
                _warn_unmeasured(unmeasured, options.keep)
            query = '"…"' if clicked.left_modality == "text" else "QUERY.npy"
            print(printable(f"next:  {_next_command(index, folder, query)}"))
            remove(work)
        distributed.barrier()


def _why_unmeasured(parts: DocumentSplit, share: float) -> str | None:
    """Say why held-out queries cannot show what adapting does to new documents; None if they
    can."""
    if share == 0:
        return "no query was held out"
    if parts.new is None:
        return f"no query could be held out: the documents of each are in over {share:.0%} of the pairs"
    count = len(np.unique(parts.new.right_id))
    if count < MIN_DOCUMENTS:
        return (
            f"held-out queries name {count} documents, and fewer than {MIN_DOCUMENTS} cannot tell"
        )
    return None


def _warn_unmeasured(reason: str, keep: float | None) -> None:
    """Print that nothing shows whether adapting helps, and what to do about it."""
    if keep is None:
        problem = f"cannot tell whether adapting helps, so the model is the original: {reason}"
        print(f"{problem}; raise --held-out, or set --keep 0.5 with --resume")
    elif keep < 1:
        print(f"cannot tell whether adapting helps, and --keep {keep:g} was used: {reason}")


def _is_own_folder(folder: Path) -> bool:
    if (folder / RESULT).is_file():
        return read_json_object(folder / RESULT).get("task") == TASK
    return (folder / WORK).is_dir()


def _beir_tasks(
    columns: ClickOptions, side: QuerySide, trained_ids: Sequence[str]
) -> dict[str, IndexEvaluator]:
    """The test queries of --test, by whether a relevant document is in training, and those of
    --second."""
    tasks = {}
    if columns.test is not None:
        test = _beir_task(columns.test, "test", side, side.documents)
        known, new = divide_by_training(test.qrels, trained_ids)
        for part, qrels in ((NEW, new), (KNOWN, known)):
            if qrels:
                tasks[f"{Path(columns.test).name}: {part}"] = test.among(list(qrels))
    if columns.second is not None:
        documents = _second_documents(columns.second, side)
        tasks[f"{SECOND}: {Path(columns.second).name}"] = _beir_task(
            columns.second, "second", side, documents
        )
    return tasks


def _beir_task(folder: str, name: str, side: QuerySide, documents: Embeddings) -> IndexEvaluator:
    """The test queries of a BEIR folder over documents."""
    bad_rows = BadRows(folder)
    queries, qrels = read_judged_queries(Path(folder), "test", documents.ids, bad_rows)
    bad_rows.report()
    check_judged(folder, qrels, documents.ids, side.source)
    return IndexEvaluator(side.inputs(queries, f"{name}-queries"), qrels, documents)


def _second_documents(folder: str, side: QuerySide) -> Embeddings:
    """The documents of the second task: its own vectors, or texts embedded by the model; of the
    index, if it has none or the same."""
    bad_rows = BadRows(folder)
    corpus = read_corpus(folder, bad_rows=bad_rows) if any(Path(folder).glob("corpus*")) else None
    bad_rows.report()
    # Some ids in common say nothing: row numbers are ids, too.
    if corpus is None or set(corpus.ids) == set(side.documents.ids):
        return side.documents
    if corpus.modality != "text" or side.text is None:
        return open_documents(folder, side.work / "second")
    return embed(side.text.right, corpus, side.work / "second-documents", dtype="float16")


def _objective(
    index: str, documents: Embeddings, num_left: int, options: AdaptOptions
) -> FrozenCorpus:
    """The softmax over all documents; beyond what is summed exactly, over those that the index
    finds and a sample."""
    search = None
    if is_index(index):
        opened = Index.open(index)

        def search(queries: np.ndarray, nearest: int) -> np.ndarray:
            return opened.search_rows(queries, nearest)[1]

    return FrozenCorpus(
        documents.vectors,
        search=search,
        num_left=num_left,
        temperature=options.temperature,
        positive_in_softmax=True,
    )


def _train(
    model: DualEncoder,
    parts: DocumentSplit,
    documents: Embeddings,
    objective: FrozenCorpus,
    output: Path,
    options: AdaptOptions,
    resume: bool,
) -> TrainingResult:
    """Train until held-out queries gain nothing; the model folder has the best weights."""
    pairs = parts.train
    evaluator = None
    if parts.held_out is not None:
        evaluator = IndexEvaluator.of_pairs(parts.held_out, documents)
    batch_size = min(options.batch_size, len(pairs))
    is_map = options.train in TOWERS
    trainer = Trainer(
        output=output,
        batch_size=batch_size,
        epochs=options.epochs or EPOCHS[options.train],
        learning_rate=LEARNING_RATES[options.train]
        if options.learning_rate is None
        else options.learning_rate,
        mixed_precision="no" if is_map else "auto",
        evaluate_every=None if evaluator is None else max(1, len(pairs) // batch_size),
        patience=None if evaluator is None else PATIENCE,
        seed=options.seed,
    )
    return trainer.fit(model, pairs, objective, evaluator=evaluator, resume=resume)


def _report(
    folder: Path, facts: Mapping[str, object], points: Sequence[Interpolated], keep: float
) -> None:
    """Print and write how well the original and the adapted model find documents, and the models
    between them."""
    original = next(point for point in points if point.keep == 1)
    result = next(point for point in points if point.keep == keep)
    shares = [1 - point.keep for point in points]
    rows = []
    curves = {}
    for task, before in original.scores.items():
        after = result.scores[task]
        difference, low, high = paired_bootstrap(before, after)
        row = {"queries of": task, "queries": len(before), "original": float(before.mean())}
        rows.append(
            row
            | {"adapted": float(after.mean()), "difference": difference, "from": low, "to": high}
        )
        curves[task] = (shares, [float(point.scores[task].mean()) for point in points])
    caption = f"nDCG@10 over all documents (kept of the original weights: {keep:g}), 95 % intervals"
    quality = Table(caption, rows)
    advice = [_advice(task, points, keep) for task in original.scores if task.startswith(SECOND)]
    if rows:
        print_table(quality)
    else:
        advice = ["nothing was measured: no query was held out, and no --test was named"]
    for line in advice:
        print(printable(line))
    figures = []
    if can_draw():
        plot = lines(curves, xlabel="share of the adapted weights", ylabel="nDCG@10")
        figures.append(Figure("Between the original model (0) and the adapted one (1)", plot))
    else:
        print(f"report.html has no curves: {MISSING}")
    if advice:
        facts = {**facts, "forgetting": " ".join(advice)}
    title = "Queries adapted to an index"
    write_report(folder / "report.html", title, facts=facts, figures=figures, tables=[quality])
    write_json(folder / RESULT, {"task": TASK, **facts, "quality": rows})
    print(printable(f"checksum of the index: {facts['checksum of the index']}"))
    print(printable(f"model, metrics and report.html are in {folder}"))


def _next_command(index: str, folder: Path, query: str) -> str:
    """How to use the model: search an index or an engine, or evaluate over embeddings."""
    if is_index(index) or is_pushed(index):
        return f"{shlex.join(['dualenc', 'search', index, '--model', f'{folder}/model'])} {query}"
    return shlex.join(
        ["dualenc", "evaluate", "retrieval", f"{folder}/model", "BEIR-FOLDER", "--documents", index]
    )


def _advice(task: str, points: Sequence[Interpolated], keep: float) -> str:
    """What a second task loses, and how much of the original weights prevents it."""
    share = harmless_share(points, task)
    if share <= keep:
        return f"{task}: nothing is lost within the interval (from --keep {share:g} on)"
    return f"{task}: loses; from --keep {share:g} on nothing is lost within the interval"
