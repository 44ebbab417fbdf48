"""Special cases in which two objectives have the same gradient."""

from __future__ import annotations

import pytest
import torch

from dualenc.objectives import DCL, SACLR, ExactGlobal, InfoNCE, NegativeCache, Objective, SogCLR
from tests.helpers import slow


def gradient(criterion: Objective, case: slow.Case, **more: object) -> torch.Tensor:
    return slow.gradients(criterion.double()(**case.arguments(), **more).loss, case)


def corpus_case(views: bool) -> slow.Case:
    """The batch is the whole corpus, every item once."""
    case = slow.make_case(8, 12, views)
    return slow.Case(case.left, case.right, list(range(12)), list(range(12)), views, num_items=12)


@pytest.mark.parametrize("views", [False, True])
def test_saclr_with_the_exact_scale_is_info_nce(views: bool) -> None:
    case = corpus_case(views)
    criterion = SACLR(num_left=12, alpha=0.0, temperature=0.2, views=views)
    found = gradient(
        criterion, case
    )  # a first visit takes the batch's scale, here the exact one of Theorem 1
    torch.testing.assert_close(
        found, gradient(InfoNCE(temperature=0.2, views=views), case), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("views", [False, True])
def test_dcl_over_the_whole_corpus_is_exact_global(views: bool) -> None:
    case = corpus_case(views)

    def encode(side: str, ids: torch.Tensor) -> torch.Tensor:
        return (case.left if side == "left" else case.right)[ids]

    oracle = ExactGlobal(num_left=12, temperature=0.1, views=views, corpus_chunk_size=5)
    local = DCL(num_left=12, temperature=0.1, views=views)
    torch.testing.assert_close(gradient(oracle, case, encode=encode), gradient(local, case))
    value = oracle(**case.arguments(), encode=encode).loss
    torch.testing.assert_close(value, local(**case.arguments()).loss)


def test_exact_global_counts_an_item_as_often_as_it_is_in_pairs() -> None:
    """Documents 0 and 1 have two queries each: as candidates of other queries they weigh twice."""
    documents = torch.nn.functional.normalize(torch.randn(4, 6, dtype=torch.float64), dim=1)
    queries = torch.nn.functional.normalize(torch.randn(6, 6, dtype=torch.float64), dim=1)
    right_id = torch.tensor([0, 0, 1, 1, 2, 3])
    oracle = ExactGlobal(num_left=6, num_right=4, temperature=0.2).double()
    oracle.set_counts(torch.ones(6), torch.tensor([2.0, 2.0, 1.0, 1.0]))

    def encode(side: str, ids: torch.Tensor) -> torch.Tensor:
        return (queries if side == "left" else documents)[ids]

    known = {"right_positives": torch.tensor([[0, 1], [0, 1], [2, 3], [2, 3], [4, -1], [5, -1]])}
    found = oracle(queries, documents[right_id], torch.arange(6), right_id, encode, **known).loss
    whole_batch = DCL(temperature=0.2)(queries, documents[right_id], torch.arange(6), right_id).loss
    torch.testing.assert_close(found, whole_batch)
    # The estimators count the same corpus: with the whole of it in the batch, they agree on the
    # value.
    for given in (known, {}):
        local = SogCLR(gamma=1.0, num_left=6, num_right=4, temperature=0.2).double()
        local.set_counts(torch.ones(6), torch.tensor([2.0, 2.0, 1.0, 1.0]))
        out = local(queries, documents[right_id], torch.arange(6), right_id, **given)
        torch.testing.assert_close(out.loss, whole_batch)
        torch.testing.assert_close(out.metrics["batch_estimate"], whole_batch)


def test_negative_cache_counts_each_item_once() -> None:
    values = []
    for counts in (torch.ones(4), torch.tensor([1.0, 5.0, 1.0, 1.0])):
        criterion = NegativeCache(num_left=4, refresh=0.0).double()
        criterion.set_counts(counts, counts)
        encode = lambda side, ids: torch.eye(4)[ids]  # noqa: E731
        values.append(
            float(criterion(torch.eye(4), torch.eye(4), torch.arange(4), encode=encode).loss)
        )
    assert values[0] == values[1]
