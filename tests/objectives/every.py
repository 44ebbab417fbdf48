"""Every objective in small, and a training run to put it through: what the tests of ranks and of state share."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import dualenc.objectives
from dualenc import distributed
from dualenc.objectives import Objective


class Dispatched(TorchDispatchMode):
    """Watches every operation, forward and backward, while it is on.

    Attributes:
        count: how many operations: on an accelerator, each is a kernel launch or a view.
        largest: entries of the largest tensor that one of them made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.largest = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            # Views that repeat entries take no memory.
            if isinstance(leaf, Tensor) and 0 not in leaf.stride():
                self.largest = max(self.largest, leaf.numel())
        return result


NUM_LEFT, NUM_RIGHT, STEPS = 20, 70, 5
# Uneven for 2 and 3 ranks; in the last batch a third rank has nothing.
BATCH_SIZES = (8, 7, 5, 8, 2)

CLASSES = [
    value
    for value in (getattr(dualenc.objectives, name) for name in sorted(dualenc.objectives.__all__))
    if isinstance(value, type) and issubclass(value, Objective) and value is not Objective
]

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "EMC2": [
        {},
        {"score": "fresh", "burn_in": 0.2},
        {"proposals": 7},
        {"proposals": 7, "neighbor_share": 0.5},
    ],
    "GlobalCache": [{}, {"pool": 64, "extra_encodes": 2.0, "control": 1.0}],
    "HCL": [{"hardness": 0.5}, {"annealing_steps": 3}],
    "ISIR": [{}, {"proposals": 7}, {"proposals": 7, "dims": [2, 5]}, {"shared_chain": True}],
    "NegativeCache": [{"refresh": 0.1}, {"refresh": 0.0}],
    "SACLR": [{}, {"form": "matrix"}, {"negatives": 1}, {"variant": "authors"}],
    "SogCLR": [{}, {"dims": [2, 5]}, {"gamma_schedule": "cosine"}],
}


@dataclass(frozen=True)
class Setting:
    """A class, its arguments, and the kind of training."""

    objective: type[Objective]
    views: bool
    arguments: dict[str, Any] = field(default_factory=dict)
    guided: bool = False

    @property
    def name(self) -> str:
        given = "-".join(f"{k}={v}" for k, v in self.arguments.items())
        kind, guided = "views" if self.views else "pairs", "guided" if self.guided else ""
        return "-".join(filter(None, [self.objective.__name__, kind, given, guided]))

    def build(self) -> Objective:
        common = {"num_left": NUM_LEFT, "num_right": NUM_RIGHT, "temperature": 0.2, "learnable_temperature": True}
        if self.objective.__name__ == "ISogCLR":
            common["learnable_temperature"] = False
        criterion = self.objective(views=self.views, **common, **self.arguments).double()
        if "neighbor_share" in self.arguments:
            criterion.set_neighbors("left", torch.arange(3 * NUM_LEFT).view(NUM_LEFT, 3) % NUM_LEFT)
        return criterion


SETTINGS = [
    Setting(objective, views, arguments)
    for objective in CLASSES
    for views in (False, True)
    for arguments in VARIANTS.get(objective.__name__, [{}])
]


FIRST = [s for s in SETTINGS if s.arguments == VARIANTS.get(s.objective.__name__, [{}])[0]]
GUIDED = [replace(setting, guided=True) for setting in FIRST]

POOLED = [setting for setting in SETTINGS if "pool" in setting.arguments]

# Further variants of a class run on three ranks only, to save time, and with a guide or a pool on two.
SETTINGS_AT = {2: FIRST + GUIDED + POOLED, 3: SETTINGS}


class Towers(nn.Module):
    """Two linear towers over fixed features; with views one tower and two feature tables."""

    def __init__(self, views: bool) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, dtype=torch.float64)

        self.left_features = normal(NUM_LEFT, 6)
        self.right_features = normal(NUM_LEFT if views else NUM_RIGHT, 6)
        self.left = nn.Parameter(normal(6, 5))
        self.right = self.left if views else nn.Parameter(normal(6, 5))
        # What a guide says of the items: three numbers of each.
        self.guide_left, self.guide_right = normal(NUM_LEFT, 3), normal(NUM_LEFT if views else NUM_RIGHT, 3)

    def encode(self, side: str, ids: Tensor) -> Tensor:
        features, weight = (self.left_features, self.left) if side == "left" else (self.right_features, self.right)
        return nn.functional.normalize(features[ids] @ weight, dim=1)

    def guide(self, side: str, ids: Tensor) -> Tensor:
        return nn.functional.normalize((self.guide_left if side == "left" else self.guide_right)[ids], dim=1)


def batch(step: int, views: bool) -> dict[str, Tensor]:
    """Ids of a global batch, further positives, and in every other step ids of mined negatives (pairs only)."""
    draw = torch.Generator().manual_seed(step)
    size = BATCH_SIZES[step]
    if views:
        ids = torch.randperm(NUM_LEFT, generator=draw)[:size]
        return {"left_id": ids, "right_id": ids}
    left_id = torch.randint(0, NUM_LEFT, (size,), generator=draw)
    right_id = torch.randint(0, NUM_RIGHT, (size,), generator=draw)
    mined = torch.randint(0, NUM_RIGHT, (size,), generator=draw)
    return {
        "left_id": left_id,
        "right_id": right_id,
        "left_positives": torch.stack([right_id, (left_id * 3 + 1) % NUM_RIGHT], dim=1),
        "right_positives": left_id[:, None].clone(),
        **({"negative_id": mined} if step % 2 == 0 else {}),
    }


@dataclass
class Run:
    """One process's part of a training run."""

    setting: Setting
    criterion: Objective = field(init=False)
    towers: Towers = field(init=False)

    def __post_init__(self) -> None:
        self.criterion, self.towers = self.setting.build(), Towers(self.setting.views)

    def step(self, step: int) -> Tensor:
        """Train on this rank's slice of a batch; the averaged gradient of all parameters."""
        ids = batch(step, self.setting.views)
        own = {name: values[distributed.rank_slice(len(values))] for name, values in ids.items()}
        embeddings = {side: self.towers.encode(side, own[f"{side}_id"]) for side in ("left", "right")}
        if "negative_id" in own:
            embeddings["negatives"] = self.towers.encode("right", own["negative_id"])
        self.criterion.set_progress(step / STEPS)
        guide = self.towers.guide if self.setting.guided else None
        loss = self.criterion(**embeddings, **own, encode=self.towers.encode, guide=guide).loss
        parameters = [*self.towers.parameters(), *self.criterion.parameters()]
        loss.backward()
        distributed.average_gradients(parameters)
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradient = torch.cat([g.flatten() for g in gradients]).clone()
        with torch.no_grad():
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter -= 0.02 * parameter.grad
                    parameter.grad = None
        return gradient

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Copies of the objective's and the towers' state (collective)."""
        whole = {"criterion": self.criterion.state_dict(), "towers": self.towers.state_dict()}
        return {part: {k: v.clone() for k, v in values.items()} for part, values in whole.items()}

    def load(self, state: dict[str, dict[str, Tensor]]) -> None:
        self.criterion.load_state_dict(state["criterion"])
        self.towers.load_state_dict(state["towers"])
