"""Objectives of the global contrastive loss, each usable in any training loop.

They extend InfoNCE, which in plain torch is

    scores = left @ right.T / temperature      # (B, B), left[i] belongs to right[i]
    pairs = torch.arange(len(scores))
    loss = (cross_entropy(scores, pairs) + cross_entropy(scores.T, pairs)) / 2

`InfoNCE()(left, right, ids).loss` is this number (`tests/objectives/test_in_batch.py`). The base
class adds items that occur in several pairs, known positives and mined negatives (`batch.py`),
blocks of anchors (`Anchors.in_blocks`), candidates of all ranks, weights, and input checks. An
objective adds the weight of each negative of the *corpus*: `plan` chooses items outside the batch,
and `losses` weighs them.
"""

from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.emc2 import EMC2
from dualenc.objectives.exact_global import ExactGlobal
from dualenc.objectives.frozen_corpus import FrozenCorpus
from dualenc.objectives.global_cache import GlobalCache
from dualenc.objectives.in_batch import DCL, HCL, InfoNCE, SigLIP
from dualenc.objectives.isir import ISIR
from dualenc.objectives.matryoshka import Matryoshka
from dualenc.objectives.negative_cache import NegativeCache
from dualenc.objectives.pair_batch import PairBatch
from dualenc.objectives.queues import MomentumQueue
from dualenc.objectives.saclr import SACLR
from dualenc.objectives.sogclr import ISogCLR, SogCLR

__all__ = [
    "DCL",
    "EMC2",
    "HCL",
    "ISIR",
    "SACLR",
    "ExactGlobal",
    "FrozenCorpus",
    "GlobalCache",
    "ISogCLR",
    "InfoNCE",
    "Matryoshka",
    "MomentumQueue",
    "NegativeCache",
    "Objective",
    "ObjectiveOutput",
    "PairBatch",
    "SigLIP",
    "SogCLR",
]
