"""Training with a guide's embeddings: each item's vector is found by its id, and decides who is a negative."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dualenc.data import Corpus
from dualenc.errors import DualencError
from dualenc.objectives import ISIR, InfoNCE, Objective, SogCLR
from dualenc.search.embed import embed
from dualenc.training import Trainer
from dualenc.training.loader import BatchLoader, Guide
from tests.fake_towers import LetterTower, texts
from tests.training.fakes import NumbersPrepare, TinyEncoder, same, tiny_pairs, weights


@pytest.fixture
def guide(tmp_path: Path) -> tuple[str, str]:
    """Folders with a vector of each item of `tiny_pairs`, left item 3 without one, in another order than the pairs'."""
    order = np.random.default_rng(0).permutation(24)
    for side, ids in (("left", [i for i in order.tolist() if i != 3]), ("right", order.tolist())):
        corpus = Corpus([str(i) for i in ids], [texts(24)[i] for i in ids])
        embed(LetterTower(), corpus, tmp_path / side, progress=False, output="features")
    return str(tmp_path / "left"), str(tmp_path / "right")


def test_vectors_are_those_of_the_ids_and_of_length_one(guide: tuple[str, str]) -> None:
    pairs = tiny_pairs(negatives=[[(i + 1) % 24] for i in range(24)])
    loader = BatchLoader(pairs, NumbersPrepare(), NumbersPrepare(), augment=False, guide=Guide(pairs, *guide))
    stored = embed(LetterTower(), Corpus([str(i) for i in range(24)], texts(24)), output="features", progress=False)
    unit = torch.from_numpy(stored.vectors / np.linalg.norm(stored.vectors, axis=1, keepdims=True))
    for batch in loader.batches(np.arange(24).reshape(4, 6)):
        there = batch.left_id != 3
        torch.testing.assert_close(batch.guide_left[there], unit[batch.left_id[there]])
        assert batch.guide_left[~there].isnan().all()
        torch.testing.assert_close(batch.guide_right, unit[batch.right_id])
        torch.testing.assert_close(batch.guide_negatives, unit[batch.negative_id])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [InfoNCE, SogCLR])
def test_a_guide_changes_the_training_and_one_that_allows_all_does_not(
    tmp_path: Path, guide: tuple[str, str], kind: type[Objective]
) -> None:
    pairs = tiny_pairs()
    for name, folders, margin in (("plain", (None, None), 0.0), ("guided", guide, 0.3), ("lenient", guide, -3.0)):
        torch.manual_seed(0)
        trainer = Trainer(
            output=tmp_path / name,
            batch_size=8,
            max_steps=4,
            progress=False,
            guide_left=folders[0],
            guide_right=folders[1],
        )
        objective = kind(num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.2, guide_margin=margin)
        trainer.fit(TinyEncoder(), pairs, objective)
    assert all(
        torch.allclose(value, weights(tmp_path / "lenient")[name], atol=1e-6)
        for name, value in weights(tmp_path / "plain").items()
    )
    assert not same(weights(tmp_path / "plain"), weights(tmp_path / "guided"))


def test_of_two_views_near_copies_of_an_image_are_no_negatives(tmp_path: Path, guide: tuple[str, str]) -> None:
    """Both views have one vector, so that an image has similarity 1 with itself: the margin says what is a copy."""
    pairs = tiny_pairs()
    pairs.views, pairs.right_items = True, pairs.left_items
    for name, margin in (("plain", None), ("strict", 0.0), ("wide", 0.5)):
        torch.manual_seed(0)
        folders = (None, None) if margin is None else (guide[1], guide[1])
        trainer = Trainer(
            output=tmp_path / name,
            batch_size=8,
            max_steps=3,
            progress=False,
            guide_left=folders[0],
            guide_right=folders[1],
        )
        objective = SogCLR(num_left=24, views=True, temperature=0.2, guide_margin=margin or 0.0)
        trainer.fit(TinyEncoder(shared=True), pairs, objective)
    strict, wide = (same(weights(tmp_path / "plain"), weights(tmp_path / name)) for name in ("strict", "wide"))
    assert strict
    assert not wide


def test_objectives_that_look_beyond_the_batch_refuse_a_guide(tmp_path: Path, guide: tuple[str, str]) -> None:
    trainer = Trainer(output=tmp_path / "run", batch_size=8, progress=False, guide_left=guide[0], guide_right=guide[1])
    with pytest.raises(DualencError, match="guide_left judges candidates of the batch, and ISIR looks beyond"):
        trainer.fit(TinyEncoder(), tiny_pairs(), ISIR(num_left=24))


def test_a_run_is_not_resumed_with_another_guide(tmp_path: Path, guide: tuple[str, str]) -> None:
    pairs = tiny_pairs()

    def train(resume: bool) -> None:
        folders = {"guide_left": guide[0], "guide_right": guide[1]}
        trainer = Trainer(output=tmp_path / "run", batch_size=8, max_steps=2, progress=False, **folders)
        trainer.fit(TinyEncoder(), pairs, InfoNCE(), resume=resume)

    train(resume=False)
    train(resume=True)
    shutil.rmtree(guide[1])
    changed = Corpus([str(i) for i in range(24)], texts(24)[::-1])
    embed(LetterTower(), changed, guide[1], progress=False, output="features")
    with pytest.raises(DualencError, match=r"other data: guide\.right was"):
        train(resume=True)


def test_mistakes_are_refused(tmp_path: Path, guide: tuple[str, str]) -> None:
    pairs = tiny_pairs()
    with pytest.raises(DualencError, match="guide_left and guide_right are given together"):
        Trainer(output=tmp_path / "run", guide_left=guide[0])
    with pytest.raises(DualencError, match="left: embeds other items than the left ones of the pairs"):
        Guide(tiny_pairs(12), *guide)
    embed(LetterTower(), Corpus(["x"], ["a text"]), tmp_path / "other", progress=False)
    with pytest.raises(DualencError, match="other: embeds no left item of the pairs; embed the data"):
        Guide(pairs, tmp_path / "other", guide[1])
    with pytest.raises(DualencError, match="embed both with one model"):
        Guide(pairs, _of_other_size(tmp_path), guide[1])


def _of_other_size(folder: Path) -> Path:
    """Embeddings of the left items in another dimension."""
    corpus = Corpus([str(i) for i in range(24)], texts(24))
    embed(LetterTower(), corpus, folder / "small", progress=False)
    return folder / "small"
