"""Mixtures: training on several sources of pairs, each with a weight and prompts."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from dualenc.data.item_lists import Joined
from dualenc.data.pairs import PairDataset, Ragged
from dualenc.data.store.identity import digest_of
from dualenc.errors import DualencError
from dualenc.types import Integers, Side

SourceBatches = Literal["mixed", "one_source"]


class Mixture(PairDataset):
    """The concatenated pairs of several sources.

    Ids of a source begin where those of the previous source end, and equal texts of different
    sources are different items. In an epoch each pair of a source of weight w occurs w times
    (`dualenc.batching.mixture_batches.MixtureBatches`).

        Mixture(
            {"papers": BeirPairs("papers"), "medical": BeirPairs("medquad")},
            weights={"medical": 2.0},
        )

    Args:
        sources: pairs by name; names consist of letters, digits, "_" and "-".
        weights: weight of each source by name, above 0; by default 1.
        left_prompts: text to prepend to every left text of a source, by name; the model's prompt
            precedes it.
        right_prompts: text to prepend to every right text of a source, mined negatives included.
        batches: "mixed", or "one_source" for batches whose pairs are all from one source.

    Attributes:
        sizes: number of pairs of each source.
        prompts: left and right prompt of each source that has one.

    Raises:
        DualencError: sources of different modalities or sizes, invalid names or weights.
    """

    def __init__(
        self,
        sources: Mapping[str, PairDataset],
        *,
        weights: Mapping[str, float] | None = None,
        left_prompts: Mapping[str, str] | None = None,
        right_prompts: Mapping[str, str] | None = None,
        batches: SourceBatches = "mixed",
    ) -> None:
        if not sources:
            raise DualencError(
                "sources is empty",
                fix="give at least one",
                where="Mixture",
            )
        self.sources = dict(sources)
        self.batches = batches
        left = dict(left_prompts or {})
        right = dict(right_prompts or {})
        self.source_weights = {**dict.fromkeys(self.sources, 1.0), **(weights or {})}
        _check_names("weights", self.source_weights, self.sources)
        for name, weight in self.source_weights.items():
            # Also refuses NaN, which compares as False.
            if not 0 < weight < sys.float_info.max:
                raise DualencError(
                    f"the weight of {name} is {weight}",
                    fix="give a number above 0",
                    where="Mixture",
                )
        _check_sources(self.sources)
        _check_prompts("left", left, self.sources)
        _check_prompts("right", right, self.sources)
        prompted = [name for name in self.sources if name in left or name in right]
        self.prompts = {name: (left.get(name, ""), right.get(name, "")) for name in prompted}
        parts = list(self.sources.values())
        self.views = parts[0].views
        self.skipped = sum(part.skipped for part in parts)
        self.sizes = [len(part) for part in parts]
        left_items = _joined_items("left", self.sources, left)
        # Views share one collection, so that each image is decoded once.
        right_items = left_items if self.views else _joined_items("right", self.sources, right)
        super().__init__(
            left_items,
            right_items,
            _joined_ids([part.left_id for part in parts], left_items.starts),
            _joined_ids([part.right_id for part in parts], right_items.starts),
            negatives=_joined_negatives(parts, right_items.starts),
            weights=_joined_weights(parts),
            left_modality=parts[0].left_modality,
            right_modality=parts[0].right_modality,
        )

    @property
    def is_plain(self) -> bool:
        """True if an epoch is one pass over all pairs in arbitrary batches."""
        return self.batches == "mixed" and all(
            weight == 1 for weight in self.source_weights.values()
        )

    def pair_counts(self, side: Side) -> np.ndarray:
        """Return how often each item of a side occurs in an epoch's pairs on average, (N,)."""
        weights = np.repeat(list(self.source_weights.values()), self.sizes)
        return np.bincount(self.item_ids(side), weights=weights, minlength=len(self.items(side)))

    def describe(self) -> list[str]:
        """Return a line about each source."""
        lines = []
        for name, part in self.sources.items():
            facts = [f"{len(part)} pairs", f"weight {self.source_weights[name]:g}"]
            for side, prompt in zip(("left", "right"), self.prompts.get(name, ("", ""))):
                if prompt:
                    facts.append(f"{side} prompt {prompt!r}")
            lines.append(f"{name} ({', '.join(facts)})")
        return lines

    def identities(self) -> dict[str, str]:
        """Return the checksums of each source by name, and the arguments of the mixture."""
        checksums = {
            f"{name}.{what}": checksum
            for name, part in self.sources.items()
            for what, checksum in part.identities().items()
        }
        weights = {f"{name}.weight": f"{weight:g}" for name, weight in self.source_weights.items()}
        prompts = {f"{name}.prompts": digest_of(own) for name, own in self.prompts.items()}
        # The order of the sources decides the ids, so it is part of `identity`.
        order = {"sources": ", ".join(self.sources), "batches": self.batches}
        return checksums | weights | prompts | order


def _check_sources(sources: Mapping[str, PairDataset]) -> None:
    """Raise a `DualencError` for sources that cannot be trained on together."""
    first_name, first = next(iter(sources.items()))
    for name, pairs in sources.items():
        if not re.fullmatch(r"[\w-]+", name):
            raise DualencError(
                f"{name!r} is not a valid source name",
                fix="use letters, digits, _ and -",
                where="Mixture",
            )
        if isinstance(pairs, Mixture):
            raise DualencError(
                f"source {name} is itself a mixture",
                fix="list its sources in this one",
                where="Mixture",
            )
        for side in ("left", "right"):
            kind = _kind(pairs, side)
            first_kind = _kind(first, side)
            if kind != first_kind:
                raise DualencError(
                    f"the {side} side of {name} is {kind}, but {first_name}'s is {first_kind}",
                    fix="mix sources of one kind",
                    where="Mixture",
                )


def _kind(pairs: PairDataset, side: str) -> str:
    if pairs.views:
        return "images alone, in two views"
    dim = getattr(pairs, f"{side}_dim")
    return getattr(pairs, f"{side}_modality") if dim is None else f"vectors of {dim} numbers"


def _check_names(
    argument: str, values: Mapping[str, Any], sources: Mapping[str, PairDataset]
) -> None:
    for name in values:
        if name not in sources:
            raise DualencError(
                f"{argument} names {name!r}, which is not a source",
                fix=f"the sources are {', '.join(sources)}",
                where="Mixture",
            )


def _check_prompts(
    side: Side, prompts: Mapping[str, str], sources: Mapping[str, PairDataset]
) -> None:
    _check_names(f"{side}_prompts", prompts, sources)
    for name in prompts:
        kind = getattr(sources[name], f"{side}_modality")
        if kind != "text":
            raise DualencError(
                f"{side}_prompts names {name}, whose {side} side is {kind}",
                fix="give prompts for texts only",
                where="Mixture",
            )


def _joined_items(
    side: Side, sources: Mapping[str, PairDataset], prompts: Mapping[str, str]
) -> Joined:
    parts = [part.items(side) for part in sources.values()]
    return Joined(parts, [prompts.get(name, "") for name in sources])


def _joined_negatives(parts: Sequence[PairDataset], starts: Sequence[int]) -> Ragged | None:
    """Return the mined negatives of all sources by their ids in the mixture."""
    if all(part.negatives is None for part in parts):
        return None
    negatives = [part.negatives or Ragged.from_rows([[]] * len(part)) for part in parts]
    values = _joined_ids([own.values for own in negatives], starts)
    return Ragged.from_lengths(values, np.concatenate([own.lengths for own in negatives]))


def _joined_ids(parts: Sequence[Integers], starts: Sequence[int]) -> Integers:
    """Concatenate the item ids of sources, whose items begin at `starts` in the mixture."""
    return np.concatenate([part + start for part, start in zip(parts, starts)])


def _joined_weights(parts: Sequence[PairDataset]) -> np.ndarray | None:
    """Return the concatenated weights, 1 for sources without any; None if no source has any."""
    if all(part.weights is None for part in parts):
        return None
    weights = [
        np.ones(len(part), np.float32) if part.weights is None else part.weights for part in parts
    ]
    return np.concatenate(weights)
