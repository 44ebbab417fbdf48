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

IN_SOFTMAX = {"positive_in_softmax": True}
PLUS = {"gamma": 0.5, **IN_SOFTMAX}
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": objectives.InfoNCE,
    "DCL": objectives.DCL,
    "HCL": partial(objectives.HCL, hardness=0.5, class_prior=0.01),
    "SogCLR": partial(objectives.SogCLR, gamma=0.5),
    "SogCLR+": partial(objectives.SogCLR, **PLUS),
    "ISogCLR": partial(objectives.ISogCLR, gamma=0.5, temperature_rate=0.001),
    "EMC2": objectives.EMC2,
    "ISIR": objectives.ISIR,
    "NegativeCache": partial(objectives.NegativeCache, refresh=0.001),
    "SACLR": objectives.SACLR,
    "SigLIP": objectives.SigLIP,
    "GlobalCache": objectives.GlobalCache,
    "GlobalCache+": partial(objectives.GlobalCache, **IN_SOFTMAX),
    "GlobalCache 2": partial(objectives.GlobalCache, extra_encodes=2.0),
    "ExactGlobal": partial(objectives.ExactGlobal, corpus_chunk_size=4096),
    "MomentumQueue": objectives.MomentumQueue,
    "GlobalCache, mined each epoch": objectives.GlobalCache,
    # Methods that are tried, see `probes.py`.
    "InfoNCE, teacher's batches": objectives.InfoNCE,
    "predicted log-normaliser+": partial(probes.PredictedPartition, **IN_SOFTMAX),
    **{
        f"robust τ+, ρ = {radius}": partial(
            probes.SharedRobustTemperature, radius=radius, temperature_rate=1e-4, **PLUS
        )
        for radius in (2, 4, 6)
    },
    **{
        f"SCENT+, κ = {str(kappa).replace('-', '−')}": partial(probes.SCENT, kappa=kappa, **PLUS)
        for kappa in (-0.5, 0.5, 1)
    },
    "two banks of 24, 4 accumulated": partial(probes.DualBank, queue_size=24),
    "two banks of 128, 4 accumulated": partial(probes.DualBank, queue_size=128),
    "two banks of 128": partial(probes.DualBank, queue_size=128),
    "two banks of 512": partial(probes.DualBank, queue_size=512),
    "InfoNCE, α = 0.01": partial(probes.FilteredInfoNCE, alpha=0.01),
    "SogCLR+, α = 0.01": partial(probes.FilteredSogCLR, alpha=0.01, **PLUS),
    "SogCLR+, α = 0.001": partial(probes.FilteredSogCLR, alpha=0.001, **PLUS),
    "SogCLR+, α = 0.01 at once": partial(
        probes.FilteredSogCLR, alpha=0.01, threshold_rate=0.3, start=0.0, **PLUS
    ),
    "GlobalCache, nearest 1 left out": partial(probes.FilteredGlobalCache, count=1),
    "GlobalCache, nearest 5 left out": partial(probes.FilteredGlobalCache, count=5),
}
TRAINER: dict[str, dict[str, Any]] = {
    "InfoNCE, mined each epoch": {"mine_every": 1},
    "InfoNCE, 4 accumulated": {"gradient_accumulation": 4},
    "InfoNCE, cached": {"chunk_size": 16},
    "InfoNCE, cached by 8": {"chunk_size": 8},
    "InfoNCE, cached by 4": {"chunk_size": 4},
}
OBJECTIVES |= dict.fromkeys(TRAINER, objectives.InfoNCE)
TRAINER["GlobalCache, mined each epoch"] = {"mine_every": 1}
for size in (24, 128):
    TRAINER[f"two banks of {size}, 4 accumulated"] = {"gradient_accumulation": 4}


def objective_of(name: str) -> Callable[..., Objective]:
    """Return what constructs the objective of a row, by the row's name or an import path."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if "." in name:
        return import_objective(name)
    fix = f"give one of {', '.join(OBJECTIVES)}, or an import path"
    raise DualencError(f"objectives: there is no {name}{nearest(name, OBJECTIVES)}", fix=fix)
