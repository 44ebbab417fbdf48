"""Wrappers: an objective around another one, and Matryoshka, an objective at several lengths of the same embeddings."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.objectives.base import Objective, ObjectiveOutput
from dualenc.objectives.checks import check_encoded_rows, check_tensors, fail
from dualenc.objectives.items import Encode
from dualenc.types import Side


class Wrapper(Objective):
    """An objective around others; what it does not define is that of the last of them.

    Args:
        objectives: at least one.
    """

    def __init__(self, objectives: Sequence[Objective]) -> None:
        nn.Module.__init__(self)
        self.objectives = nn.ModuleList(objectives)
        self.num_left = self.main.num_left
        self.num_right = self.main.num_right
        self.views = self.main.views
        self.num_views = self.main.num_views
        self.seed = self.main.seed
        self.needs_num_left = self.main.needs_num_left
        self.needs_encode = self.main.needs_encode
        self.needs_teacher = self.main.needs_teacher
        self.takes_mined = self.main.takes_mined
        self.momentum = self.main.momentum
        self.encodes_in_backward = self.main.encodes_in_backward
        self.dims = self.main.dims

    def __iter__(self) -> Iterator[Objective]:
        for objective in self.objectives:
            assert isinstance(objective, Objective)
            yield objective

    @property
    def main(self) -> Objective:
        """The last of the wrapped objectives."""
        return list(self)[-1]

    @property
    def name(self) -> str:
        return f"{type(self).__name__} of {self.main.name}"

    @property
    def log_temperature(self) -> nn.Parameter:  # type: ignore[override]
        return self.main.log_temperature

    @property
    def reports_loss(self) -> bool:
        return self.main.reports_loss

    @property
    def needs_uniform_batches(self) -> str | None:
        return self.main.needs_uniform_batches

    def diagnostics(self) -> dict[str, Tensor]:
        return self.main.diagnostics()

    def set_progress(self, fraction: float) -> None:
        for objective in self:
            objective.set_progress(fraction)

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        for objective in self:
            objective.set_counts(left_counts, right_counts)


class Matryoshka(Wrapper):
    """The mean over d in `dims` of an objective of the first d components, scaled to length one.

        Matryoshka(SogCLR(num_left=m), dims=[64, 128, 256])

    Source: Kusupati et al. 2022, "Matryoshka representation learning", arXiv:2205.13147, Eq. 1, with equal weights.

    Each length has a copy of the objective with its own memory: what a chain, a moving average or a cache knows of an
    item is about similarities, which differ between lengths. Items that several lengths ask for are encoded once.

    Args:
        objective: what is trained at every length.
        dims: lengths, each at most D, the size of the embeddings.

    Raises:
        DualencError: lengths that are not positive, or are given twice; in `forward`, one beyond the embeddings.
    """

    def __init__(self, objective: Objective, dims: Sequence[int]) -> None:
        lengths = sorted(dims)
        if not lengths or len(set(lengths)) != len(lengths) or any(type(d) is not int or d < 1 for d in lengths):
            fail(self, "dims", f"are {list(dims)}; give different whole numbers above 0, such as [64, 128, 256]")
        super().__init__([*(copy.deepcopy(objective) for _ in lengths[1:]), objective])
        self.dims = self.lengths = lengths

    def forward(
        self,
        left: Tensor,
        right: Tensor,
        left_id: Tensor,
        right_id: Tensor | None = None,
        encode: Encode | None = None,
        *,
        negatives: Tensor | None = None,
        keys_left: Tensor | None = None,
        keys_right: Tensor | None = None,
        **batch: Any,
    ) -> ObjectiveOutput:
        """The mean over lengths; arguments as of the wrapped objective."""
        vectors = {
            "left": left,
            "right": right,
            "negatives": negatives,
            "keys_left": keys_left,
            "keys_right": keys_right,
        }
        check_tensors(self, vectors)
        if left.shape[-1] < self.lengths[-1]:
            fail(
                self, "dims", f"are {self.lengths}, but the embeddings have {left.shape[-1]}; leave out what is beyond"
            )
        if encode is not None and not self.encodes_in_backward:
            encode = EncodedOnce(encode)
        outputs = {
            dim: objective(
                prefix(left, dim),
                prefix(right, dim),
                left_id,
                right_id,
                None if encode is None else PrefixEncode(encode, dim),
                negatives=None if negatives is None else prefix(negatives, dim),
                keys_left=None if keys_left is None else prefix(keys_left, dim),
                keys_right=None if keys_right is None else prefix(keys_right, dim),
                **batch,
            )
            for dim, objective in zip(self.lengths, self, strict=True)
        }
        loss = torch.stack([output.loss for output in outputs.values()]).mean()
        per_anchor = torch.stack([output.per_anchor for output in outputs.values()]).mean(dim=0)
        return ObjectiveOutput(loss, MetricsByDim({d: output.metrics for d, output in outputs.items()}), per_anchor)


def prefix(vectors: Tensor, dim: int) -> Tensor:
    """The first d components of unit vectors (n, D), scaled to length one in full precision; zero stays zero."""
    if dim == vectors.shape[1]:
        return vectors
    precision = torch.float64 if vectors.dtype == torch.float64 else torch.float32
    return nn.functional.normalize(vectors[:, :dim].to(precision), dim=1)


class PrefixEncode:
    """`encode(side, ids)` that gives the first d components."""

    def __init__(self, encode: Encode, dim: int) -> None:
        self.encode = encode
        self.dim = dim

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        vectors = self.encode(side, ids)
        check_encoded_rows(vectors, len(ids))
        return prefix(vectors, self.dim)


class EncodedOnce:
    """`encode(side, ids)` of one step that encodes an item once, however many lengths ask for it.

    Args:
        encode: called for what is not yet encoded; each time, be it for nothing, as the other ranks do.
    """

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        # By side, and by whether there is a gradient: the place of each id, and the embeddings (n, D).
        self._places: dict[tuple[Side, bool], dict[int, int]] = {}
        self._embeddings: dict[tuple[Side, bool], list[Tensor]] = {}

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        key = (side, torch.is_grad_enabled())
        places = self._places.setdefault(key, {})
        new = [item for item in dict.fromkeys(ids.tolist()) if item not in places]
        places |= {item: number for number, item in enumerate(new, start=len(places))}
        parts = self._embeddings.setdefault(key, [])
        encoded = self.encode(side, ids.new_tensor(new))
        check_encoded_rows(encoded, len(new))
        parts.append(encoded)
        rows = torch.tensor([places[item] for item in ids.tolist()], dtype=torch.int64)
        return torch.cat(parts)[rows.to(parts[-1].device)]


class MetricsByDim(Mapping[str, Tensor]):
    """The metrics of the greatest length under their names, those of the others followed by `@d`."""

    def __init__(self, by_dim: dict[int, Mapping[str, Tensor]]) -> None:
        self.by_dim = by_dim
        self._widest = max(by_dim)
        self._places = {
            name if dim == self._widest else f"{name}@{dim}": (dim, name)
            for dim in sorted(by_dim, reverse=True)
            for name in by_dim[dim]
        }

    def __getitem__(self, name: str) -> Tensor:
        dim, metric = self._places[name]
        return self.by_dim[dim][metric]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def per_anchor(self) -> Tensor | None:
        """(2b,) the `batch_estimate` of each anchor at the greatest length."""
        return getattr(self.by_dim[self._widest], "per_anchor", None)
