"""Every objective gives one loss for a batch object and for the arguments of `forward`."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from dualenc.objectives import Objective, PairBatch
from tests.helpers.every import CLASSES, FIRST, WRAPPED, Run, Setting

IDS = torch.arange(3)


@pytest.mark.parametrize("setting", [*FIRST, *WRAPPED], ids=lambda setting: setting.name)
def test_a_batch_gives_the_loss_of_its_fields(setting: Setting) -> None:
    losses = []
    for by_batch in (False, True):
        run = Run(setting)
        for step in range(2):
            given: dict[str, Any] = run.given(step)
            encode = given.pop("encode")
            if by_batch:
                output = run.criterion.compute_loss(PairBatch(**given), encode)
            else:
                output = run.criterion(**given, encode=encode)
        losses.append((output.loss, output.per_anchor))
    assert torch.equal(losses[0][0], losses[1][0])
    assert torch.equal(losses[0][1], losses[1][1])


def test_only_given_fields_are_listed_but_both_sides_always() -> None:
    batch = PairBatch(left_id=IDS, right_id=IDS, negative_id=IDS)
    assert list(batch.ids) == ["left_id", "right_id", "negative_id"]
    assert batch.embeddings == {"left": None, "right": None}
    assert batch.to(torch.device("meta")).negative_id.is_meta
    with pytest.raises(FrozenInstanceError):
        batch.weights = torch.ones(3)  # type: ignore[misc]


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_no_objective_has_a_forward_of_its_own(kind: type[Objective]) -> None:
    assert kind.forward is Objective.forward
