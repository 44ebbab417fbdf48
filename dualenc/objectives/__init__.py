"""Objectives of the global contrastive loss, each usable in any training loop."""

from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.dcl import DCL
from dualenc.objectives.emc2 import EMC2
from dualenc.objectives.exact_global import ExactGlobal
from dualenc.objectives.hcl import HCL
from dualenc.objectives.infonce import InfoNCE
from dualenc.objectives.isogclr import ISogCLR
from dualenc.objectives.negative_cache import NegativeCache
from dualenc.objectives.saclr import SACLR
from dualenc.objectives.siglip import SigLIP
from dualenc.objectives.sogclr import SogCLR

__all__ = [
    "DCL",
    "EMC2",
    "HCL",
    "SACLR",
    "ExactGlobal",
    "ISogCLR",
    "InfoNCE",
    "NegativeCache",
    "Objective",
    "ObjectiveOutput",
    "SigLIP",
    "SogCLR",
]
