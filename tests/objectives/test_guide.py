"""A guide's rule: what it finds more similar to the anchor than the positive is no negative, in the batch.

That gradients are then those of the loops is tested with these; here is the rule itself.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc.errors import DualencError
from dualenc.objectives import DCL, HCL, SACLR, GuideVectors, InfoNCE, ISogCLR, Objective, SigLIP, SogCLR
from tests.objectives.every import CLASSES, momentum_keys

B, N, TAU = 8, 5, 0.3
IN_BATCH = [InfoNCE, DCL, HCL, SogCLR, ISogCLR, SACLR, SigLIP]


def unit(rows: int, seed: int, dim: int = 6) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return normalize(torch.randn(rows, dim, generator=draws, dtype=torch.float64), dim=1)


def plain_batch(mined: bool = False) -> dict[str, Any]:
    batch = {"left": unit(B, 0), "right": unit(B, 1), "left_id": torch.arange(B), "right_id": torch.arange(B)}
    return batch | ({"negatives": unit(N, 4), "negative_id": torch.arange(B, B + N)} if mined else {})


def guided_batch(mined: bool = False) -> dict[str, Any]:
    vectors = GuideVectors(unit(B, 2, 3), normalize(unit(B, 2, 3) + 0.7 * unit(B, 3, 3), dim=1))
    if mined:
        vectors = vectors._replace(negatives=unit(N, 5, 3))
    return plain_batch(mined) | {"guide": vectors}


@pytest.mark.parametrize(("margin", "relative"), [(0.0, 1.0), (0.3, 1.0), (0.0, 0.9)])
def test_info_nce_with_mined_negatives_equals_a_loop(margin: float, relative: float) -> None:
    batch = guided_batch(mined=True)
    guide, documents = batch["guide"], torch.cat([batch["right"], batch["negatives"]])
    guided_documents = torch.cat([guide.right, guide.negatives])
    losses, num_kept = [], 0
    for i in range(B):
        positive = float(guide.left[i] @ guide.right[i])
        limit = positive - (1 - relative) * abs(positive) - margin
        for anchor, partner, others, own, vectors in (
            (batch["left"][i], batch["right"][i], documents, guide.left[i], guided_documents),
            (batch["right"][i], batch["left"][i], batch["left"], guide.right[i], guide.left),
        ):
            kept = [j for j, vector in enumerate(vectors) if j != i and float(own @ vector) <= limit]
            num_kept += len(kept)
            logits = torch.stack([anchor @ partner, *(anchor @ others[j] for j in kept)]) / TAU
            losses.append(logits.logsumexp(0) - logits[0])
    assert 0 < num_kept < B * (2 * (B - 1) + N), "some are judged"
    found = InfoNCE(temperature=TAU, guide_margin=margin, guide_relative=relative).double()(**batch).loss
    assert float(found) == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("kind", IN_BATCH, ids=lambda kind: kind.__name__)
def test_what_the_guide_takes_for_a_positive_has_no_gradient(kind: type[Objective]) -> None:
    left, right = torch.eye(B, dtype=torch.float64), torch.eye(B, dtype=torch.float64)
    # The guide finds document 0 still more similar to query 1 than query 1's own.
    right[0] = normalize(right[0] + 2 * left[1], dim=0)
    right[1] = normalize(right[1] + 2 * left[5], dim=0)
    moved = unit(B, 1)
    moved[0] = unit(1, 9)[0]

    def gradient(**changed: Any) -> Tensor:
        given = plain_batch() | changed
        given["left"] = given["left"].requires_grad_()
        kind(num_left=B, temperature=TAU).double()(**given).loss.backward()
        return given["left"].grad[1]

    guide = GuideVectors(left, right)
    torch.testing.assert_close(gradient(guide=guide), gradient(guide=guide, right=moved), rtol=1e-9, atol=1e-12)
    assert not torch.allclose(gradient(), gradient(right=moved), rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", IN_BATCH, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("views", [False, True])
def test_an_anchor_without_trusted_negatives_only_pulls(kind: type[Objective], views: bool) -> None:
    batch = plain_batch()
    left = batch["left"].requires_grad_()
    guide = GuideVectors(torch.ones(B, 1), torch.ones(B, 1))
    criterion = kind(num_left=B, temperature=TAU, views=views, guide_margin=0.5).double()
    for _ in range(2):
        loss = criterion(**batch, guide=guide).loss
        (gradient,) = torch.autograd.grad(loss, left)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()
    if kind in (DCL, SogCLR, ISogCLR):
        torch.testing.assert_close(gradient, -batch["right"] / TAU / B)


def test_a_guide_without_a_vector_judges_nothing() -> None:
    batch = guided_batch(mined=True)
    unknown = GuideVectors(*(torch.full_like(vectors, torch.nan) for vectors in batch["guide"]))
    for kind in (InfoNCE, SogCLR):
        found, expected = (
            float(kind(num_left=B + N, temperature=TAU).double()(**given).loss)
            for given in (batch | {"guide": unknown}, plain_batch(mined=True))
        )
        assert found == pytest.approx(expected)


@pytest.mark.nightly
@pytest.mark.parametrize(("margin", "relative"), [(0.0, 1.0), (0.1, 1.0), (0.0, 0.9)])
@pytest.mark.parametrize("views", [False, True])
def test_info_nce_is_gistembed_of_sentence_transformers(views: bool, margin: float, relative: float) -> None:
    """Two towers compare anchors with positives; two views anchors with anchors as well, from either view."""
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    batch = guided_batch()
    theirs = losses.GISTEmbedLoss.__new__(losses.GISTEmbedLoss)
    nn.Module.__init__(theirs)
    theirs.temperature, theirs.contrast_anchors, theirs.contrast_positives = TAU, views, False
    theirs.similarity_fct, theirs.cross_entropy_loss = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
    theirs.margin_strategy, theirs.margin = ("absolute", margin) if relative == 1 else ("relative", 1 - relative)
    theirs.must_retokenize = theirs.gather_across_devices = False
    theirs.model = lambda side: {"sentence_embedding": side["own"]}
    theirs.guide = lambda side: {"sentence_embedding": side["guided"]}
    sides = [{"own": batch[side], "guided": getattr(batch["guide"], side)} for side in ("left", "right")]
    expected = (theirs(sides, None) + theirs(sides[::-1], None)) / 2
    criterion = InfoNCE(temperature=TAU, views=views, guide_margin=margin, guide_relative=relative).double()
    assert float(criterion(**batch).loss) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("kind", [k for k in CLASSES if k not in IN_BATCH], ids=lambda kind: kind.__name__)
def test_objectives_that_look_beyond_the_batch_refuse_a_guide(kind: type[Objective]) -> None:
    with pytest.raises(DualencError, match=f"{kind.__name__}: guide judges candidates of the batch only"):
        criterion, batch = kind(num_left=B + N).double(), guided_batch(mined=True)
        keys = momentum_keys(criterion, batch["left"], batch["right"])
        criterion(**batch, **keys, encode=lambda side, ids: unit(len(ids), 0))


def test_vectors_that_do_not_fit_are_refused() -> None:
    batch = guided_batch(mined=True)
    guide = batch["guide"]
    for changed, message in (
        (guide._replace(right=unit(B, 0, 4)), r"guide has vectors of shapes \(8, 3\) and \(8, 4\)"),
        (
            GuideVectors(unit(7, 0, 3), unit(7, 0, 3), guide.negatives),
            r"\(7, 3\) .*; give one for each item of 8 pairs",
        ),
        (guide._replace(negatives=None), "guide has 0 vectors of 5 mined negatives"),
    ):
        with pytest.raises(DualencError, match=f"InfoNCE: .*{message}"):
            InfoNCE()(**batch | {"guide": changed})
    for given, message in (
        ({"guide_relative": 1.5}, r"guide_relative is 1.5; it must lie in \[0, 1\]"),
        ({"guide_margin": float("nan")}, "guide_margin is nan"),
    ):
        with pytest.raises(DualencError, match=f"InfoNCE: {message}"):
            InfoNCE(**given)
