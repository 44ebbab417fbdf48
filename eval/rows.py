"""Rows of the tables: names of objectives, what constructs them, and how the trainer is set.

A + has the positive in the softmax. A name that is an import path, such as my_package.MyLoss, is a
class of your own or of another library: see `outside.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from outside import import_objective

from dualenc import objectives
from dualenc.data import PairDataset
from dualenc.errors import DualencError, nearest
from dualenc.objectives import Objective

IN_SOFTMAX = {"positive_in_softmax": True}
OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "InfoNCE": objectives.InfoNCE,
    "DCL": objectives.DCL,
    "HCL": partial(objectives.HCL, hardness=0.5, class_prior=0.01),
    "SogCLR": partial(objectives.SogCLR, gamma=0.5),
    "SogCLR+": partial(objectives.SogCLR, gamma=0.5, **IN_SOFTMAX),
    "ISogCLR": partial(objectives.ISogCLR, gamma=0.5, temperature_rate=0.001),
    "EMC2": objectives.EMC2,
    "ISIR": objectives.ISIR,
    "NegativeCache": partial(objectives.NegativeCache, refresh=0.001),
    "SACLR": objectives.SACLR,
    "SigLIP": objectives.SigLIP,
    "GlobalCache": objectives.GlobalCache,
    "GlobalCache+": partial(objectives.GlobalCache, **IN_SOFTMAX),
    "ExactGlobal": partial(objectives.ExactGlobal, corpus_chunk_size=4096),
    "MomentumQueue": objectives.MomentumQueue,
}
TRAINER: dict[str, dict[str, Any]] = {
    "InfoNCE, mined each epoch": {"mine_every": 1},
    "InfoNCE, cached by 8": {"chunk_size": 8},
}
OBJECTIVES |= dict.fromkeys(TRAINER, objectives.InfoNCE)


def sizes_of(pairs: PairDataset) -> dict[str, Any]:
    """Return the sizes of pairs, which objectives are constructed with."""
    return {"num_left": pairs.num_left, "num_right": pairs.num_right, "views": pairs.views}


def objective_of(name: str) -> Callable[..., Objective]:
    """Return what constructs the objective of a row, by the row's name or an import path."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if "." in name:
        return import_objective(name)
    fix = f"give one of {', '.join(OBJECTIVES)}, or an import path"
    raise DualencError(f"objectives: there is no {name}{nearest(name, OBJECTIVES)}", fix=fix)
