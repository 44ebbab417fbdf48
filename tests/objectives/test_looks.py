"""Works that ask the device go on in step, and one look answers all of them."""

from __future__ import annotations

import pytest
import torch
from dualenc.objectives.item_state import ItemState
from dualenc.objectives.looks import Asking, Looks
from torch import Tensor

from dualenc.errors import DualencError
from tests.pretended_device import DEVICE, pretended_device


def asking(questions: list[Tensor]) -> Asking[list[list[int]]]:
    answers = []
    for question in questions:
        answers.append((yield question).tolist())
    return answers


def test_each_work_gets_its_own_answers_in_one_look_per_round() -> None:
    with pretended_device() as device:
        one = [torch.tensor([2**60, -1]).to(DEVICE), torch.tensor([3]).to(DEVICE)]
        other = [torch.tensor([7, 8, 9]).to(DEVICE)]
        before = device.waits
        found = Looks().together([asking(one), asking(other), asking([]), [[5]]])
        assert device.waits - before == 2
    assert found == [[[2**60, -1], [3]], [[7, 8, 9]], [], [[5]]]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_told_at_the_next_look(value: float) -> None:
    looks, embeddings = Looks(), torch.zeros(3, 4)
    looks.note(embeddings)
    assert looks.together([asking([torch.tensor([1])])]) == [[[1]]]
    embeddings[1, 2] = value
    looks.note(embeddings)
    with pytest.raises(DualencError, match="encode gave NaN or infinite values"):
        looks.together([1])


def test_what_a_step_writes_to_cpu_memory_is_there_when_asked_for() -> None:
    table = ItemState(on_cpu=True)
    table.register_buffer("values", torch.zeros(6))
    with pretended_device() as device:
        rows = torch.tensor([4, 1, 0]).to(DEVICE)
        written, some = torch.tensor([1.0, 2.0, 3.0]).to(DEVICE), torch.tensor([True, True, False]).to(DEVICE)
        before = device.waits
        table.put(rows, torch.tensor([4, 1, 0]), some, values=written)
        taken = table.take("values", rows, torch.tensor([4, 1, 0]))
        assert device.waits == before
        assert taken.tolist() == [1.0, 2.0, 0.0]
    assert table.state_dict()["values"].tolist() == [0.0, 2.0, 0.0, 0.0, 1.0, 0.0]
