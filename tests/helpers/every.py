"""Every objective in small, and a training run to put it through."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dualenc.objectives
from dualenc import distributed
from dualenc.objectives import FrozenCorpus, Matryoshka, Objective

NUM_LEFT, NUM_RIGHT, STEPS = 20, 70, 4
# Uneven for 2 and 3 ranks; in the third batch a third rank has nothing.
BATCH_SIZES = (8, 5, 2, 7)

CLASSES = [
    value
    for value in (getattr(dualenc.objectives, name) for name in sorted(dualenc.objectives.__all__))
    if isinstance(value, type)
    and issubclass(value, Objective)
    and value not in (Objective, Matryoshka, FrozenCorpus)
]


def make(kind: type[Objective], views: bool = False) -> Objective:
    """An objective for the 24 pairs of `fakes.tiny_pairs`."""
    return kind(num_left=24, num_right=24, temperature=0.2, seed=1, views=views).double()


VARIANTS: dict[str, list[dict[str, Any]]] = {
    "EMC2": [{}, {"burn_in": 0.2}, {"proposals": 7}],
    "GlobalCache": [{}, {"pool": 7, "extra_encodes": 2.0}],
    "HCL": [{"hardness": 0.5}],
    "ISIR": [{}, {"proposals": 7}],
    # With views the first batch is larger than the queue.
    "MomentumQueue": [{"queue_size": 12}],
    "NegativeCache": [{"refresh": 0.1}, {"refresh": 0.0}],
    "SACLR": [{}, {"form": "matrix"}, {"negatives": 1}],
    "SogCLR": [{}, {"positive_in_softmax": True}],
}


@dataclass(frozen=True)
class Setting:
    """A class, its arguments, the kind of training, and what is wrapped around the objective."""

    objective: type[Objective]
    views: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    wrapper: str = ""

    @property
    def name(self) -> str:
        given = "-".join(f"{k}={v}" for k, v in self.arguments.items())
        kind = "views" if self.views else "pairs"
        return "-".join(filter(None, [self.wrapper, self.objective.__name__, kind, given]))

    def build(self, **sizes: int) -> Objective:
        common: dict[str, Any] = {
            "num_left": NUM_LEFT,
            "num_right": NUM_RIGHT,
            "temperature": 0.2,
            **sizes,
        }
        common["learnable_temperature"] = self.objective.__name__ != "ISogCLR"
        criterion = self.objective(views=self.views, **common, **self.arguments)
        if self.wrapper == "Matryoshka":
            criterion = Matryoshka(criterion, [2, 5])
        return criterion.double()


def _named(name: str) -> type[Objective]:
    return next(kind for kind in CLASSES if kind.__name__ == name)


SETTINGS = [
    Setting(kind, views, arguments)
    for kind in CLASSES
    for views in (False, True)
    for arguments in VARIANTS.get(kind.__name__, [{}])
]
FIRST = [s for s in SETTINGS if s.arguments == VARIANTS.get(s.objective.__name__, [{}])[0]]
WRAPPED = [
    *(
        Setting(_named(name), False, wrapper="Matryoshka")
        for name in ("SogCLR", "ISIR", "GlobalCache")
    ),
    Setting(_named("MomentumQueue"), False, {"queue_size": 12}, wrapper="Matryoshka"),
]
# The further variants of an objective run at night.
EVERY = [
    *FIRST,
    *WRAPPED,
    *(pytest.param(s, marks=pytest.mark.nightly) for s in SETTINGS if s not in FIRST),
]
# One of each mechanism: moving averages, chains, memories.
THREE = [
    s for s in FIRST if s.objective.__name__ in ("SogCLR", "ISIR", "NegativeCache") and not s.views
]


class Towers(nn.Module):
    """Two linear towers over fixed features; with views one tower and two feature tables."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        num_right = NUM_LEFT if views else NUM_RIGHT
        self.left_features = normal(NUM_LEFT, 6)
        self.right_features = normal(num_right, 6)
        self.left = nn.Parameter(normal(6, 5))
        self.right = self.left if views else nn.Parameter(normal(6, 5))

    def encode(self, side: str, ids: Tensor) -> Tensor:
        features, weight = (
            (self.left_features, self.left) if side == "left" else (self.right_features, self.right)
        )
        return nn.functional.normalize(features[ids] @ weight, dim=1)


def batch(step: int, views: bool, own: slice | None = None) -> dict[str, Tensor]:
    """Ids of a part of a global batch, with weights in odd steps and mined negatives in even ones
    (pairs only).

    Positives are listed for the first two pairs and, of the right side, for the last; the first
    half of the pairs have a mined negative each. So a rank may have none of one, and then passes
    nothing.
    """
    draw, size = torch.Generator().manual_seed(step), BATCH_SIZES[step]
    left_id = torch.randperm(NUM_LEFT, generator=draw)[:size]
    right_id = left_id
    if not views:
        left_id, right_id = (
            torch.randint(0, n, (size,), generator=draw) for n in (NUM_LEFT, NUM_RIGHT)
        )
    mined = torch.randint(0, NUM_RIGHT, (size,), generator=draw)
    weights = torch.rand(size, generator=draw, dtype=torch.float64)

    rows, num_right = torch.arange(size)[own or slice(None)], NUM_LEFT if views else NUM_RIGHT
    found = {"left_id": left_id[rows], "right_id": right_id[rows]}
    if bool((rows < 2).any()):
        listed = torch.where(rows < 2, (left_id[rows] * 3 + 1) % num_right, -1)
        found["left_positives"] = torch.stack([right_id[rows], listed], dim=1)
    if size - 1 in rows.tolist():
        found["right_positives"] = torch.where(
            rows == size - 1, (right_id[rows] + 1) % NUM_LEFT, -1
        )[:, None]
    if step % 2:
        found["weights"] = weights[rows]
    elif not views and bool((rows < size // 2).any()):
        found["negative_id"] = mined[rows[rows < size // 2]]
    return found


def momentum_keys(criterion: Objective, left: Tensor, right: Tensor) -> dict[str, Tensor]:
    """What stands for a momentum encoder's embeddings of a batch (b, D), for objectives that take
    them."""
    if criterion.momentum is None:
        return {}
    return {
        "keys_left": left.detach().roll(1, dims=1),
        "keys_right": right.detach().roll(1, dims=1),
    }


@dataclass
class Run:
    """One process's part of a training run."""

    setting: Setting
    criterion: Objective = field(init=False)
    towers: Towers = field(init=False)

    def __post_init__(self) -> None:
        self.criterion, self.towers = self.setting.build(), Towers(self.setting.views)

    def given(self, step: int) -> dict[str, Any]:
        """Arguments of `Objective.forward` for this rank's part of a batch."""
        own = batch(step, self.setting.views, distributed.rank_slice(BATCH_SIZES[step]))
        if not self.criterion.takes_mined:
            own.pop("negative_id", None)
        given: dict[str, Any] = {**own, "encode": self.towers.encode}
        for name, side in (("left", "left"), ("right", "right")):
            given[name] = self.towers.encode(side, own[f"{name}_id"])
        if "negative_id" in own:
            given["negatives"] = self.towers.encode("right", own["negative_id"])
        given |= momentum_keys(self.criterion, given["left"], given["right"])
        return given

    def step(self, step: int) -> Tensor:
        """Train on this rank's part of a batch; the averaged gradient of all parameters."""
        loss = self.criterion(**self.given(step)).loss
        parameters = [*self.towers.parameters(), *self.criterion.parameters()]
        loss.backward()
        distributed.average_gradients(parameters)
        optimizer = torch.optim.SGD(parameters, lr=0.02)
        optimizer.step()
        gradient = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
        optimizer.zero_grad()
        return gradient

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the objective's and the towers' state (collective)."""
        whole = {"criterion": self.criterion.state_dict(), "towers": self.towers.state_dict()}
        return {part: {k: v.clone() for k, v in values.items()} for part, values in whole.items()}

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.criterion.load_state_dict(state["criterion"])
        self.towers.load_state_dict(state["towers"])


def assert_same_state(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0
) -> None:
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        message = lambda text, key=key: f"{key}: {text}"  # noqa: E731
        torch.testing.assert_close(
            found[key], values, rtol=tolerance, atol=tolerance, equal_nan=True, msg=message
        )
