"""The loop knows no objective: chunks change none, two views train, and momentum encoder and
lengths work."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.objectives import (
    ISIR,
    GlobalCache,
    InfoNCE,
    MomentumQueue,
    NegativeCache,
    ObjectiveOutput,
    PairBatch,
    SogCLR,
)
from dualenc.objectives.outside_items import Encode
from dualenc.recipe.resolve import make_recipe
from tests.helpers.every import make
from tests.helpers.fakes import TinyEncoder, same, tiny_pairs, weights
from tests.helpers.runs import train


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value))


PLAIN = [InfoNCE, SogCLR, ISIR, GlobalCache, MomentumQueue]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLAIN, ids=name_of)
def test_gradient_caching_changes_nothing(tmp_path, kind):
    for name, chunk_size in (("plain", None), ("cached", 4)):
        train(
            tmp_path / name,
            model=TinyEncoder(),
            objective=make(kind),
            chunk_size=chunk_size,
            save_every=None,
        )
    plain, cached = weights(tmp_path / "plain"), weights(tmp_path / "cached")
    assert all(torch.allclose(plain[key], cached[key], rtol=1e-8, atol=1e-12) for key in plain)


@pytest.mark.parametrize("kind", [InfoNCE, ISIR, NegativeCache, MomentumQueue], ids=name_of)
def test_two_views(tmp_path, kind):
    """One tower, both sides augmentations of the same item."""
    pairs = tiny_pairs()
    pairs.views, pairs.right_items = True, pairs.left_items
    model = TinyEncoder(shared=True, batchnorm=True)
    assert (
        train(tmp_path, pairs=pairs, model=model, objective=make(kind, views=True), epochs=1).steps
        == 4
    )


class Recording(MomentumQueue):
    """Keeps the keys of every batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.keys: list[torch.Tensor] = []

    def compute_loss(self, batch: PairBatch, encode: Encode | None = None) -> ObjectiveOutput:
        self.keys.append(batch.keys_left.clone())
        return super().compute_loss(batch, encode)


@pytest.mark.parametrize(("batchnorm", "accumulation"), [(False, 1), (True, 1), (False, 2)])
def test_keys_are_those_of_a_moving_average_of_the_same_inputs(tmp_path, batchnorm, accumulation):
    momentum = 0.7
    model = TinyEncoder(batchnorm=batchnorm)
    average = copy.deepcopy(model).train()
    passes = []

    def record(tower, inputs, output):
        if tower.training:
            passes.append(
                (
                    inputs[0]["rows"].clone(),
                    {k: v.clone() for k, v in model.left.state_dict().items()},
                )
            )

    model.left.register_forward_hook(record)
    criterion = Recording(momentum=momentum, queue_size=10, temperature=0.2).double()
    result = train(
        tmp_path,
        model=model,
        objective=criterion,
        gradient_accumulation=accumulation,
        save_every=None,
    )
    key_passes, live_passes = passes[0::2], passes[1::2]
    assert len(criterion.keys) == len(key_passes) == len(live_passes) == result.steps * accumulation
    for number, (keys, of_keys, live) in enumerate(
        zip(criterion.keys, key_passes, live_passes, strict=True)
    ):
        assert torch.equal(of_keys[0], live[0])
        with torch.no_grad():
            if number and number % accumulation == 0:
                # The weights after the last step are those of this batch's own pass.
                for name, weight in average.left.named_parameters():
                    weight.mul_(momentum).add_(live[1][name], alpha=1 - momentum)
            torch.testing.assert_close(keys, average.left({"rows": of_keys[0]}))
    assert not torch.allclose(criterion.keys[-1], model.left({"rows": live_passes[-1][0]}))


def test_running_statistics_count_each_batch_once(tmp_path):
    """At a rate of almost 0 both objectives see the same batches with the same weights."""
    for kind in (InfoNCE, MomentumQueue):
        settings = {"learning_rate": 1e-14, "weight_decay": 0.0, "save_every": None, "epochs": 1}
        train(
            tmp_path / kind.__name__,
            model=TinyEncoder(batchnorm=True),
            objective=make(kind),
            **settings,
        )
    with_keys, without = (weights(tmp_path / kind.__name__) for kind in (MomentumQueue, InfoNCE))
    statistics = [name for name in without if "running" in name or "num_batches" in name]
    assert len(statistics) == 6
    for name in statistics:
        torch.testing.assert_close(with_keys[name], without[name])


@pytest.mark.slow
def test_pairs_of_weight_zero_teach_nothing(tmp_path):
    for name, pairs in (("zero", tiny_pairs(weights=np.zeros(24))), ("plain", tiny_pairs())):
        model = TinyEncoder()
        train(
            tmp_path / name,
            model=model,
            pairs=pairs,
            objective=InfoNCE().double(),
            weight_decay=0.0,
        )
        assert same(dict(TinyEncoder().state_dict()), dict(model.state_dict())) == (name == "zero")


def test_a_recipe_gives_the_sizes_to_the_wrapped_objective(tmp_path):
    files = {side: str(tmp_path / f"{side}.npy") for side in ("left", "right")}
    for file in files.values():
        np.save(file, np.eye(8, dtype=np.float32))
    objective = {"dims": [2, 4], "objective": {"class_path": "SogCLR"}}
    settings = {
        "model": {"class_path": "VectorEncoder", "init_args": {"tower": "linear"}},
        "data": {"class_path": "VectorPairs", "init_args": files},
        "objective": {"class_path": "Matryoshka", "init_args": objective},
        "trainer": {"output": str(tmp_path / "run")},
    }
    objective = make_recipe(settings).build()["objective"]
    assert [criterion.num_left for criterion in objective.objectives] == [8, 8]
