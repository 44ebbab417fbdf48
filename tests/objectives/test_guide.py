"""A guide's rule: what it finds more alike than the positive is no negative, wherever negatives come from.

That every objective's gradient is then that of its slow loop stands with those loops; here is the rule itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import (
    DCL,
    EMC2,
    HCL,
    ISIR,
    SACLR,
    ExactGlobal,
    GlobalCache,
    InfoNCE,
    ISogCLR,
    NegativeCache,
    Objective,
    SigLIP,
    SogCLR,
)
from dualenc.objectives.chains import ChainObjective
from tests.objectives.frozen import Frozen, batches

B, N, DIM, TAU = 8, 5, 6, 0.3
IN_BATCH = [InfoNCE, DCL, HCL, SogCLR, ISogCLR, SACLR, SigLIP]


def unit(rows: int, seed: int, dim: int = DIM) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, dim, generator=draws, dtype=torch.float64), dim=1)


def case(mined: bool) -> dict[str, Tensor]:
    batch = {"left": unit(B, 0), "right": unit(B, 1), "left_id": torch.arange(B), "right_id": torch.arange(B)}
    batch |= {"guide_left": unit(B, 2, 3), "guide_right": normalize(unit(B, 2, 3) + 0.7 * unit(B, 3, 3), dim=1)}
    if mined:
        batch |= {"negatives": unit(N, 4), "negative_id": torch.arange(B, B + N), "guide_negatives": unit(N, 5, 3)}
    return batch


def slow_masks(batch: dict[str, Tensor], margin: float) -> tuple[list[list[int]], list[list[int]]]:
    """The candidates that stay negatives: of each left anchor, mined ones behind those of the batch; of each right."""
    candidates = torch.cat([batch["guide_right"], batch.get("guide_negatives", batch["guide_right"][:0])])
    left, right = [], []
    for i in range(B):
        limit = float(batch["guide_left"][i] @ batch["guide_right"][i]) - margin
        told = [float(batch["guide_left"][i] @ of) for of in candidates]
        left.append([j for j, alike in enumerate(told) if j != i and not alike > limit])
        told = [float(batch["guide_right"][i] @ of) for of in batch["guide_left"]]
        right.append([j for j, alike in enumerate(told) if j != i and not alike > limit])
    return left, right


@pytest.mark.parametrize("mined", [False, True])
@pytest.mark.parametrize("margin", [0.0, 0.3])
def test_infonce_equals_a_slow_loop(mined: bool, margin: float) -> None:
    batch = case(mined)
    left, right = slow_masks(batch, margin)
    assert 0 < sum(map(len, left)) < B * (B - 1 + N * mined), "some are judged"
    documents = torch.cat([batch["right"], batch.get("negatives", batch["right"][:0])])
    losses = []
    for i in range(B):
        for anchor, partner, others, kept in (
            (batch["left"][i], batch["right"][i], documents, left[i]),
            (batch["right"][i], batch["left"][i], batch["left"], right[i]),
        ):
            logits = torch.stack([anchor @ partner, *(anchor @ others[j] for j in kept)]) / TAU
            losses.append(logits.logsumexp(0) - logits[0])
    found = InfoNCE(temperature=TAU, guide_margin=margin).double()(**batch).loss
    assert float(found) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("build", IN_BATCH, ids=lambda build: build.__name__)
def test_what_the_guide_takes_for_a_positive_has_no_gradient(build: type[Objective]) -> None:
    """A pair whose both items every guide's vector is near to is a negative of nobody, and pushes nobody away."""
    batch = case(False)
    batch["guide_left"] = torch.eye(B, dtype=torch.float64)
    batch["guide_right"] = torch.eye(B, dtype=torch.float64)
    # The guide finds document 0 still more alike to query 1 than query 1's own.
    batch["guide_right"][0] = normalize(batch["guide_right"][0] + 2 * batch["guide_left"][1], dim=0)
    batch["guide_right"][1] = normalize(batch["guide_right"][1] + 2 * batch["guide_left"][5], dim=0)

    def gradient(given: dict[str, Tensor]) -> Tensor:
        left = given["left"].clone().requires_grad_()
        criterion = build(num_left=B, temperature=TAU).double()
        criterion(**{**given, "left": left}).loss.backward()
        return left.grad[1]

    moved = {**batch, "right": batch["right"].clone()}
    moved["right"][0] = unit(1, 9)[0]
    without = [{k: v for k, v in given.items() if not k.startswith("guide")} for given in (batch, moved)]
    torch.testing.assert_close(gradient(batch), gradient(moved), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(gradient(without[0]), gradient(without[1]), rtol=0, atol=1e-6)


def test_a_guide_without_a_vector_judges_nobody() -> None:
    batch = case(True)
    plain = {name: tensor for name, tensor in batch.items() if not name.startswith("guide")}
    unknown = {name: torch.full_like(batch[name], torch.nan) for name in batch if name.startswith("guide")}
    for build in (InfoNCE, DCL, SogCLR):
        found, expected = (
            float(build(num_left=B + N, temperature=TAU).double()(**given).loss) for given in (batch | unknown, plain)
        )
        assert found == pytest.approx(expected)


def test_blocks_of_rows_are_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case(True)
    whole = float(DCL(temperature=TAU).double()(**batch).loss)
    monkeypatch.setattr("dualenc.objectives.anchors.BLOCK_ENTRIES", 3 * (B + N))
    assert float(DCL(temperature=TAU).double()(**batch).loss) == pytest.approx(whole)


@pytest.mark.parametrize(("margin", "relative"), [(0.0, 1.0), (0.1, 1.0), (0.0, 0.9)])
@pytest.mark.parametrize("views", [False, True])
def test_infonce_is_gistembed_of_sentence_transformers(views: bool, margin: float, relative: float) -> None:
    """Two towers compare anchors with positives; two views anchors with anchors as well, from either view."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    batch = case(mined=False)
    theirs = losses.GISTEmbedLoss.__new__(losses.GISTEmbedLoss)
    nn.Module.__init__(theirs)
    theirs.temperature, theirs.contrast_anchors, theirs.contrast_positives = TAU, views, False
    theirs.similarity_fct, theirs.cross_entropy_loss = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
    theirs.margin_strategy, theirs.margin = ("absolute", margin) if relative == 1 else ("relative", 1 - relative)
    theirs.must_retokenize = theirs.gather_across_devices = False
    theirs.model, theirs.guide = (
        (lambda told: {"sentence_embedding": told["own"]}),
        (lambda told: {"sentence_embedding": told["guided"]}),
    )
    sides = [{"own": batch[side], "guided": batch[f"guide_{side}"]} for side in ("left", "right")]
    expected = (theirs(sides, None) + theirs(sides[::-1], None)) / 2
    criterion = InfoNCE(temperature=TAU, views=views, guide_margin=margin, guide_relative=relative).double()
    assert float(criterion(**batch).loss) == pytest.approx(float(expected), rel=1e-6)
    assert float(InfoNCE(temperature=TAU, views=views)(**unguided(batch)).loss) != pytest.approx(float(expected))


def unguided(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in batch.items() if not name.startswith("guide")}


@pytest.mark.parametrize("views", [False, True])
def test_looked_up_vectors_judge_as_those_that_come_with_the_batch(views: bool) -> None:
    batch = case(mined=not views)
    tables = {side: unit(B + N, 7, 3) for side in ("left", "right")}
    tables["left"][:B], tables["right"][:B] = batch["guide_left"], batch["guide_right"]
    tables["right"][B:] = batch.get("guide_negatives", tables["right"][B:])
    with_batch, looked_up = (
        InfoNCE(temperature=TAU, views=views).double()(**given).loss
        for given in (batch, unguided(batch) | {"guide": lambda side, ids: tables[side][ids]})
    )
    assert float(with_batch) == float(looked_up)


N_FROZEN, B_FROZEN = 60, 12


class Guided(Frozen):
    """Frozen pairs with a guide that mistrusts some of an anchor's nearest negatives."""

    def guide(self, side: str, ids: Tensor) -> Tensor:
        return (self.left if side == "left" else self.right).detach()[ids][:, :3] * 3

    def mistrusted(self, side: str) -> Tensor:
        """(N, N) what is more alike to an anchor than its positive, in double precision."""
        left, right = (self.guide(of, torch.arange(len(self.left))).double() for of in ("left", "right"))
        alike = left @ right.T if side == "left" else right @ left.T
        return alike > alike.diagonal()[:, None]

    def loss(self, criterion: Objective, ids: Tensor) -> Tensor:
        given = (self.left[ids], self.right[ids], ids)
        return criterion(*given, encode=self.encode, guide=self.guide).loss

    def law(self, side: str) -> Tensor:
        """(N, N) the softmax over what is left."""
        law = self.softmax(side).masked_fill(self.mistrusted(side), 0.0)
        return law / law.sum(dim=1, keepdim=True)


def test_exact_global_is_the_softmax_over_what_the_guide_leaves() -> None:
    frozen = Guided.make(N_FROZEN)
    assert 0.1 < float(frozen.mistrusted("left").double().mean()) < 0.5
    value, gradient = frozen.exact()
    losses = []
    for side, own, other in (("left", frozen.left, frozen.right), ("right", frozen.right, frozen.left)):
        hidden = frozen.mistrusted(side) | torch.eye(N_FROZEN, dtype=torch.bool)
        logits = own.double() @ other.double().T / frozen.tau
        masked = logits.masked_fill(hidden, -torch.inf)
        losses.append(torch.logsumexp(masked, dim=1).sum() - logits.diagonal().sum())
    expected = torch.stack(losses).sum() / (2 * N_FROZEN)
    assert value == pytest.approx(float(expected.detach()), rel=1e-5)
    found = torch.cat(torch.autograd.grad(expected, [frozen.left, frozen.right]))
    torch.testing.assert_close(gradient, found, rtol=1e-3, atol=1e-5)


CHAINS = [
    (ISIR, {}),
    (ISIR, {"proposals": B_FROZEN}),
    (ISIR, {"proposals": B_FROZEN, "neighbor_share": 0.5}),
    (EMC2, {"score": "fresh", "proposals": B_FROZEN}),
    (EMC2, {}),
]


def chains_for(frozen: Frozen, kind: type[ChainObjective], arguments: dict[str, Any], **more: Any) -> ChainObjective:
    criterion = kind(num_left=N_FROZEN, temperature=frozen.tau, **arguments, **more)
    for side in ("left", "right"):
        criterion.set_neighbors(side, frozen.softmax(side).topk(5, dim=1).indices)
    return criterion


@pytest.mark.parametrize("recent", [0, 7, 4096])
@pytest.mark.parametrize(("kind", "arguments"), CHAINS)
def test_no_chain_is_ever_on_what_the_guide_mistrusts(
    kind: type[ChainObjective], arguments: dict[str, Any], recent: int
) -> None:
    """Not from the first step on; nor one that was there before there was a guide."""
    frozen = Guided.make(N_FROZEN)
    criterion = chains_for(frozen, kind, arguments, recent=recent)
    worst = {side: frozen.softmax(side).masked_fill(~frozen.mistrusted(side), -1.0) for side in ("left", "right")}
    states = {side: criterion.chains.state[criterion.chains_of(side)] for side in ("left", "right")}
    for side, of in states.items():
        of[::2] = worst[side].argmax(dim=1)[::2]
    for ids in next(iter(batches(N_FROZEN, B_FROZEN, 1))) * 2:
        frozen.loss(criterion, ids)
        for side, of in states.items():
            state = of[ids]
            on_it = frozen.mistrusted(side)[ids].gather(1, state.clamp(min=0)[:, None])[:, 0] & (state >= 0)
            assert not bool(on_it.any())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "arguments"), CHAINS[:-1])
def test_chains_follow_the_softmax_over_what_the_guide_leaves(
    kind: type[ChainObjective], arguments: dict[str, Any]
) -> None:
    frozen = Guided.make(N_FROZEN)
    laws = {side: frozen.law(side) for side in ("left", "right")}
    criterion = chains_for(frozen, kind, arguments)
    draw, quantiles, without = torch.Generator().manual_seed(1), [], []
    for epoch, order in enumerate(batches(N_FROZEN, B_FROZEN, 150)):
        for ids in order:
            frozen.loss(criterion, ids)
            if epoch % 5 == 4 and epoch >= 20:
                for side in ("left", "right"):
                    state = criterion.chains.state[criterion.chains_of(side)][ids]
                    for law, into in ((laws[side][ids], quantiles), (frozen.softmax(side)[ids], without)):
                        own = law.gather(1, state[:, None])
                        below = torch.where(law < own, law, 0.0).sum(dim=1, keepdim=True)
                        into.append(below + torch.rand(len(ids), 1, generator=draw) * own)
    guided, plain = (
        float(chisquare(torch.histc(torch.cat(of).float(), bins=25, min=0, max=1).numpy()).pvalue)
        for of in (quantiles, without)
    )
    assert guided > 0.001
    assert plain < 1e-6, "the law over the whole corpus is another one"


@pytest.mark.parametrize(
    "build",
    [*IN_BATCH, ISIR, EMC2, NegativeCache, GlobalCache, ExactGlobal],
    ids=lambda build: build.__name__,
)
@pytest.mark.parametrize("views", [False, True])
def test_an_anchor_of_whom_the_guide_mistrusts_all_others_only_pulls(build: type[Objective], views: bool) -> None:
    """All vectors of the guide are alike, and the margin is wide: nobody has a negative."""
    batch = unguided(case(False))
    left, right = (batch[side].clone().requires_grad_() for side in ("left", "right"))
    criterion = build(num_left=B, temperature=TAU, views=views, guide_margin=0.5).double()

    def encode(side: str, ids: Tensor) -> Tensor:
        return batch[side][ids]

    for _ in range(2):
        found = criterion(
            left, right, batch["left_id"], encode=encode, guide=lambda side, ids: torch.ones(len(ids), 1).double()
        )
        (gradient,) = torch.autograd.grad(found.loss, left)
        assert bool(torch.isfinite(gradient).all())
        assert bool(torch.isfinite(found.loss))
    # Half of each direction's mean; InfoNCE and HCL have found what they look for, and pull no more.
    if build in (DCL, SogCLR, ISogCLR, ISIR, EMC2, NegativeCache, GlobalCache, ExactGlobal):
        torch.testing.assert_close(gradient, -batch["right"] / TAU / B)


def test_what_a_guide_cannot_judge_is_told() -> None:
    batch = case(True)
    for build in (ISIR, GlobalCache):
        with pytest.raises(DualencError, match=rf"{build.__name__}: guide is missing; pass guide\(side, ids\)"):
            build(num_left=B + N)(**batch, encode=lambda side, ids: unit(len(ids), 0))
    for changed, told in (
        ({"guide_right": None}, "guide_right and, with negatives, guide_negatives are given together"),
        ({"guide_negatives": None}, "guide_right and, with negatives, guide_negatives are given together"),
        ({"guide_right": unit(B, 0, 4)}, "guide_right and guide_negatives have shapes .*; give a vector per item"),
    ):
        with pytest.raises(DualencError, match=f"InfoNCE: guide_left, {told}"):
            InfoNCE()(**(batch | changed))
    with pytest.raises(DualencError, match=r"guide_left, guide_right and guide_negatives have shapes \(7, 3\)"):
        InfoNCE()(**unguided(batch), guide=lambda side, ids: unit(len(ids) - 1, 0, 3))
    for given, told in (
        ({"guide_relative": 1.5}, r"is 1.5; it must lie in \[0, 1\]"),
        ({"guide_margin": float("nan")}, "is nan"),
    ):
        with pytest.raises(DualencError, match=f"InfoNCE: {next(iter(given))} {told}"):
            InfoNCE(**given)
