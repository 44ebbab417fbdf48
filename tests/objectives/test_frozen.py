"""The softmax over documents that are vectors: against ExactGlobal, a float64 loop and one
process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dualenc import distributed
from dualenc.data.store.vector_shards import ShardedVectors
from dualenc.errors import DualencError
from dualenc.objectives import ExactGlobal, FrozenCorpus, Matryoshka, Objective
from dualenc.objectives import frozen_corpus as module

NUM_QUERIES, NUM_DOCUMENTS, DIM = 12, 301, 16


def unit(vectors: Tensor) -> Tensor:
    return torch.nn.functional.normalize(vectors, dim=1)


@pytest.fixture
def documents() -> Tensor:
    return unit(torch.randn(NUM_DOCUMENTS, DIM, dtype=torch.float64))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of seven documents."""
    monkeypatch.setattr(module, "BLOCK_BYTES", 4 * DIM * 7)


def batch(documents: Tensor, noise: float = 0.3) -> dict[str, Tensor]:
    """Queries near their documents; two share one, and all have up to three further positives."""
    draw = torch.Generator().manual_seed(1)
    right_id = torch.randint(NUM_DOCUMENTS, (NUM_QUERIES,), generator=draw)
    right_id[1] = right_id[0]
    listed = torch.randint(-1, NUM_DOCUMENTS, (NUM_QUERIES, 3), generator=draw)
    near = documents[right_id] + noise * torch.randn(
        NUM_QUERIES, DIM, generator=draw, dtype=documents.dtype
    )
    left = unit(near).requires_grad_()
    left_id = torch.arange(NUM_QUERIES)
    left_id[2] = 1  # one query in two pairs
    return {
        "left": left,
        "right": documents[right_id],
        "left_id": left_id,
        "right_id": right_id,
        "left_positives": torch.cat([right_id[:, None], listed], dim=1),
    }


def positives_of(given: dict[str, Tensor], row: int) -> set[int]:
    """Documents that are no negatives of a query: listed, or of any pair of the batch with this
    query."""
    of_query = given["right_id"][given["left_id"] == given["left_id"][row]].tolist()
    return {*given["left_positives"][row].tolist(), *of_query} - {-1}


@pytest.fixture
def weights() -> Tensor:
    """Weights such as clicks + 0.1, where few documents have many."""
    return torch.distributions.Geometric(torch.tensor(0.2)).sample((NUM_DOCUMENTS,)).double() + 0.1


def slow(
    given: dict[str, Tensor],
    documents: Tensor,
    log_tau: Tensor,
    positive_in_softmax: bool,
    weights: Tensor | None = None,
) -> Tensor:
    """(b,) losses from the formula, query by query."""
    losses = []
    if weights is None:
        weights = torch.ones(len(documents), dtype=torch.float64)
    for row, query in enumerate(given["left"]):
        hidden = positives_of(given, row)
        negatives = [number for number in range(len(documents)) if number not in hidden]
        scores = documents @ query / log_tau.exp() + weights.log()
        positive = scores[given["right_id"][row]]
        summed = scores[negatives]
        if positive_in_softmax:
            summed = torch.cat([summed, positive[None]])
        losses.append(torch.logsumexp(summed, dim=0) - positive)
    return torch.stack(losses)


def gradients(loss: Tensor, criterion: Objective, left: Tensor) -> tuple[Tensor, Tensor]:
    of_query, of_tau = torch.autograd.grad(loss, [left, criterion.log_temperature])
    return of_query, of_tau


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("positive_in_softmax", [False, True])
@pytest.mark.parametrize("tau", [0.005, 0.07, 1.0])
def test_equals_the_formula(
    documents, weights, small_blocks, tau, positive_in_softmax, is_weighted
):
    """Losses and gradients in query and τ, over many blocks, are those of a loop in float64."""
    given = batch(documents)
    common = {
        "temperature": tau,
        "learnable_temperature": True,
        "positive_in_softmax": positive_in_softmax,
    }
    chosen = weights if is_weighted else None
    criterion = FrozenCorpus(documents, weights=chosen, **common).double()
    out = criterion(**given)
    expected = slow(given, documents, criterion.log_temperature, positive_in_softmax, chosen)
    torch.testing.assert_close(out.per_anchor, expected.detach(), rtol=1e-9, atol=1e-9)
    found = gradients(out.loss, criterion, given["left"])
    for own, other in zip(found, gradients(expected.mean(), criterion, given["left"]), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("positive_in_softmax", [False, True])
def test_equals_exact_global(documents, small_blocks, positive_in_softmax):
    """Of left anchors, losses and gradients are those of the oracle, which encodes the corpus."""
    given = batch(documents)
    common: dict[str, Any] = {"temperature": 0.05, "positive_in_softmax": positive_in_softmax}
    oracle = ExactGlobal(num_left=NUM_QUERIES, num_right=NUM_DOCUMENTS, **common).double()
    queries = unit(torch.randn(NUM_QUERIES, DIM, dtype=torch.float64))
    exact = oracle(
        **given, encode=lambda side, ids: (documents if side == "right" else queries)[ids]
    )
    out = FrozenCorpus(documents, **common).double()(**given)
    torch.testing.assert_close(out.per_anchor, exact.per_anchor[:NUM_QUERIES], rtol=1e-6, atol=1e-6)
    # A right anchor's own part is −σ(L)·∇s⁺/τ, with l = log(1 + exp L) its loss, or −∇s⁺/τ.
    right_losses = exact.per_anchor[NUM_QUERIES:]
    share = 1 - torch.exp(-right_losses) if positive_in_softmax else torch.ones_like(right_losses)
    of_right = -share[:, None] * given["right"] / 0.05 / NUM_QUERIES
    found, both = (torch.autograd.grad(loss, given["left"])[0] for loss in (out.loss, exact.loss))
    torch.testing.assert_close(found, 2 * both - of_right, rtol=1e-6, atol=1e-6)


def test_weights_of_one_are_no_weights(documents, weights):
    """And only their ratios matter."""
    given = batch(documents)
    common: dict[str, Any] = {"temperature": 0.1, "positive_in_softmax": True}
    for first, second in ((None, np.ones(NUM_DOCUMENTS)), (weights, (7 * weights).tolist())):
        losses = [
            FrozenCorpus(documents, weights=each, **common).double()(**given).per_anchor
            for each in (first, second)
        ]
        torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)


def test_a_document_of_tiny_weight_is_left_out(documents):
    """As from a corpus without it."""
    given = batch(documents)
    used = given["left_positives"].flatten().clamp(min=0).unique()
    weights = torch.full((NUM_DOCUMENTS,), 1e-300, dtype=torch.float64)
    weights[used] = 1
    few = given | {
        "right_id": torch.searchsorted(used, given["right_id"]),
        "left_positives": torch.where(
            given["left_positives"] < 0, -1, torch.searchsorted(used, given["left_positives"])
        ),
    }
    weighted = FrozenCorpus(documents, weights=weights, temperature=0.1).double()(**given)
    without = FrozenCorpus(documents[used], temperature=0.1).double()(**few)
    torch.testing.assert_close(weighted.per_anchor, without.per_anchor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.1, 1e6])
def test_learns_the_ratio_to_the_frequency(alpha):
    """The loss over all pairs has its minimum where s/τ is log p(d | q) − log p_α(d)."""
    clicks = torch.tensor([9.0, 3.0, 1.0, 4.0, 0.0], dtype=torch.float64)
    tau, num = 0.1, len(clicks)
    frequency = (clicks + alpha) / (clicks + alpha).sum()
    of_query = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04], dtype=torch.float64)
    # Documents are axes, and one more axis takes up the length of the query.
    documents = torch.eye(num, num + 1, dtype=torch.float64)
    ratio = tau * (of_query / frequency).log()
    ratio -= ratio.mean()
    rest = (1 - ratio.square().sum()).sqrt()
    query = torch.cat([ratio, rest[None]]).expand(num, -1).clone().requires_grad_()
    ids = torch.arange(num)
    criterion = FrozenCorpus(
        documents, weights=clicks + alpha, temperature=tau, positive_in_softmax=True
    ).double()
    criterion(query, documents, ids, ids, weights=num * of_query).loss.backward()
    assert query.grad is not None
    # τ = 0.1 is stored in single precision.
    assert float(query.grad.sum(0).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", ["numpy", "map", "shards", "tensor"])
def test_sources_in_half_precision(documents, small_blocks, tmp_path, kind):
    """Rounded documents are scaled to length one; at τ = 0.005 in single precision nothing
    overflows."""
    halves = (3 * documents).half()
    array = halves.numpy()
    if kind == "map":
        np.save(tmp_path / "documents.npy", array)
        array = np.load(tmp_path / "documents.npy", mmap_mode="r")
    source = {"shards": ShardedVectors([array[:100], array[100:]]), "tensor": halves}.get(
        kind, array
    )
    given = batch(unit(halves.double()).float())
    criterion = FrozenCorpus(source, temperature=0.005)
    out = criterion(**given)
    double = {
        name: value.double() if value.is_floating_point() else value
        for name, value in given.items()
    }
    log_tau = torch.tensor(0.005, dtype=torch.float64).log()
    expected = slow(double, unit(halves.double()), log_tau, False)
    torch.testing.assert_close(out.per_anchor.double(), expected.detach(), rtol=2e-5, atol=2e-5)
    assert sum(value.numel() for value in criterion.state_dict().values()) < 4
    assert copy.deepcopy(criterion).documents.vectors is source


@pytest.mark.parametrize("searched", [False, True])
def test_several_lengths(documents, small_blocks, searched):
    """Matryoshka compares the first components of queries and documents, each scaled to length
    one."""
    given = batch(documents)
    objective = FrozenCorpus(documents, temperature=0.1)
    if searched:
        objective = sampled(documents, nearest=NUM_DOCUMENTS, sampled=1)
    criterion = Matryoshka(objective, dims=[4, DIM]).double()
    out = criterion(**given)
    log_tau = torch.tensor(0.1).double().log()
    short = slow(
        given | {"left": unit(given["left"][:, :4])}, unit(documents[:, :4]), log_tau, False
    )
    expected = (short + slow(given, documents, log_tau, False)) / 2
    torch.testing.assert_close(out.per_anchor, expected.detach(), rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(out.loss, given["left"])[0]
    torch.testing.assert_close(
        found, torch.autograd.grad(expected.mean(), given["left"])[0], rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("positive_in_softmax", [False, True])
def test_query_without_negatives(positive_in_softmax):
    """Its loss is −s⁺/τ, as of ExactGlobal, or 0 with the positive in the softmax."""
    documents = unit(torch.randn(2, 4))
    left = unit(torch.randn(1, 4)).requires_grad_()
    criterion = FrozenCorpus(documents, temperature=0.5, positive_in_softmax=positive_in_softmax)
    both = torch.tensor([[0, 1]])
    out = criterion(left, documents[:1], torch.tensor([0]), torch.tensor([0]), left_positives=both)
    expected = -(left * documents[:1]).sum() / 0.5 * (not positive_in_softmax)
    torch.testing.assert_close(out.loss, expected)
    found, exact = (torch.autograd.grad(loss, left)[0] for loss in (out.loss, expected))
    torch.testing.assert_close(found, exact)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"documents": np.zeros(3)}, "documents must be a float array"),
        ({"documents": np.zeros((3, 2), int)}, "documents must be a float array"),
        ({"weights": np.ones(3)}, "weights have shape .3,., but documents have 301 rows"),
        ({"weights": np.zeros(301)}, "weights hold values that are not finite and above 0; add"),
        ({"weights": np.full(301, np.nan)}, "weights hold values that are not finite"),
        ({"weights": "clicks"}, "weights is of type str"),
        ({"views": True}, "views is True"),
        ({"max_exact": 300}, "documents have 301 rows, more than max_exact .300.; pass search"),
        ({"num_right": 5}, "num_right is 5, but documents have 301 rows"),
        ({"search": np.zeros(3)}, "search is of type ndarray; it must be a function"),
        ({"documents": np.full((301, DIM), np.nan)}, "documents hold NaN or infinite values"),
    ],
)
def test_refused_arguments(documents, arguments, message):
    with pytest.raises(DualencError, match=f"FrozenCorpus: {message}"):
        FrozenCorpus(**{"documents": documents} | arguments)


@pytest.mark.parametrize(
    ("results", "message"),
    [
        ((np.zeros((12, 3)), np.zeros((12, 3))), "returned shape .2, 12, 3."),
        (np.full((12, 3), 301), "returned rows in .301, 301."),
        # The scores of faiss' search, [0] for [1].
        (
            np.full((12, 3), 0.7, np.float32),
            "returned float32 instead of integers; return rows, which FAISS",
        ),
        (torch.full((12, 3), 0.7), "returned float32 instead of integers"),
        (np.full((12, 3), True), "returned bool instead of integers"),
        (None, "is None"),
        ([[1, 2], [3]], "is of type list"),
    ],
)
def test_a_search_that_gives_no_rows(documents, results, message):
    criterion = FrozenCorpus(
        documents, max_exact=9, search=lambda queries, nearest: results
    ).double()
    with pytest.raises(DualencError, match=f"FrozenCorpus: search {message}"):
        criterion(**batch(documents))


def test_documents_in_another_order(documents):
    """Positives that are not the rows of their ids are refused."""
    with pytest.raises(DualencError, match="right differs from the documents of right_id"):
        FrozenCorpus(documents.flip(0)).double()(**batch(documents))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_documents_of_nan_are_named(documents, value, monkeypatch):
    """Also one that is in no pair: it would make every weight NaN; at once, or in the first
    step."""
    spoiled = documents.clone()
    spoiled[-2] = value
    with pytest.raises(DualencError, match="FrozenCorpus: documents hold NaN or infinite values"):
        FrozenCorpus(spoiled)
    monkeypatch.setattr(module, "NUM_CHECKED", 2)
    criterion = FrozenCorpus(spoiled).double()
    with pytest.raises(DualencError, match="FrozenCorpus: documents hold NaN or infinite values"):
        criterion(**batch(documents))


@pytest.mark.parametrize("searched", [False, True])
def test_documents_of_fewer_components_than_the_queries(documents, searched):
    short = unit(documents[:, :9])
    options = {"max_exact": 9, "search": brute_force(short)} if searched else {}
    message = (
        "FrozenCorpus: documents have 9 components and the queries 16; "
        "pass documents embedded by the model"
    )
    with pytest.raises(DualencError, match=message):
        FrozenCorpus(short, **options).double()(**batch(documents))


def brute_force(documents: Tensor) -> Any:
    """A search that gives the nearest documents, and -1 in the last column."""

    def search(queries: np.ndarray, nearest: int) -> np.ndarray:
        rows = (-queries @ documents.float().numpy().T).argsort(axis=1)[:, :nearest]
        rows[:, -1] = -1
        return rows

    return search


def sampled(documents: Tensor, **options: Any) -> FrozenCorpus:
    return FrozenCorpus(
        documents, temperature=0.1, max_exact=100, search=brute_force(documents), **options
    ).double()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_nearest_and_sampled_estimate_the_sum_without_bias(
    documents, weights, small_blocks, is_weighted
):
    """Over draws, the mean of Z of each query is the exact sum, and the mean gradient is near the
    exact one."""
    given = batch(documents, noise=1.0)
    chosen = weights if is_weighted else None
    exact = FrozenCorpus(documents, weights=chosen, temperature=0.1).double()
    expected = exact(**given).per_anchor
    gradient = torch.autograd.grad(exact(**given).loss, given["left"])[0]
    criterion = sampled(documents, nearest=4, sampled=40, weights=chosen)
    ratios, found = [], torch.zeros_like(gradient)
    for _ in range(400):
        out = criterion(**given)
        ratios.append((out.per_anchor - expected).exp())  # Z over the exact Z
        found += torch.autograd.grad(out.loss, given["left"])[0] / 400
    spread, mean = torch.std_mean(torch.stack(ratios), dim=0)
    assert float(spread.max()) > 0.01
    assert bool(((mean - 1).abs() < 4 * spread / 400**0.5).all())
    assert float((found - gradient).norm() / gradient.norm()) < 0.08


def on_a_rank(rank: int, world_size: int, folder: Path, documents: Tensor) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
    )
    torch.save(both_parts(documents), folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def own_part(documents: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """The averaged gradient of a query map (D, D) and log τ by this rank's part of the batch, and
    the loss."""
    given = batch(documents)
    rows = distributed.rank_slice(NUM_QUERIES - 1)  # uneven
    own = {name: value.detach()[rows] for name, value in given.items()}
    weight = torch.eye(DIM, dtype=torch.float64).requires_grad_()
    criterion = FrozenCorpus(
        documents, temperature=0.1, learnable_temperature=True, **options
    ).double()
    out = criterion(**own | {"left": unit(own["left"] @ weight)})
    out.loss.backward()
    distributed.average_gradients([weight, criterion.log_temperature])
    found = torch.cat([weight.grad.flatten(), criterion.log_temperature.grad[None]])
    return found, distributed.all_reduce(out.loss, "mean")


def both_parts(documents: Tensor) -> tuple[Tensor, ...]:
    """What `own_part` gives of the exact sum, then of the estimated one, then with weights."""
    options = {"max_exact": 100, "nearest": 5, "sampled": 20, "search": brute_force(documents)}
    weights = {"weights": np.arange(1, 1 + len(documents)), "positive_in_softmax": True}
    parts = ({}, options, weights, weights | options)
    return tuple(value for each in parts for value in own_part(documents, **each))


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one(documents, small_blocks, tmp_path):
    expected = both_parts(documents)
    mp.start_processes(on_a_rank, (2, tmp_path, documents), nprocs=2, start_method="fork")
    for rank in range(2):
        for found, value in zip(torch.load(tmp_path / f"{rank}.pt"), expected, strict=True):
            torch.testing.assert_close(found, value.detach(), rtol=1e-9, atol=1e-9)
