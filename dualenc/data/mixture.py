"""Several sources of pairs in one training: ids one after the other, a prompt and a weight for each."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from dualenc.data.identity import digest_of, identities
from dualenc.data.pairs import Items, PairDataset, Ragged
from dualenc.errors import DualencError
from dualenc.types import Side

SourceBatches = Literal["mixed", "one_source"]


class Mixture(PairDataset):
    """The pairs of several sources: first those of the first one, then those of the second, and so on.

        Mixture({"papers": BeirPairs("papers"), "medical": BeirPairs("medquad")}, weights={"medical": 2.0})

    Ids of a source begin where those of the sources before it end, so that what objectives remember of an item stays
    with it. Its items are items of their own, also where their text stands in another source too. The corpus of the
    global loss is that of all sources together.

    Mined negatives, weights of pairs and a teacher's scores are taken over from the sources that bring them; in the
    others a pair has no negatives, the weight 1 and no score.

    In an epoch each pair of a source of weight w comes w times: of M pairs round(w·M) are drawn, every one ⌊w⌋ or ⌈w⌉
    times (see `dualenc.batching.mixture.MixtureBatches`). So the share of a source is its size times its weight over
    the sum of that, and with all weights 1, the default, every pair comes once.

    Args:
        sources: pairs by a name of letters, digits, "_" and "-".
        weights: by name, above 0; 1 for sources that are not named.
        left_prompts: by name, what is put before every left text of a source, behind the model's own prompt.
        right_prompts: by name, what is put before every right text, mined negatives included; likewise.
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
        self.sources = dict(sources)
        given_weights, prompts = weights or {}, {"left": left_prompts or {}, "right": right_prompts or {}}
        for argument, given in (("weights", given_weights), *((f"{side}_prompts", of) for side, of in prompts.items())):
            if unknown := [name for name in given if name not in self.sources]:
                raise DualencError(
                    f"Mixture: {argument} names {unknown[0]!r}, which is no source; there are {', '.join(self.sources)}"
                )
        self.source_weights = {name: _weight(name, given_weights.get(name, 1.0)) for name in self.sources}
        if batches not in get_args(SourceBatches):
            raise DualencError(f"Mixture: batches is {batches!r}; choose mixed or one_source")
        self.batches = batches
        _check_sources(self.sources, prompts)
        parts = list(self.sources.values())
        self.views = parts[0].views
        self.skipped = sum(part.skipped for part in parts)
        self.prompts = {
            name: (prompts["left"].get(name, ""), prompts["right"].get(name, ""))
            for name in self.sources
            if name in prompts["left"] or name in prompts["right"]
        }
        of_left, of_right = ([prompts[side].get(name, "") for name in self.sources] for side in ("left", "right"))
        left_items = _Joined([part.left_items for part in parts], of_left)
        right_items = left_items if self.views else _Joined([part.right_items for part in parts], of_right)
        negatives, negative_scores = None, None
        if any(part.negatives is not None for part in parts):
            lists = [part.negatives or Ragged.from_rows([[]] * len(part)) for part in parts]
            values = [of.values + first for of, first in zip(lists, right_items.starts)]
            lengths = np.concatenate([of.lengths for of in lists])
            negatives = Ragged(np.concatenate(values), np.concatenate([[0], np.cumsum(lengths)]))
            negative_scores = _filled([part.negative_scores for part in parts], [len(v) for v in values], np.nan)
        self.sizes = [len(part) for part in parts]
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
        self._ends = np.cumsum(self.sizes)

    @property
    def is_plain(self) -> bool:
        """Whether an epoch is a pass over all pairs in any batches, as of one source."""
        return self.batches == "mixed" and all(weight == 1 for weight in self.source_weights.values())

    def source_of(self, indices: np.ndarray) -> np.ndarray:
        """(n,) the number of the source of each pair (n,)."""
        return np.searchsorted(self._ends, indices, side="right")

    def pair_counts(self, side: Side) -> np.ndarray:
        """(N,) how often each item of a side stands in an epoch's pairs, on average: each pair as often as it comes."""
        ids, total = (self.left_id, self.num_left) if side == "left" else (self.right_id, self.num_right)
        return np.bincount(ids, weights=np.repeat(list(self.source_weights.values()), self.sizes), minlength=total)

    def describe(self) -> list[str]:
        """Each source in words."""
        lines = []
        for name, part in self.sources.items():
            facts = [f"{len(part)} pairs", f"weight {self.source_weights[name]:g}"]
            of_source = zip(("left", "right"), self.prompts.get(name, ("", "")))
            facts += [f"{side} prompt {prompt!r}" for side, prompt in of_source if prompt]
            lines.append(f"{name} ({', '.join(facts)})")
        return lines

    def identities(self) -> dict[str, str]:
        """Those of every source by its name, and what the mixture makes of them."""
        of_sources = {
            f"{name}.{what}": checksum
            for name, part in self.sources.items()
            for what, checksum in part.identities().items()
        }
        weights = {f"{name}.weight": f"{weight:g}" for name, weight in self.source_weights.items()}
        prompts = {f"{name}.prompts": digest_of(both) for name, both in self.prompts.items()}
        return {**of_sources, **weights, **prompts, "sources": ", ".join(self.sources), "batches": self.batches}


class _Joined:
    """The items of several collections, one after the other, texts with the prompt of theirs.

    Attributes:
        starts: where each collection begins, and the end.
    """

    def __init__(self, parts: Sequence[Items], prompts: Sequence[str]) -> None:
        self.parts, self.prompts = list(parts), list(prompts)
        self.starts = [0, *np.cumsum([len(part) for part in parts]).tolist()]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Any:
        number = bisect_right(self.starts, index) - 1
        item = self.parts[number][index - self.starts[number]]
        return self.prompts[number] + item if self.prompts[number] else item

    def identities(self, rows: np.ndarray, read: bool) -> list[bytes]:
        """Those of all, in the order of `rows`, with their prompts."""
        numbers = np.searchsorted(self.starts, rows, side="right") - 1
        found: list[bytes] = [b""] * len(rows)
        for number in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == number)
            of_part = identities(self.parts[number], rows[places] - self.starts[number], read)
            prompt = self.prompts[number].encode()
            for place, identity in zip(places.tolist(), of_part, strict=True):
                found[place] = prompt + identity
        return found


def _weight(name: str, given: Any) -> float:
    """The weight of a source, which must be a number above 0."""
    try:
        weight = float(given)
        told = f"{weight:g}"
    except (TypeError, ValueError, OverflowError):
        weight, told = math.nan, repr(given)[:40]
    if not 0 < weight < math.inf:
        raise DualencError(f"Mixture: the weight of {name} is {told}; it must be a number above 0")
    return weight


def _check_sources(sources: Mapping[str, PairDataset], prompts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise what does not fit together."""
    first_name, first = next(iter(sources.items()))
    for name, pairs in sources.items():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
            raise DualencError(f"Mixture: {name!r} is no name of a source; take letters, digits, _ and -")
        if isinstance(pairs, Mixture):
            raise DualencError(f"Mixture: source {name} is a mixture itself; name its sources in this one")
        if not isinstance(pairs, PairDataset):
            raise DualencError(f"Mixture: source {name} is a {type(pairs).__name__}; give pairs, such as TablePairs")
        if pairs.views != first.views:
            with_views, without = (name, first_name) if pairs.views else (first_name, name)
            raise DualencError(
                f"Mixture: {with_views} is images alone, in two views each, and {without} is pairs; train on one kind"
            )
        for side, kind, first_kind, dim, first_dim in (
            ("left", pairs.left_modality, first.left_modality, pairs.left_dim, first.left_dim),
            ("right", pairs.right_modality, first.right_modality, pairs.right_dim, first.right_dim),
        ):
            if kind != first_kind:
                raise DualencError(
                    f"Mixture: the {side} side of {name} is {kind}, but that of {first_name} is {first_kind}; mix "
                    "sources of one kind"
                )
            if dim != first_dim:
                raise DualencError(
                    f"Mixture: the {side} vectors of {name} have {dim} numbers, but those of {first_name} {first_dim}; "
                    "embed both with one model"
                )
            if not isinstance(prompt := prompts[side].get(name, ""), str):
                raise DualencError(
                    f"Mixture: {side}_prompts gives {name} a {type(prompt).__name__}; give a text, or leave it out"
                )
            if kind != "text" and name in prompts[side]:
                raise DualencError(
                    f"Mixture: {side}_prompts names {name}, whose {side} side is {kind}; prompts are for texts"
                )


def _filled(parts: Sequence[np.ndarray | None], lengths: Sequence[int], missing: float) -> np.ndarray | None:
    """One array after the other, with a value for those that are missing; None if all are."""
    if all(part is None for part in parts):
        return None
    return np.concatenate(
        [np.full(length, missing, np.float32) if part is None else part for part, length in zip(parts, lengths)]
    )
