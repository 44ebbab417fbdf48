"""One objective at several lengths of the same embeddings, so that their beginnings can be used alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.objectives.base import Encode, Objective, ObjectiveOutput
from dualenc.objectives.looks import upload
from dualenc.types import Side


class Matryoshka(Objective):
    """The mean over d in `dims` of an objective of the first d components, scaled to length one.

    Source: Kusupati et al. 2022, "Matryoshka representation learning", arXiv 2205.13147, eq. 1, with equal weights.
    Each length has an objective of its own with its own state: what a chain, a moving average or a cache knows of an
    item is a fact about similarities, which differ between lengths. Items that several of them ask for are encoded
    once. Any objective makes one: `SogCLR(dims=[64, 128, 256], …)`.

    Args:
        objectives: one per length, alike but for their state.
        dims: lengths, each at most D, the size of the embeddings.

    Raises:
        DualencError: lengths that are not positive, or come twice; in `forward`, one beyond the embeddings.
    """

    def __init__(self, objectives: Sequence[Objective], dims: Sequence[int]) -> None:
        given = list(dims)
        if not given or len(set(given)) != len(given) or any(type(dim) is not int or dim < 1 for dim in given):
            self._fail("dims", f"are {given}; give different whole numbers above 0, such as [64, 128, 256]")
        last = objectives[-1]
        super().__init__(
            num_left=last.num_left,
            num_right=last.num_right,
            temperature=float(last.temperature.detach()),
            views=last.views,
            seed=last.seed,
            state_device="cpu" if last.state_on_cpu else "auto",
        )
        order = sorted(range(len(dims)), key=lambda number: dims[number])
        self.dims = [dims[number] for number in order]
        self.objectives = nn.ModuleList(objectives[number] for number in order)
        self.needs_encode, self.num_neighbors = last.needs_encode, last.num_neighbors
        self.teacher = last.teacher
        self.needs_num_left, self.corpus_of_pairs = last.needs_num_left, last.corpus_of_pairs

    def __iter__(self) -> Iterator[Objective]:
        """The objectives, of the smallest length first."""
        for objective in self.objectives:
            assert isinstance(objective, Objective)
            yield objective

    @property
    def widest(self) -> Objective:
        """The objective of the greatest length."""
        return list(self)[-1]

    @property
    def needs_uniform_batches(self) -> str | None:
        return self.widest.needs_uniform_batches

    @property
    def reports_loss(self) -> bool:
        return self.widest.reports_loss

    @property
    def temperature(self) -> Tensor:
        """Scalar τ of the greatest length."""
        return self.widest.temperature

    def diagnostics(self) -> dict[str, Tensor]:
        """Those of the greatest length."""
        return self.widest.diagnostics()

    def set_progress(self, fraction: float) -> None:
        for objective in self:
            objective.set_progress(fraction)

    def set_counts(self, left_counts: Tensor, right_counts: Tensor) -> None:
        for objective in self:
            objective.set_counts(left_counts, right_counts)

    def set_neighbors(self, side: Side, ids: Tensor) -> None:
        for objective in self:
            objective.set_neighbors(side, ids)

    def forward(
        self,
        left: Tensor,
        right: Tensor,
        left_id: Tensor,
        right_id: Tensor | None = None,
        encode: Encode | None = None,
        *,
        left_positives: Tensor | None = None,
        right_positives: Tensor | None = None,
        negatives: Tensor | None = None,
        negative_id: Tensor | None = None,
        **judged: Any,
    ) -> ObjectiveOutput:
        """The mean of the objectives; arguments as of `Objective.forward`."""
        if left.shape[-1] < self.dims[-1]:
            self._fail("dims", f"are {self.dims}, but the embeddings have {left.shape[-1]}; leave out what is beyond")
        asked = None if encode is None else Remembered(encode)
        outputs: dict[int, ObjectiveOutput] = {}
        for dim, objective in zip(self.dims, self, strict=True):

            def ask(side: Side, ids: Tensor, dim: int = dim) -> Tensor:
                assert asked is not None
                return prefix(asked(side, ids), dim)

            outputs[dim] = objective(
                prefix(left, dim),
                prefix(right, dim),
                left_id,
                right_id,
                None if asked is None else ask,
                left_positives=left_positives,
                right_positives=right_positives,
                negatives=None if negatives is None else prefix(negatives, dim),
                negative_id=negative_id,
                **judged,
            )
        loss = torch.stack([output.loss for output in outputs.values()]).mean()
        told = [output.of_anchors.detach() for output in outputs.values() if output.of_anchors is not None]
        of_anchors = torch.stack(told).mean(dim=0) if len(told) == len(outputs) else None
        return ObjectiveOutput(loss, MetricsByDim({dim: output.metrics for dim, output in outputs.items()}), of_anchors)


def prefix(vectors: Tensor, dim: int) -> Tensor:
    """The first d components of unit vectors (n, D), scaled to length one again; zero stays zero."""
    if dim == vectors.shape[1]:
        return vectors
    # In half precision the scaled prefix would be rounded a second time.
    precision = torch.promote_types(vectors.dtype, torch.float32)
    return nn.functional.normalize(vectors[:, :dim].to(precision), dim=1)


class Remembered:
    """`encode(side, ids)` of one step, where what several ask for is encoded once.

    Args:
        encode: what is asked for the rest; it is called each time, be it for nothing, as the other ranks do.
    """

    def __init__(self, encode: Encode) -> None:
        self.encode = encode
        # Per side, and with or without gradient: where an id's row is, and the rows.
        self.known: dict[tuple[Side, bool], tuple[dict[int, int], list[Tensor]]] = {}

    def __call__(self, side: Side, ids: Tensor) -> Tensor:
        places, parts = self.known.setdefault((side, torch.is_grad_enabled()), ({}, []))
        listed = ids.tolist()
        new = [item for item in dict.fromkeys(listed) if item not in places]
        parts.append(self.encode(side, ids.new_tensor(new)))
        places |= {item: number for number, item in enumerate(new, start=len(places))}
        rows = torch.tensor([places[item] for item in listed], dtype=torch.int64)
        return torch.cat(parts)[upload(rows, parts[-1].device)]


class MetricsByDim(Mapping[str, Tensor]):
    """The metrics of the greatest length under their names, those of the others with `@d` behind them."""

    def __init__(self, by_dim: dict[int, Mapping[str, Tensor]]) -> None:
        self.by_dim = by_dim
        widest = max(by_dim)
        self.found = {
            name if dim == widest else f"{name}@{dim}": (dim, name)
            for dim in sorted(by_dim, reverse=True)
            for name in by_dim[dim]
        }

    def __getitem__(self, name: str) -> Tensor:
        dim, inner = self.found[name]
        return self.by_dim[dim][inner]

    @property
    def of_anchors(self) -> Tensor | None:
        """(A,) the `batch_estimate` of each anchor at the greatest length."""
        return getattr(self.by_dim[max(self.by_dim)], "of_anchors", None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)
