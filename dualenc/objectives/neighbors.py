"""Proposals for chains: uniform over the corpus, or some of them from lists of near neighbours."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.errors import DualencError
from dualenc.objectives.random import SharedRandom


class Neighbors(nn.Module):
    """For each of m anchors a list of k ids near it; empty at first. Part of the state, whatever its shape."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.zeros(0, 0, dtype=torch.long))

    def set(self, ids: Tensor, num_anchors: int, num_items: int) -> None:
        """Replace the lists by ids (m, k) in [0, num_items), padded with -1.

        Raises:
            DualencError: another shape, no integers, or ids out of range.
        """
        if ids.dim() != 2 or len(ids) != num_anchors or ids.is_floating_point():
            raise DualencError(f"neighbours have shape {tuple(ids.shape)}; they must be integers ({num_anchors}, k)")
        if ids.numel() and (int(ids.min()) < -1 or int(ids.max()) >= num_items):
            raise DualencError(f"neighbours lie in [{int(ids.min())}, {int(ids.max())}]; ids end at {num_items}")
        self.ids = ids.to(self.ids.device, torch.long)

    def near(self, anchors: Tensor) -> Tensor:
        """(L,) the ids near any of the anchors (A,), sorted, each as often as it is listed."""
        listed = self.ids[anchors].flatten().sort().values
        return listed[listed >= 0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "ids")
        if saved is not None:
            self.ids = self.ids.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass
class Mixture:
    """Ids in [0, N): uniform, or with some probability from a list.

    Attributes:
        corpus_size: N.
        like: device and precision of the densities.
        near: (L,) sorted ids, each as likely as it is often listed.
        share: probability that a draw comes from the list.
    """

    corpus_size: int
    like: Tensor
    near: Tensor | None = None
    share: float = 0.0

    @property
    def is_uniform(self) -> bool:
        """Whether all ids are equally likely."""
        return self.near is None

    def with_list(self, near: Tensor, share: float) -> Mixture:
        """The same with a share from a list; an empty one changes nothing."""
        return replace(self, near=near, share=share) if len(near) else self

    def draw(self, count: int, random: SharedRandom) -> Tensor:
        """(count,) independent draws."""
        device = self.like.device
        ids = random.integers(self.corpus_size, count, device=device)
        if self.near is None:
            return ids
        from_list = random.uniform(count, like=self.like) < self.share
        return torch.where(from_list, self.near[random.integers(len(self.near), count, device=device)], ids)

    def log_density(self, ids: Tensor) -> Tensor:
        """(n,) log of the probability of each id, over that of a uniform draw."""
        if self.near is None:
            return self.like.new_zeros(len(ids))
        listed = torch.searchsorted(self.near, ids, right=True) - torch.searchsorted(self.near, ids)
        return torch.log(1 - self.share + self.share * self.corpus_size / len(self.near) * listed.to(self.like))
