"""Proposals for chains: uniform over the corpus, or some of them from lists of near neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dualenc.objectives.random import SharedRandom


class Neighbors(nn.Module):
    """For each of m anchors a list of k ids near it; empty at first. Part of the state, whatever its shape."""

    ids: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("ids", torch.zeros(0, 0, dtype=torch.long))

    def near(self, anchors: Tensor) -> Tensor:
        """(L,) the ids near any of the anchors (A,), sorted, each as often as it is listed."""
        if not len(self.ids):
            return self.ids.flatten()
        listed = self.ids[anchors].flatten().sort().values
        return listed[listed >= 0]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        saved = state_dict.get(prefix + "ids")
        if saved is not None:
            self.ids = self.ids.new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *rest)


@dataclass
class Mixture:
    """Ids in [0, N), drawn from a list with some probability and else uniformly.

    Attributes:
        corpus_size: N.
        near: (L,) sorted ids, each as likely as it is often listed.
        share: probability that a draw comes from the list.
    """

    corpus_size: int
    near: Tensor
    share: float

    def __post_init__(self) -> None:
        self.share = self.share if len(self.near) else 0.0

    def draw(self, count: int, random: SharedRandom, device: torch.device) -> Tensor:
        """(count,) independent draws."""
        ids = random.integers(self.corpus_size, count, device=device)
        if not self.share:
            return ids
        from_list = random.uniform(count, like=torch.zeros((), device=device)) < self.share
        return torch.where(from_list, self.near[random.integers(len(self.near), count, device=device)], ids)

    def log_density(self, ids: Tensor) -> Tensor:
        """(n,) log of the probability of each id, over that of a uniform draw."""
        if not self.share:
            return torch.zeros(len(ids), device=ids.device)
        listed = torch.searchsorted(self.near, ids, right=True) - torch.searchsorted(self.near, ids)
        return torch.log(1 - self.share + self.share * self.corpus_size / len(self.near) * listed)
