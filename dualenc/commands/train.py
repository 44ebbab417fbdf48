"""`dualenc train`: train a recipe, from its first step or its latest checkpoint."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dualenc.commands.options import COMMAS
from dualenc.commands.output import print_line, print_next

if TYPE_CHECKING:
    from dualenc.training.trainer import TrainingResult

# Stand for data that the next commands could not read from the recipe.
TEST = "TEST-DATA"
DOCUMENTS = "DOCUMENTS"
LIMIT = "100"  # images to corrupt, in all 19 ways
_INDEXED = {
    "image": ("image_column", "image"),
    "image-text": ("left_column", "image"),
    "vector": ("right_column", "vector"),
}
"""Column whose items are searched, and their modality, by kind of model; by default right texts."""


def train(
    recipe: str,
    *overrides: str,
    resume: bool = False,
    allow_module: Annotated[list[str] | None, COMMAS] = None,
) -> None:
    """Train a dual encoder from a recipe.

    Writes checkpoints, metrics.jsonl, the resolved recipe.yaml and, at the end, the model folder
    into trainer.output. Under `accelerate launch` all processes work on the same global batches.
    SIGTERM, SIGUSR1 and Ctrl-C end the run after the current step, or between two batches of an
    evaluation, with a checkpoint and exit code 143, 138 or 130; a second Ctrl-C ends it at once.

    Args:
        recipe: YAML file with the classes of model, data, objective, batching and evaluator, and
            their arguments.
        overrides: section.key=value pairs, such as trainer.epochs=3 objective.temperature=0.05.
        resume: continue exactly from the latest checkpoint in trainer.output.
        allow_module: module other than dualenc whose classes the recipe may name, so that its code
            runs; repeatable.
    """
    from dualenc.recipe.resolve import read_recipe

    # Most mistakes are reported here, before torch is imported.
    described = read_recipe(recipe, overrides, allow_module or ())

    from accelerate import PartialState

    from dualenc import distributed
    from dualenc.training.signals import Interrupted, Stopped

    # torch warns at exit of a process group that is left open, also after a signal.
    try:
        result = described.train(resume=resume)
        if distributed.is_main():
            _report(result, described.settings)
    except (Stopped, Interrupted):
        PartialState().destroy_process_group()
        raise
    PartialState().destroy_process_group()


def _report(result: TrainingResult, settings: Mapping[str, Any]) -> None:
    """Print the metrics of a training before and after, and the next commands."""
    from dualenc import distributed

    loss = "" if math.isnan(result.loss) else f", training loss {result.loss:.4f}"
    # A launcher may start fewer processes than it was asked for.
    processes = distributed.world_size()
    ranks = f" on {processes} processes" if processes > 1 else ""
    print(f"\n{result.steps} steps in {result.seconds:.0f} s{ranks}{loss}")
    width = max(map(len, result.metrics), default=0)
    for name, value in result.metrics.items():
        before = f"{result.before[name]:.4f} -> " if name in result.before else ""
        print(f"  {name:<{width}}  {before}{value:.4f}")
    if _is_worse(result):
        print("no metric rose: the model from before may be the better one")
    if result.skipped:
        print(f"  {result.skipped} samples were left out because they could not be read")
    print_line(f"model: {result.model_folder}")
    for words in next_commands(result.model_folder, settings, result.metrics):
        print_next(words)
        if words[:2] == ["evaluate", "image-text"] and not settings["evaluator"]:
            print("       (its test split, or all pairs, most of which were trained on)")


def _is_worse(result: TrainingResult) -> bool:
    """Return True if metrics fell in a training, and none rose, in the digits that are printed."""
    pairs = [(result.metrics.get(name, before), before) for name, before in result.before.items()]
    gains = [round(after, 4) - round(before, 4) for after, before in pairs]
    return any(gain < 0 for gain in gains) and not any(gain > 0 for gain in gains)


def next_commands(
    model: Path, settings: Mapping[str, Any], metrics: Collection[str] = ()
) -> list[list[str]]:
    """Return the words after `dualenc` of the next commands: report, evaluate and index.

    Args:
        model: model folder of the run.
        settings: resolved recipe, whose data the commands read.
        metrics: names of the run's metrics, which tell whether held-out images have classes.
    """
    from dualenc.encoders.load import folder_kind
    from dualenc.workflows.session import EVALUATIONS

    # Read from the folder: the recipe may name a class of the user's own.
    kind = folder_kind(model)
    run = str(model.parent)
    data = settings["data"].get("init_args") or {}
    indexed = [DOCUMENTS]
    # Rows of mined negatives hold several texts each and cannot be indexed.
    if isinstance(data.get("path"), str) and not settings["data"]["class_path"].endswith(
        "MinedPairs"
    ):
        name, items = _INDEXED.get(kind, ("right_column", "text"))
        column = data.get(name)
        indexed = [data["path"], *_options(data, "quotes")]
        if data.get("split") != "train":
            indexed += _options(data, "split")
        if column:
            indexed += [f"--{items}-column", column]
        if column and kind == "image-text" and not data["path"].endswith(".parquet"):
            # An image path is repeated for each of its captions, and is indexed once by its id.
            indexed += ["--id-column", column]
    evaluator = (settings["evaluator"] or {}).get("init_args") or {}
    held_out = (evaluator.get("pairs") or evaluator.get("test") or {}).get("init_args") or evaluator
    evaluated = [TEST]
    if kind == "image-text" and not evaluator:
        held_out = data
    if isinstance(held_out.get("path"), str):
        names = (
            "left_column",
            "right_column",
            "left_modality",
            "right_modality",
            "label_column",
            "quotes",
        )
        evaluated = [held_out["path"], *_options(held_out, *names)]
        # The default is the test split, or all of what has no splits.
        if held_out is not data and not Path(held_out["path"]).is_file():
            evaluated += _options(held_out, "split")
        # A probe votes by the images of another split.
        voting = (evaluator.get("train") or {}).get("init_args") or {}
        evaluated += _options(
            {"train": voting.get("path"), "train_split": voting.get("split")},
            "train",
            "train_split",
        )
    task = EVALUATIONS[kind][0]
    if "knn_accuracy" in metrics and not evaluator:
        evaluated = [data["path"], *_options(data, "label_column")]
    elif "other_view_top1" in metrics and not evaluator and find_spec("imagecorruptions"):
        task = "corrupted"
        evaluated = [data["path"], "--limit", LIMIT]
    return [
        ["report", run],
        ["evaluate", task, str(model), *evaluated],
        ["index", str(model), *indexed, "--out", f"{run}/index"],
    ]


def _options(arguments: Mapping[str, Any], *names: str) -> list[str]:
    """Return the options of a command that stand for arguments; null arguments are left out."""
    words = []
    for name in names:
        value = arguments.get(name)
        option = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{option}" if value else f"--no-{option}")
        elif value:
            words += [f"--{option}", value]
    return words
