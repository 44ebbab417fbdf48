"""Objectives of the global contrastive loss, each usable in any training loop."""

from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.dcl import DCL
from dualenc.objectives.infonce import InfoNCE
from dualenc.objectives.sogclr import SogCLR

__all__ = ["DCL", "InfoNCE", "Objective", "ObjectiveOutput", "SogCLR"]
