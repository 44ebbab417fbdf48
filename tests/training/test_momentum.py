"""The momentum encoder of a training run: a moving average of the towers, which embeds every batch as they do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dualenc.errors import DualencError
from dualenc.objectives import InfoNCE, MomentumQueue
from tests.training.fakes import TinyEncoder, weights
from tests.training.runs import train

MU = 0.7


class Recording(MomentumQueue):
    """Keeps the keys of every batch."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.keys: list[tuple[Tensor, Tensor]] = []

    def forward(self, *batch: Any, **given: Any) -> Any:
        self.keys.append((given["keys_left"].clone(), given["keys_right"].clone()))
        return super().forward(*batch, **given)


@pytest.mark.parametrize(("batchnorm", "accumulation"), [(False, 1), (True, 1), (False, 2)])
def test_keys_are_those_of_a_moving_average_of_the_same_inputs(
    tmp_path: Path, batchnorm: bool, accumulation: int
) -> None:
    model = TinyEncoder(batchnorm=batchnorm)
    average = copy.deepcopy(model).train()
    passes: list[tuple[Tensor, dict[str, Tensor]]] = []

    def record(tower: Any, inputs: Any, output: Tensor) -> None:
        if tower.training:
            passes.append((inputs[0]["rows"].clone(), {k: v.clone() for k, v in model.left.state_dict().items()}))

    model.left.register_forward_hook(record)
    criterion = Recording(momentum=MU, queue_size=10, temperature=0.2).double()
    result = train(tmp_path, model=model, objective=criterion, gradient_accumulation=accumulation, save_every=None)
    key_passes, live_passes = passes[0::2], passes[1::2]
    assert len(criterion.keys) == len(key_passes) == len(live_passes) == result.steps * accumulation
    for number, (keys, of_keys, live) in enumerate(zip(criterion.keys, key_passes, live_passes, strict=True)):
        assert torch.equal(of_keys[0], live[0])
        if number and number % accumulation == 0:
            # The weights after the last step are those of this batch's own pass.
            weights_now = dict(average.left.named_parameters())
            with torch.no_grad():
                for name, weight in weights_now.items():
                    weight.mul_(MU).add_(live[1][name], alpha=1 - MU)
        with torch.no_grad():
            expected = average.left({"rows": of_keys[0]})
        torch.testing.assert_close(keys[0], expected)
    assert not torch.allclose(criterion.keys[-1][0], model.left({"rows": live_passes[-1][0]}))


def test_running_statistics_count_each_batch_once(tmp_path: Path) -> None:
    """At a rate of almost 0 both objectives see the same batches with the same weights."""
    for kind in (InfoNCE, MomentumQueue):
        settings = {"learning_rate": 1e-14, "weight_decay": 0.0, "save_every": None, "epochs": 1}
        objective = kind(temperature=0.2).double()
        train(tmp_path / kind.__name__, model=TinyEncoder(batchnorm=True), objective=objective, **settings)
    with_keys, without = (weights(tmp_path / kind.__name__) for kind in (MomentumQueue, InfoNCE))
    statistics = [name for name in without if "running" in name or "num_batches" in name]
    assert len(statistics) == 6
    for name in statistics:
        torch.testing.assert_close(with_keys[name], without[name])


def test_a_run_without_a_momentum_encoder_is_not_resumed_with_one(tmp_path: Path) -> None:
    train(tmp_path, objective=InfoNCE(temperature=0.2).double(), epochs=1)
    with pytest.raises(DualencError, match=r"objective was 'InfoNCE .* is now 'MomentumQueue"):
        train(tmp_path, objective=MomentumQueue(temperature=0.2).double(), epochs=1, resume=True)
