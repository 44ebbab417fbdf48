"""An earlier adaptation of an index that another one continues from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.index_encoder import IndexEncoder
from dualenc.encoders.load import load_model
from dualenc.errors import DualencError
from dualenc.io.reading import read_json_object
from dualenc.search.embed.encode import tower_checksum
from dualenc.search.searcher import check_encoder
from dualenc.types import StrPath
from dualenc.workflows.adaptation_report import TASK
from dualenc.workflows.adapting import TOWERS, Ends, QuerySide, Trained
from dualenc.workflows.result_folder import RESULT
from dualenc.workflows.trained_pairs import RECORD, TrainedPairs

WORK = ".adapt"
"""Folder in the output for the vectors of a run. It marks the output of an interrupted run."""
MODEL = "model"
MAP = "map"
"""Subfolder with the trained map alone, as a `VectorEncoder`."""
AGAIN = "adapt without --from"


@dataclass(frozen=True, eq=False)
class PreviousRun:
    """A finished adaptation of the same index, with its model and what that was trained on.

        previous = PreviousRun.open("runs/yesterday", side)
        ends = previous.ends(side.new_model(input_dim))

    Attributes:
        folder: output of the run.
        record: pairs that its model was trained on, also in the runs that it continued from.
        weights: weights of the trained part of its model.
        checksum: checksum of these weights.
    """

    folder: Path
    record: TrainedPairs
    weights: Mapping[str, Tensor]
    checksum: str

    @classmethod
    def open(cls, folder: StrPath, side: QuerySide) -> PreviousRun:
        """Open the output of a finished run.

        Args:
            folder: folder that `check_previous` has passed.
            side: the query side of the index.

        Raises:
            DualencError: the run adapted another index, or other queries.
        """
        folder = Path(folder)
        # Read also for a map: it names the vectors that it was adapted for.
        model = load_model(folder / MODEL)
        if not isinstance(model, IndexEncoder):
            raise DualencError("holds no query model of an index", fix=AGAIN, where=folder / MODEL)
        check_encoder(model, side.documents.provenance, side.documents.dim, side.source)
        if model.left.modality != side.modality:
            raise DualencError(
                f"takes queries of kind {model.left.modality}, and those of the log are of kind "
                f"{side.modality}",
                fix=AGAIN,
                where=folder,
            )
        record = TrainedPairs.read(folder / RECORD)
        record.check_documents(side.documents, side.source)
        trained = load_model(folder / MAP) if side.trained in TOWERS else model
        return cls(folder, record, trained.state_dict(), tower_checksum(trained.left))

    @property
    def name(self) -> str:
        """A name that differs for runs with other models, such as from-1f3a9c20."""
        return f"from-{self.checksum[:8]}"

    def ends(self, untrained: DualEncoder) -> Ends:
        """Return this run's model and that of the index, in the form that is trained.

        Args:
            untrained: model before any training; not changed.

        Raises:
            DualencError: the weights have other names or sizes.
        """
        original = copy.deepcopy(untrained)
        own = untrained.state_dict()
        sizes = [
            {name: weight.shape for name, weight in weights.items()}
            for weights in (own, self.weights)
        ]
        if sizes[0] != sizes[1]:
            raise DualencError(
                "its model takes queries of another size, or is of another kind",
                fix=AGAIN,
                where=self.folder,
            )
        original.load_state_dict(dict(self.weights))
        # A perceptron is the identity whatever its hidden layer, and between those of two random
        # ones lies neither.
        hidden = {name: weight for name, weight in self.weights.items() if ".map.up." in name}
        base = copy.deepcopy(untrained)
        base.load_state_dict({**own, **hidden})
        return Ends(original, base)


def is_unfinished(folder: Path) -> bool:
    """Return True for an interrupted run, whose work folder is made first and removed last."""
    return (folder / WORK).is_dir()


def check_previous(folder: StrPath, trained: Trained) -> None:
    """Raise unless a folder holds a finished adaptation that can be continued.

    Args:
        folder: output of `adapt`.
        trained: what is trained now.

    Raises:
        DualencError: the folder is no finished adaptation, an older version wrote it, or another
            part was trained.
    """
    folder = Path(folder)
    results = _results_of(folder)
    if not (folder / RECORD).is_file():
        raise DualencError(
            f"lacks {RECORD}, so it was written by an older version", fix=AGAIN, where=folder
        )
    before = results.get("trained")
    # Merged adapters are a whole model.
    if before != trained and (before, trained) != ("lora", "all"):
        fix = f"continue with --train {'all' if before == 'lora' else before}"
        raise DualencError(f"trained {before}, and --train is {trained}", fix=fix, where=folder)


def _results_of(folder: Path) -> dict[str, Any]:
    """Return metrics.json of a finished adaptation."""
    if not folder.is_dir():
        raise DualencError(
            "no such folder", fix=f"name the output of an earlier run, or {AGAIN}", where=folder
        )
    path = folder / RESULT
    results = read_json_object(path) if path.is_file() else {}
    if results.get("task") == TASK and not is_unfinished(folder):
        return results
    state = "holds no adaptation"
    if is_unfinished(folder):
        state = "holds an adaptation that is not finished"
    raise DualencError(
        state, fix=f"name the output of a finished `dualenc adapt`, or {AGAIN}", where=folder
    )
