"""Objectives of the global contrastive loss, each usable in any training loop."""

from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.distilled import Distilled
from dualenc.objectives.emc2 import EMC2
from dualenc.objectives.exact import ExactGlobal
from dualenc.objectives.global_cache import GlobalCache
from dualenc.objectives.in_batch import DCL, HCL, InfoNCE, SigLIP
from dualenc.objectives.isir import ISIR
from dualenc.objectives.matryoshka import Matryoshka
from dualenc.objectives.negative_cache import NegativeCache
from dualenc.objectives.queues import MomentumQueue
from dualenc.objectives.saclr import SACLR
from dualenc.objectives.sogclr import ISogCLR, SogCLR

__all__ = [
    "DCL",
    "EMC2",
    "HCL",
    "ISIR",
    "SACLR",
    "Distilled",
    "ExactGlobal",
    "GlobalCache",
    "ISogCLR",
    "InfoNCE",
    "Matryoshka",
    "MomentumQueue",
    "NegativeCache",
    "Objective",
    "ObjectiveOutput",
    "SigLIP",
    "SogCLR",
]
