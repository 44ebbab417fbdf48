"""Matryoshka: an objective at several lengths of the same embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.checks import (
    check_count,
    check_encoded_rows,
    check_tensors,
    fail,
    names_class,
)
from dualenc.objectives.outside_items import Encode
from dualenc.objectives.pair_batch import PairBatch
from dualenc.types import Side

SHARED_SETTINGS = (
    *("num_left", "num_right", "views", "num_views", "seed"),
    *("needs_num_left", "needs_encode", "remedy_for_other_batches", "encodes_in_backward"),
    *("takes_mined", "momentum"),
)
"""Attributes that `Matryoshka` takes over from the wrapped objective."""


class Matryoshka(Objective):
    """The mean over d in `dims` of an objective of the first d components, normalized.

    Each length has a copy of the objective with its own memory. Items that several lengths ask for
    are encoded once. Source: Kusupati et al. 2022, "Matryoshka representation learning",
    arXiv:2205.13147, Eq. 1, with equal weights.

        Matryoshka(SogCLR(num_left=m), dims=[64, 128, 256])

    Args:
        objective: objective to train at every length.
        dims: lengths, each at most D, the dimension of the embeddings.
    """

    objectives: Sequence[Objective]  # by length, ascending

    def __init__(self, objective: Objective, dims: Sequence[int]) -> None:
        # Not Objective.__init__, whose settings are those of the wrapped objective.
        nn.Module.__init__(self)
        if not isinstance(objective, Objective):
            problem = f"is of type {type(objective).__name__}"
            fail("objective", problem, "pass an objective of this package")
        if not isinstance(dims, Iterable):
            fail("dims", f"is {dims!r}", "pass several lengths, such as [64, 128, 256]")
        for length in dims:
            check_count("dims", length)
        lengths = sorted(dims)
        if not lengths or len(set(lengths)) < len(lengths):
            fail("dims", f"are {list(dims)}", "pass distinct lengths, such as [64, 128, 256]")
        self.dims = lengths
        # The objective itself serves the longest embeddings, the others get copies.
        objectives = [*(copy.deepcopy(objective) for _ in lengths[1:]), objective]
        self.objectives = nn.ModuleList(objectives)  # type: ignore[assignment]
        for name in SHARED_SETTINGS:
            setattr(self, name, getattr(objective, name))

    @property
    def name(self) -> str:
        """Name in logs and model cards."""
        return f"{type(self).__name__} of {self.objectives[-1].name}"

    @property
    def log_temperature(self) -> nn.Parameter:  # type: ignore[override]
        """log τ of the longest embeddings; a learned τ differs between lengths."""
        return self.objectives[-1].log_temperature

    @property
    def reports_loss(self) -> bool:
        """True if the objective of the longest embeddings reports the loss."""
        return self.objectives[-1].reports_loss

    def diagnostics(self) -> dict[str, Tensor]:
        """Return the diagnostics of the longest embeddings."""
        return self.objectives[-1].diagnostics()

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        """Set the number of pairs each item occurs in, for all lengths."""
        for objective in self.objectives:
            objective.set_counts(left_counts, right_counts)

    @names_class
    def compute_loss(self, batch: PairBatch, encode: Encode | None = None) -> ObjectiveOutput:
        """Return the mean over lengths of the wrapped objective's loss of prefixes.

        Args:
            batch: pairs with embeddings of full length.
            encode: see `Objective.forward`; returns embeddings of full length.
        """
        embeddings = batch.embeddings
        check_tensors(embeddings)
        dimension = embeddings["left"].shape[-1]
        if dimension < self.dims[-1]:
            problem = f"are {self.dims}, but the embeddings have {dimension} components"
            fail("dims", problem, "leave out the lengths beyond")
        if encode is not None:
            encode = CheckedEncode(encode, dimension)
            # An objective that encodes again in the backward pass does so to drop activations,
            # which the stored rows would keep.
            if not self.encodes_in_backward:
                encode = EncodedOnce(encode)
        outputs = {}
        for dim, objective in zip(self.dims, self.objectives, strict=True):
            prefixes = {name: prefix(vectors, dim) for name, vectors in embeddings.items()}
            encode_dim = None if encode is None else partial(encode_prefix, encode, dim)
            outputs[dim] = objective.compute_loss(replace(batch, **prefixes), encode_dim)
        losses = [output.loss for output in outputs.values()]
        per_anchor = [output.per_anchor for output in outputs.values()]
        return ObjectiveOutput(
            loss=torch.stack(losses).mean(),
            per_anchor=torch.stack(per_anchor).mean(dim=0),
            compute_metrics=lambda: metrics_by_dim(outputs),
        )


def prefix(vectors: Tensor, dim: int) -> Tensor:
    """Return the first d components of unit vectors (n, D), normalized in full precision.

    Zero vectors stay zero.
    """
    if dim == vectors.shape[1]:
        return vectors
    precision = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    return nn.functional.normalize(vectors[:, :dim].to(precision), dim=1)


def encode_prefix(encode: Encode, dim: int, side: Side, ids: Tensor) -> Tensor:
    """Return (n, d) the first d components of items (n,) of a side."""
    return prefix(encode(side, ids), dim)


class CheckedEncode:
    """Wraps `encode(side, ids)` and checks that it returns float tensors (n, D).

    A result of another shape could be cut to a prefix without an error.

        encode = CheckedEncode(encode, dimension=768)

    Args:
        encode: see `Encode`.
        dimension: D, the dimension of full embeddings.
    """

    def __init__(self, encode: Encode, dimension: int) -> None:
        self.encode = encode
        self.dimension = dimension

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        encoded = self.encode(side, ids)
        check_encoded_rows(encoded, len(ids), self.dimension)
        return encoded


class EncodedOnce:
    """Wraps the `encode(side, ids)` of one step so that several lengths encode an item once.

        encode = EncodedOnce(encode)

    Args:
        encode: function called for items that are not yet encoded; also without new items, because
            all ranks must make the same calls.
    """

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        # The embedding (D,) of each id, by side and by whether gradients are enabled.
        self._rows: dict[tuple[Side, bool], dict[int, Tensor]] = {}

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        rows = self._rows.setdefault((side, torch.is_grad_enabled()), {})
        numbers = ids.tolist()
        new = [item for item in dict.fromkeys(numbers) if item not in rows]
        encoded = self.encode(side, ids.new_tensor(new))
        rows |= zip(new, encoded, strict=True)
        if not numbers:
            return encoded
        return torch.stack([rows[item] for item in numbers])


def metrics_by_dim(outputs: dict[int, ObjectiveOutput]) -> dict[str, Tensor]:
    """Return the metrics of the longest embeddings, and those of other lengths as `name@d`."""
    scalars = dict(outputs[max(outputs)].metrics)
    for dim in sorted(outputs, reverse=True)[1:]:
        scalars |= {f"{name}@{dim}": value for name, value in outputs[dim].metrics.items()}
    return scalars
