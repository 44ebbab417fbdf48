"""EMC²: every setting equals a loop over single chains; and what published implementations get wrong."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dualenc.objectives import DCL, EMC2
from tests.objectives.slow import Case, make_case
from tests.objectives.slow_chains import NUM_ITEMS, Corpus, SlowEMC2

SETTINGS = [
    {"kernel": kernel, "score": score, "proposals": proposals}
    for kernel, score, proposals in product(["mh", "isir"], ["stored", "fresh"], ["batch", 9])
    if not (kernel == "isir" and score == "stored")
]


def gradients(loss: torch.Tensor, case: Case, corpus: Corpus) -> torch.Tensor:
    inputs = [case.left, case.right, corpus.left, corpus.right]
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return torch.cat([torch.zeros_like(i) if g is None else g for g, i in zip(found, inputs)])


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda s: "-".join(map(str, s.values())))
@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 7),
    views=st.booleans(),
    burn_in=st.sampled_from([0.0, 0.5, 0.9]),
    tau=st.sampled_from([0.07, 0.5]),
)
def test_equals_the_loop(setting: dict, seed: int, size: int, views: bool, burn_in: float, tau: float) -> None:
    shared = {"temperature": tau, "burn_in": burn_in, **setting}
    criterion = EMC2(num_left=NUM_ITEMS, views=views, seed=seed, **shared).double()
    slow = SlowEMC2(**shared, random=copy.deepcopy(criterion.random))
    for step in range(5):
        case, corpus = make_case(seed * 5 + step, size, views), Corpus.make(seed)
        out = criterion(**case.arguments(), encode=corpus.encode)
        asked = list(corpus.asked)
        assert len(set(asked)) == len(asked)
        expected = slow.surrogate(case, corpus)
        torch.testing.assert_close(gradients(out.loss, case, corpus), gradients(expected, case, corpus))
    for (side, anchor), chain in slow.chains.items():
        state = int((criterion.left_chains if side == "left" else criterion.right_chains).state[anchor])
        assert (state // 2 if views else state) == chain.item.id
