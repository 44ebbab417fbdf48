"""Rows of the tables: names of objectives, what constructs them, and how the trainer is set.

A + has the positive in the softmax. A name that is an import path, such as my_package.MyLoss, is a
class of your own or of another library: see `outside.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import probes
from outside import import_objective

from dualenc import objectives
from dualenc.errors import DualencError, nearest
from dualenc.objectives import Objective


class Row:
    """A row: an objective with its arguments, and settings of the trainer.

    Args:
        kind: class of the objective.
        trainer: settings of the trainer that belong to the row.
        **arguments: arguments of the class, beside those that all objectives get.
    """

    def __init__(
        self, kind: type[Objective], trainer: dict[str, Any] | None = None, **arguments: Any
    ) -> None:
        self.new: Callable[..., Objective] = partial(kind, **arguments)
        self.trainer = trainer or {}


IN_SOFTMAX = {"positive_in_softmax": True}
PLUS = {"gamma": 0.5, **IN_SOFTMAX}
FOUR = {"gradient_accumulation": 4}
MINED = {"mine_every": 1}

ROWS = {
    "InfoNCE": Row(objectives.InfoNCE),
    "DCL": Row(objectives.DCL),
    "HCL": Row(objectives.HCL, hardness=0.5, class_prior=0.01),
    "SogCLR": Row(objectives.SogCLR, gamma=0.5),
    "SogCLR+": Row(objectives.SogCLR, **PLUS),
    "ISogCLR": Row(objectives.ISogCLR, gamma=0.5, temperature_rate=0.001),
    "EMC2": Row(objectives.EMC2),
    "ISIR": Row(objectives.ISIR),
    "NegativeCache": Row(objectives.NegativeCache, refresh=0.001),
    "SACLR": Row(objectives.SACLR),
    "SigLIP": Row(objectives.SigLIP),
    "GlobalCache": Row(objectives.GlobalCache),
    "GlobalCache+": Row(objectives.GlobalCache, **IN_SOFTMAX),
    "GlobalCache 2": Row(objectives.GlobalCache, extra_encodes=2.0),
    "ExactGlobal": Row(objectives.ExactGlobal, corpus_chunk_size=4096),
    "MomentumQueue": Row(objectives.MomentumQueue),
    "InfoNCE, mined each epoch": Row(objectives.InfoNCE, MINED),
    "GlobalCache, mined each epoch": Row(objectives.GlobalCache, MINED),
    "InfoNCE, 4 accumulated": Row(objectives.InfoNCE, FOUR),
    "InfoNCE, cached": Row(objectives.InfoNCE, {"chunk_size": 16}),
    "InfoNCE, cached by 8": Row(objectives.InfoNCE, {"chunk_size": 8}),
    "InfoNCE, cached by 4": Row(objectives.InfoNCE, {"chunk_size": 4}),
    # Methods that are tried, see `probes.py`.
    "InfoNCE, teacher's batches": Row(objectives.InfoNCE),
    "predicted log-normaliser+": Row(probes.PredictedPartition, **IN_SOFTMAX),
    **{
        f"robust τ+, ρ = {radius}": Row(
            probes.SharedRobustTemperature, radius=radius, temperature_rate=1e-4, **PLUS
        )
        for radius in (2, 4, 6)
    },
    **{
        f"SCENT+, κ = {str(kappa).replace('-', '−')}": Row(probes.SCENT, kappa=kappa, **PLUS)
        for kappa in (-0.5, 0.5, 1)
    },
    "two banks of 24, 4 accumulated": Row(probes.DualBank, FOUR, queue_size=24),
    "two banks of 128, 4 accumulated": Row(probes.DualBank, FOUR, queue_size=128),
    "two banks of 128": Row(probes.DualBank, queue_size=128),
    "two banks of 512": Row(probes.DualBank, queue_size=512),
    "InfoNCE, α = 0.01": Row(probes.FilteredInfoNCE, alpha=0.01),
    "SogCLR+, α = 0.01": Row(probes.FilteredSogCLR, alpha=0.01, **PLUS),
    "SogCLR+, α = 0.001": Row(probes.FilteredSogCLR, alpha=0.001, **PLUS),
    "SogCLR+, α = 0.01 at once": Row(
        probes.FilteredSogCLR, alpha=0.01, threshold_rate=0.3, start=0.0, **PLUS
    ),
    "GlobalCache, nearest 1 left out": Row(probes.FilteredGlobalCache, count=1),
    "GlobalCache, nearest 5 left out": Row(probes.FilteredGlobalCache, count=5),
}
OBJECTIVES = {name: row.new for name, row in ROWS.items()}
TRAINER = {name: row.trainer for name, row in ROWS.items() if row.trainer}


def objective_of(name: str) -> Callable[..., Objective]:
    """Return what constructs the objective of a row, by the row's name or an import path.

    Raises:
        DualencError: there is none.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if "." in name:
        return import_objective(name)
    fix = f"give one of {', '.join(OBJECTIVES)}, or an import path"
    raise DualencError(f"objectives: there is no {name}{nearest(name, OBJECTIVES)}", fix=fix)
