"""`dualenc train`: a recipe, from its first step or its latest checkpoint."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dualenc.training.trainer import TrainingResult


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
            _report(result)
    except (Stopped, Interrupted):
        PartialState().destroy_process_group()
        raise
    PartialState().destroy_process_group()


def _report(result: TrainingResult) -> None:
    loss = "" if math.isnan(result.loss) else f", training loss {result.loss:.4f}"
    print(f"\n{result.steps} steps in {result.seconds:.0f} s{loss}")
    width = max(map(len, result.metrics), default=0)
    for name, value in result.metrics.items():
        before = f"{result.before[name]:.4f} -> " if name in result.before else ""
        print(f"  {name:<{width}}  {before}{value:.4f}")
    if result.skipped:
        print(f"  {result.skipped} samples were left out because they could not be read")
    print(f"model: {result.model_folder}\nnext:  dualenc index {result.model_folder} DATA --out INDEX")
