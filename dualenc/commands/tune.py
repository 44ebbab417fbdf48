"""`dualenc tune`: choose learning rate, temperature, objective and batch of a recipe."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter, validators
from cyclopts.types import PositiveFloat, UInt32

from dualenc.commands.options import COMMAS
from dualenc.commands.output import print_line, print_next


def tune(
    recipe: str,
    *overrides: str,
    minutes: PositiveFloat = 20.0,
    space: Annotated[
        list[str] | None, Parameter(name="--set", consume_multiple=True, negative=())
    ] = None,
    trials: Annotated[int, Parameter(validator=validators.Number(gte=2, lte=1 << 16))] = 12,
    out: str | None = None,
    seed: UInt32 = 0,
    allow_module: Annotated[list[str] | None, COMMAS] = None,
) -> None:
    """Choose learning rate, temperature, objective and batch of a recipe within given minutes.

    Trials train for equal seconds of wall-clock time; the first is the recipe as it is. Half of the
    held-out queries choose, the other half compares with the first. A killed search continues by
    the same command. Writes best.yaml, metrics.json and report.html. Needs optuna: pip install
    'dualenc[tune]'.

    Args:
        recipe: YAML file, as for train.
        overrides: section.key=value pairs, such as data.path=pairs.csv.
        minutes: minutes in total; more continue a search.
        space: settings to try, section.key=low..high or section.key=value,value; objective=SogCLR+,
            InfoNCE chooses classes, with + for positive_in_softmax. By default as fits the kind of
            model.
        trials: trials of full length that the minutes hold; more are begun where some stop early.
        out: output folder; by default trainer.output with -tuned.
        seed: random seed of the search.
        allow_module: module other than dualenc whose classes the recipe may name, so that its code
            runs; repeatable.
    """
    from dualenc.evaluation.report_page import print_table
    from dualenc.workflows import tune_recipe

    result = tune_recipe.tune(
        recipe,
        *overrides,
        minutes=minutes,
        space=space,
        trials=trials,
        out=out,
        seed=seed,
        allow_module=allow_module,
    )
    print_table(result.table)
    print_line(result.verdict.text)
    print_line(f"table and plot: {result.page}")
    print_next(["train", str(result.recipe)])
