"""NegativeCache: the gradient of one drawn negative per anchor, and a memory that keeps itself
fresh."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dualenc.objectives import NegativeCache
from dualenc.objectives.memory import EmbeddingMemory, MemoryDraws
from tests.helpers.slow import (
    Case,
    Corpus,
    Item,
    gradients,
    is_hidden,
    item_anchors,
    make_case,
    vector_of,
)


def gradient_and_draws(
    criterion: NegativeCache, case: Case, corpus: Corpus
) -> tuple[Tensor, list[Item | None]]:
    """The gradient of a step, and for each anchor the item that was drawn."""
    drawn: list[Item | None] = []
    original = EmbeddingMemory.draw

    def watched(memory: EmbeddingMemory, *query: Tensor) -> MemoryDraws:
        draws = original(memory, *query)
        side = "right" if memory is criterion.memories[0] else "left"
        for item in draws.keys.tolist():
            drawn.append(None if item < 0 else Item.of_number(item, side, case.views))
        return draws

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddingMemory, "draw", watched)
        loss = criterion(**case.arguments(), encode=corpus.encode).loss
    return gradients(loss, case, corpus), drawn


@settings(max_examples=10)
@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 6),
    views=st.booleans(),
    refresh=st.sampled_from([0.0, 0.2, 1.0]),
)
def test_gradient_pulls_the_positive_and_pushes_the_drawn_negative(
    seed: int, size: int, views: bool, refresh: float
) -> None:
    criterion = NegativeCache(
        num_left=20, temperature=0.2, views=views, refresh=refresh, seed=seed
    ).double()
    for step in range(3):
        case, corpus = make_case(seed * 4 + step, size, views), Corpus.make(seed)
        found, drawn = gradient_and_draws(criterion, case, corpus)
        losses = []
        for side in ["views"] if views else ["left", "right"]:
            terms = []
            for anchor in item_anchors(case, side):
                item = drawn.pop(0)
                pushed = torch.zeros(())
                if item is not None:
                    assert not is_hidden(case, anchor, item)
                    pushed = anchor.vector @ vector_of(case, corpus, side, item)
                terms.append((pushed - anchor.positive) / 0.2)
            losses.append(torch.stack(terms).mean())
        torch.testing.assert_close(found, gradients(torch.stack(losses).mean(), case, corpus))


@pytest.mark.parametrize("views", [False, True])
def test_the_value_of_a_full_memory_is_the_loss_itself(views: bool) -> None:
    corpus = Corpus.make(0)
    ids = [3, 8, 11]
    out = NegativeCache(num_left=20, refresh=1.0, temperature=0.3, views=views).double()(
        **corpus.batch(ids)
    )
    exact = []
    both = torch.cat([corpus.left, corpus.right])
    for i in ids:
        for own, candidates in (
            (corpus.left, both if views else corpus.right),
            (corpus.right, both if views else corpus.left),
        ):
            others = (own[i] @ candidates.T / 0.3)[torch.arange(len(candidates)) % 20 != i]
            exact.append(torch.logsumexp(others, dim=0) - corpus.left[i] @ corpus.right[i] / 0.3)
    torch.testing.assert_close(out.loss, torch.stack(exact).mean())


def test_refresh_encodes_the_share_in_turn_and_without_gradient() -> None:
    corpus, with_gradient, refreshed = Corpus.make(0), [], []

    def encode(side: str, ids: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with_gradient.extend(ids.tolist())
        elif side == "right":
            refreshed.extend(ids.tolist())
        return corpus.encode(side, ids)

    criterion = NegativeCache(num_left=20, refresh=0.15).double()
    for _ in range(10):
        criterion(**corpus.batch([0, 1]) | {"encode": encode})
    assert sorted(refreshed) == sorted(i % 20 for i in range(30))
    assert len(with_gradient) <= 2 * 2 * 10


def test_batch_mined_and_drawn_items_are_remembered() -> None:
    corpus = Corpus.make(0)
    criterion = NegativeCache(num_left=20, refresh=0.0, temperature=0.05).double()
    mined = {"negatives": corpus.right[[15, 16]], "negative_id": torch.tensor([15, 16])}
    criterion(**corpus.batch([0, 1]), **mined)
    rights, lefts = criterion.memories
    assert [i for i in rights.keys.tolist() if i >= 0] == [0, 1, 15, 16]
    assert [i for i in lefts.keys.tolist() if i >= 0] == [0, 1]
    # Under a model that moved on, what is drawn is encoded anew, and remembered as it is now.
    newer = Corpus.make(1)
    before = rights.embeddings.clone()
    criterion(**newer.batch([4, 5]))
    renewed = (rights.embeddings != before).any(dim=1).nonzero().flatten().tolist()
    asked = {i for side, i in newer.asked if side == "right"}
    assert asked
    assert asked <= {0, 1, 15, 16}
    assert set(renewed) == asked | {4, 5}
    for i in renewed:
        torch.testing.assert_close(rights.embeddings[i], newer.right[i].detach())
