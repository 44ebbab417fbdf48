"""Mixtures: several sources of pairs in one training, each with a weight and prompts."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from dualenc.data.columns import Joined
from dualenc.data.identity import digest_of
from dualenc.data.pairs import PairDataset, Ragged
from dualenc.errors import DualencError
from dualenc.types import Side

SourceBatches = Literal["mixed", "one_source"]


class Mixture(PairDataset):
    """The pairs of several sources: first those of the first one, then those of the second, and so on.

        Mixture({"papers": BeirPairs("papers"), "medical": BeirPairs("medquad")}, weights={"medical": 2.0})

    Ids of a source begin where those of the sources before it end, so that what objectives remember of an item stays
    with it. Equal texts of different sources are different items. The corpus of the global loss is that of all sources
    together.

    Mined negatives, weights of pairs and a teacher's scores come from the sources that have them; in the others a pair
    has no negatives, the weight 1 and no score.

    In an epoch each pair of a source of weight w comes w times: of M pairs round(w·M) are drawn, every one ⌊w⌋ or ⌈w⌉
    times (see `dualenc.batching.mixture.MixtureBatches`). So the share of a source is its size times its weight over
    the sum of that, and with all weights 1, the default, every pair comes once.

    Args:
        sources: pairs by a name of letters, digits, "_" and "-".
        weights: by name, above 0; 1 for sources that are not named.
        left_prompts: by name, put before every left text of a source, behind the model's own prompt.
        right_prompts: by name, put before every right text, mined negatives included; likewise.
        batches: "mixed", or "one_source" for batches whose pairs are all of one source.

    Attributes:
        sources, source_weights, batches: as given, with a weight for every source.
        prompts: left and right prompt of each source that has one.
        sizes: (K,) how many pairs each source has.

    Raises:
        DualencError: no source, a name that is none of the sources, a weight that is not above 0, or sources whose
            items are of different kinds.
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
            raise DualencError("Mixture: sources is empty; name at least one")
        if batches not in get_args(SourceBatches):
            raise DualencError(f"Mixture: batches is {batches!r}; choose mixed or one_source")
        self.sources = dict(sources)
        self.batches = batches
        left = dict(left_prompts or {})
        right = dict(right_prompts or {})
        arguments = {"weights": weights or {}, "left_prompts": left, "right_prompts": right}
        for argument, values in arguments.items():
            _check_names(argument, values, self.sources)
        self.source_weights = {name: _weight(name, (weights or {}).get(name, 1.0)) for name in self.sources}
        _check_sources(self.sources, {"left": left, "right": right})
        self.prompts = {
            name: (left.get(name, ""), right.get(name, "")) for name in self.sources if name in left or name in right
        }
        parts = list(self.sources.values())
        self.views = parts[0].views
        self.skipped = sum(part.skipped for part in parts)
        self.sizes = [len(part) for part in parts]
        self._ends = np.cumsum(self.sizes)
        # Items keep their order by source, so ids are those of the source plus an offset.
        left_items = Joined([part.left_items for part in parts], [left.get(name, "") for name in self.sources])
        right_items = left_items
        if not self.views:
            right_items = Joined([part.right_items for part in parts], [right.get(name, "") for name in self.sources])
        negatives, negative_scores = _joined_negatives(parts, right_items.starts)
        super().__init__(
            left_items,
            right_items,
            np.concatenate([part.left_id + first for part, first in zip(parts, left_items.starts)]),
            np.concatenate([part.right_id + first for part, first in zip(parts, right_items.starts)]),
            negatives=negatives,
            weights=_filled([part.weights for part in parts], self.sizes, 1.0),
            scores=_filled([part.scores for part in parts], self.sizes, np.nan),
            negative_scores=negative_scores,
            left_modality=parts[0].left_modality,
            right_modality=parts[0].right_modality,
        )

    @property
    def is_plain(self) -> bool:
        """Whether an epoch is one pass over all pairs in arbitrary batches, as without a mixture."""
        return self.batches == "mixed" and all(weight == 1 for weight in self.source_weights.values())

    def source_of(self, indices: np.ndarray) -> np.ndarray:
        """(n,) the number of the source of each pair (n,)."""
        return np.searchsorted(self._ends, indices, side="right")

    def pair_counts(self, side: Side) -> np.ndarray:
        """(N,) the mean number of times that each item of a side occurs in an epoch's pairs."""
        # In proportion to the weights, because pairs come that often.
        weights = np.repeat(list(self.source_weights.values()), self.sizes)
        if side == "left":
            return np.bincount(self.left_id, weights=weights, minlength=self.num_left)
        return np.bincount(self.right_id, weights=weights, minlength=self.num_right)

    def describe(self) -> list[str]:
        """Each source in words."""
        lines = []
        for name, part in self.sources.items():
            facts = [f"{len(part)} pairs", f"weight {self.source_weights[name]:g}"]
            prompts = zip(("left", "right"), self.prompts.get(name, ("", "")))
            facts += [f"{side} prompt {prompt!r}" for side, prompt in prompts if prompt]
            lines.append(f"{name} ({', '.join(facts)})")
        return lines

    def identities(self) -> dict[str, str]:
        """Those of every source by its name, and the arguments of the mixture."""
        checksums: dict[str, str] = {}
        for name, part in self.sources.items():
            checksums |= {f"{name}.{what}": checksum for what, checksum in part.identities().items()}
        weights = {f"{name}.weight": f"{weight:g}" for name, weight in self.source_weights.items()}
        prompts = {f"{name}.prompts": digest_of(both) for name, both in self.prompts.items()}
        return {**checksums, **weights, **prompts, "sources": ", ".join(self.sources), "batches": self.batches}


def _weight(name: str, given: Any) -> float:
    """The weight of a source, which must be a number above 0."""
    try:
        weight = float(given)
        text = f"{weight:g}"
    except (TypeError, ValueError, OverflowError):
        weight = math.nan
        text = repr(given)[:40]
    if not 0 < weight < math.inf:
        raise DualencError(f"Mixture: the weight of {name} is {text}; it must be a number above 0")
    return weight


def _check_names(argument: str, values: Mapping[str, Any], sources: Mapping[str, PairDataset]) -> None:
    for name in values:
        if name not in sources:
            raise DualencError(
                f"Mixture: {argument} names {name!r}, which is no source; there are {', '.join(sources)}"
            )


def _check_sources(sources: Mapping[str, PairDataset], prompts: Mapping[str, Mapping[str, str]]) -> None:
    """Insist that the sources can be trained on together."""
    first_name, first = next(iter(sources.items()))
    for name, pairs in sources.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise DualencError(f"Mixture: {name!r} is no name of a source; take letters, digits, _ and -")
        if isinstance(pairs, Mixture):
            raise DualencError(f"Mixture: source {name} is a mixture itself; name its sources in this one")
        if not isinstance(pairs, PairDataset):
            raise DualencError(f"Mixture: source {name} is a {type(pairs).__name__}; give pairs, such as TablePairs")
        if pairs.views != first.views:
            names = (name, first_name) if pairs.views else (first_name, name)
            raise DualencError(
                f"Mixture: {names[0]} is images alone, in two views each, and {names[1]} is pairs; train on one kind"
            )
        for side in ("left", "right"):
            _check_side(side, name, pairs, first_name, first)
            _check_prompt(side, name, pairs, prompts[side])


def _check_side(side: str, name: str, pairs: PairDataset, first_name: str, first: PairDataset) -> None:
    """Insist that one side of a source is of the same kind and size as that of the first source."""
    kind, first_kind = (getattr(source, f"{side}_modality") for source in (pairs, first))
    if kind != first_kind:
        raise DualencError(
            f"Mixture: the {side} side of {name} is {kind}, but that of {first_name} is {first_kind}; mix "
            "sources of one kind"
        )
    dim, first_dim = (getattr(source, f"{side}_dim") for source in (pairs, first))
    if dim != first_dim:
        raise DualencError(
            f"Mixture: the {side} vectors of {name} have {dim} numbers, but those of {first_name} {first_dim}; "
            "embed both with one model"
        )


def _check_prompt(side: str, name: str, pairs: PairDataset, prompts: Mapping[str, str]) -> None:
    prompt = prompts.get(name, "")
    if not isinstance(prompt, str):
        raise DualencError(
            f"Mixture: {side}_prompts gives {name} a {type(prompt).__name__}; give a text, or leave it out"
        )
    kind = getattr(pairs, f"{side}_modality")
    if kind != "text" and name in prompts:
        raise DualencError(f"Mixture: {side}_prompts names {name}, whose {side} side is {kind}; prompts are for texts")


def _joined_negatives(parts: Sequence[PairDataset], starts: Sequence[int]) -> tuple[Ragged | None, np.ndarray | None]:
    """The mined negatives of all sources by their ids in the mixture, and the teacher's scores of these."""
    if all(part.negatives is None for part in parts):
        return None, None
    # Sources without mined negatives have an empty list for each pair.
    lists = [part.negatives or Ragged.from_rows([[]] * len(part)) for part in parts]
    values = [ragged.values + first for ragged, first in zip(lists, starts)]
    lengths = np.concatenate([ragged.lengths for ragged in lists])
    negatives = Ragged(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))
    return negatives, _filled([part.negative_scores for part in parts], [len(ids) for ids in values], np.nan)


def _filled(parts: Sequence[np.ndarray | None], lengths: Sequence[int], missing: float) -> np.ndarray | None:
    """One array after the other, with a value for those that are missing; None if all are."""
    if all(part is None for part in parts):
        return None
    filled = []
    for part, length in zip(parts, lengths):
        filled.append(np.full(length, missing, np.float32) if part is None else part)
    return np.concatenate(filled)
