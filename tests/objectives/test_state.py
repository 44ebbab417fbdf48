"""The state dict is the whole truth: a run that stops and resumes is the run that never stopped, bit by bit."""

from __future__ import annotations

import io

import pytest
import torch
from dualenc.objectives.state import SharedRandom
from scipy.stats import kstest

from dualenc.errors import DualencError
from dualenc.objectives import EMC2, Objective
from tests.objectives.every import SETTINGS, STEPS, Run, Setting, batch


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("stop", [1, 3])
def test_resuming_is_bit_exact(setting: Setting, stop: int) -> None:
    whole = Run(setting)
    expected = [whole.step(step) for step in range(STEPS)]
    first = Run(setting)
    for step in range(stop):
        first.step(step)
    file = io.BytesIO()
    torch.save(first.state(), file)
    second = Run(setting)
    second.load(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for step in range(stop, STEPS):
        assert torch.equal(second.step(step), expected[step])
    for key, values in whole.state()["criterion"].items():
        assert torch.equal(torch.nan_to_num(second.state()["criterion"][key]), torch.nan_to_num(values)), key


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_an_empty_batch_is_harmless(setting: Setting) -> None:
    """A rank may have nothing in the last batch of an epoch; so may all."""
    training = Run(setting)
    nothing = torch.zeros(0, dtype=torch.long)
    left, right = (training.towers.encode(side, nothing) for side in ("left", "right"))
    loss = training.criterion(left, right, nothing, encode=training.towers.encode).loss
    loss.backward()
    assert float(loss.detach()) == 0
    training.step(0)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
def test_state_holds_tensors_only(setting: Setting) -> None:
    """So that any format for tensors can hold it."""
    training = Run(setting)
    training.step(0)
    state = training.criterion.state_dict()
    assert all(isinstance(values, torch.Tensor) for values in state.values())
    assert "log_temperature" in state


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.objective.needs_num_left], ids=lambda s: s.name)
def test_memory_is_in_the_state(setting: Setting) -> None:
    """What a step changes in the objective, besides learned parameters, shows in the state dict."""
    training = Run(setting)
    learned = dict(training.criterion.named_parameters())
    before = training.state()["criterion"]
    training.step(0)
    after = training.state()["criterion"]
    changed = {
        key
        for key in after
        if key not in learned and not torch.equal(torch.nan_to_num(before[key]), torch.nan_to_num(after[key]))
    }
    assert changed or setting.objective.__name__ == "ExactGlobal"


def state_of(criterion: Objective) -> dict[str, torch.Tensor]:
    return {key: torch.nan_to_num(values.clone()) for key, values in criterion.state_dict().items()}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: s.name)
@pytest.mark.parametrize("how", ["eval mode", "no gradient"])
@pytest.mark.parametrize("steps", [0, 2])
def test_evaluation_leaves_the_state_alone(setting: Setting, how: str, steps: int) -> None:
    """And so the training after it, on whatever was evaluated; it gives the same value twice."""
    training, undisturbed = Run(setting), Run(setting)
    for step in range(steps):
        training.step(step)
        undisturbed.step(step)
    before = state_of(training.criterion)
    training.criterion.train(how != "eval mode")
    ids = batch(3, setting.views)
    embeddings = {side: training.towers.encode(side, ids[f"{side}_id"]) for side in ("left", "right")}
    if "negative_id" in ids:
        embeddings["negatives"] = training.towers.encode("right", ids["negative_id"])
    with torch.set_grad_enabled(how != "no gradient"):
        losses = [training.criterion(**embeddings, **ids, encode=training.towers.encode).loss for _ in range(2)]
    assert torch.isfinite(losses[0])
    assert losses[0] == losses[1]
    after = state_of(training.criterion)
    assert all(torch.equal(after[key], values) for key, values in before.items()), after.keys() == before.keys()
    training.criterion.train()
    assert torch.equal(training.step(steps), undisturbed.step(steps))


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.objective.needs_num_left], ids=lambda s: s.name)
def test_a_state_of_another_size_is_told_in_one_line(setting: Setting) -> None:
    training = Run(setting)
    training.step(0)
    sizes = {"num_left": 21, "num_right": 71, "views": setting.views}
    other = setting.objective(**sizes, **setting.arguments).double()
    state, mine = other.state_dict(), state_of(training.criterion)
    if state.keys() == {"log_temperature"} or all(state[k].shape == mine[k].shape for k in state):
        pytest.skip("its state has no size")
    with pytest.raises(DualencError) as caught:
        other.load_state_dict(training.criterion.state_dict())
    assert "\n" not in str(caught.value)
    assert ("20" in str(caught.value) and "21" in str(caught.value)) or "40" in str(caught.value)
    assert all(torch.equal(state_of(other)[key], torch.nan_to_num(values)) for key, values in state.items())


def test_a_state_of_swapped_sizes_is_told() -> None:
    saved = EMC2(num_left=20, num_right=70).state_dict()
    with pytest.raises(
        DualencError, match=r"chains.sides has shape \(20, 70, 0\) in the saved state, \(70, 20, 0\) here"
    ):
        EMC2(num_left=70, num_right=20).load_state_dict(saved)


def test_a_state_of_another_objective_is_told_in_one_line() -> None:
    table = {s.objective.__name__: s for s in SETTINGS if not s.views}
    with pytest.raises(DualencError, match=r"SogCLR: .*left_averages.log_u") as caught:
        table["SogCLR"].build().load_state_dict(table["InfoNCE"].build().state_dict())
    assert "\n" not in str(caught.value)


LIKE = torch.zeros(())


def test_draws_are_uniform_within_and_across_numbers() -> None:
    random = SharedRandom(0)
    assert kstest(random.uniform(5000, like=LIKE).numpy(), "uniform").pvalue > 0.001
    firsts = torch.stack([SharedRandom(seed).uniform(1, like=LIKE) for seed in range(1000)])
    assert kstest(firsts.flatten().numpy(), "uniform").pvalue > 0.001
    assert kstest(torch.cat([random.uniform(1, like=LIKE) for _ in range(1000)]).numpy(), "uniform").pvalue > 0.001


def test_draws_lie_between_zero_and_below_one() -> None:
    draws = SharedRandom(0).uniform(1_000_000, like=LIKE)
    assert draws.min() >= 0
    assert draws.max() <= 1 - 2**-24


def test_precisions_see_the_same_numbers() -> None:
    single, double = SharedRandom(3).uniform(9, like=LIKE), SharedRandom(3).uniform(9, like=LIKE.double())
    assert torch.equal(single.double(), double)


def test_state_continues_where_it_stopped() -> None:
    random = SharedRandom(7)
    random.uniform(5, like=LIKE)
    other = SharedRandom(0)
    other.load_state_dict(random.state_dict())
    device = torch.device("cpu")
    for _ in range(3):
        assert torch.equal(random.uniform(4, like=LIKE), other.uniform(4, like=LIKE))
        assert torch.equal(random.integers(100, 5, device=device), other.integers(100, 5, device=device))
        assert torch.equal(random.permutation(6, device), other.permutation(6, device))


def test_a_foreign_state_is_told() -> None:
    with pytest.raises(DualencError, match="seed and position"):
        SharedRandom(0).set_extra_state(torch.zeros(5056, dtype=torch.uint8))
