"""`dualenc train`: a recipe, from its first step or its latest checkpoint."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dualenc.terminal import printable

if TYPE_CHECKING:
    from dualenc.training.trainer import TrainingResult

STAND_IN = "DATA"
"""Where the recipe names no data that a following command could read."""
_EVALUATIONS = {"query-document": "retrieval", "vector": "retrieval", "image-text": "image-text", "image": "probe"}


def train(recipe: str, *overrides: str, resume: bool = False, allow_module: list[str] | None = None) -> None:
    """Train a dual encoder from a recipe.

    Writes checkpoints, metrics.jsonl, the resolved recipe.yaml and, at the end, the model folder into
    trainer.output. Under `accelerate launch` all processes work on the same global batches. SIGTERM, SIGUSR1
    and Ctrl-C end the run after the current step, with a checkpoint and exit code 143, 138 or 130; a second
    Ctrl-C ends it at once.

    Args:
        recipe: YAML file that names the classes of model, data, objective, batching and evaluator, and their arguments.
        overrides: section.key=value each, such as trainer.epochs=3 objective.temperature=0.05.
        resume: continue exactly from the latest checkpoint in trainer.output.
        allow_module: module other than dualenc whose classes the recipe may name, and whose code thus runs; repeatable.

    Raises:
        DualencError: an unknown key or class, data that cannot be read, a loss that is not finite, an output folder
            that holds a run already, or a checkpoint of another recipe.
    """
    from dualenc.recipe import read_recipe

    # Most mistakes are reported here, before torch is imported.
    described = read_recipe(recipe, overrides, allow_module or ())

    from accelerate import PartialState

    from dualenc import distributed
    from dualenc.training.signals import Interrupted, Stopped

    try:
        result = described.train(resume=resume)
        if distributed.is_main():
            _report(result, described.settings)
    except (Stopped, Interrupted):
        PartialState().destroy_process_group()
        raise
    PartialState().destroy_process_group()


def _report(result: TrainingResult, settings: Mapping[str, Any]) -> None:
    loss = "" if math.isnan(result.loss) else f", training loss {result.loss:.4f}"
    print(f"\n{result.steps} steps in {result.seconds:.0f} s{loss}")
    width = max(map(len, result.metrics), default=0)
    for name, value in result.metrics.items():
        before = f"{result.before[name]:.4f} -> " if name in result.before else ""
        print(f"  {name:<{width}}  {before}{value:.4f}")
    if result.skipped:
        print(f"  {result.skipped} samples were left out because they could not be read")
    print(printable(f"model: {result.model_folder}"))
    for words in next_commands(result.model_folder, settings):
        print(printable(f"next:  dualenc {shlex.join(words)}"))


def next_commands(model: Path, settings: Mapping[str, Any]) -> list[list[str]]:
    """The words after `dualenc` of what follows a training: report, evaluate and index, with the data of its recipe."""
    from dualenc.encoders.load import folder_kind

    task = _EVALUATIONS[folder_kind(model)]
    run = str(model.parent)
    return [
        ["report", run],
        ["evaluate", task, str(model), *_evaluated_data(task, settings)],
        ["index", str(model), *_indexed_data(task, settings["data"]), "--out", f"{run}/index"],
    ]


def _evaluated_data(task: str, settings: Mapping[str, Any]) -> list[str]:
    """The data that the evaluator measured on, or a stand-in where no command reads that: words of a command."""
    arguments = (settings["evaluator"] or {}).get("init_args") or {}
    path = arguments.get("path")
    if path:
        split = arguments.get("split") or "test"
        return [*([path] if isinstance(path, str) else path), *([] if split == "test" else ["--split", split])]
    # Training pairs of a table are no test set; a BEIR folder usually holds one.
    source = arguments.get("pairs") or (settings["data"] if not arguments else {})
    held_out = source.get("init_args") or {}
    is_beir = _class_name(source) == "BeirPairs"
    if task == "probe":
        return _path_of(settings["data"])
    if not is_beir and source is settings["data"]:
        return [STAND_IN]
    split = held_out.get("split")
    words = _path_of(source)
    for name in ("left_column", "right_column"):
        if held_out.get(name):
            words += [f"--{name.replace('_', '-')}", held_out[name]]
    if arguments and split and words != [STAND_IN]:
        words += ["--split", split]
    return words


def _indexed_data(task: str, data: Mapping[str, Any]) -> list[str]:
    """The documents or images of the training data, or a stand-in: words of a command."""
    # Rows of mined negatives hold several texts each, none of which a corpus is read from.
    words = [STAND_IN] if _class_name(data) == "MinedPairs" else _path_of(data)
    arguments = data.get("init_args") or {}
    option, column = ("--image-column", "left_column") if task == "image-text" else ("--text-column", "right_column")
    if arguments.get(column) and words != [STAND_IN]:
        words += [option, arguments[column]]
    return words


def _path_of(part: Mapping[str, Any]) -> list[str]:
    path = (part.get("init_args") or {}).get("path")
    return [path] if isinstance(path, str) else [STAND_IN]


def _class_name(part: Mapping[str, Any]) -> str:
    return str(part.get("class_path", "")).rsplit(".", 1)[-1]
