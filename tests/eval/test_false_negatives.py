"""Likely false negatives left out: thresholds are quantiles, and copies beyond them are no
negatives."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from dualenc.objectives import GlobalCache, InfoNCE, SogCLR
from tests.helpers.eval_scripts import load_script

NUM_PAIRS = 40
COMMON = {"num_left": NUM_PAIRS, "num_right": NUM_PAIRS, "temperature": 0.2, "start": 0.0}


def sides() -> tuple[Tensor, Tensor]:
    """(M, D) left and right embeddings; pair 1 is a near copy of pair 0."""
    draw = torch.Generator().manual_seed(0)
    left = torch.randn(NUM_PAIRS, 6, generator=draw)
    right = left + 0.5 * torch.randn(NUM_PAIRS, 6, generator=draw)
    left[1], right[1] = left[0] + 0.01, right[0] + 0.01
    return normalize(left, dim=1), normalize(right, dim=1)


def gradients(objective: Any, ids: Tensor, **positives: Tensor) -> Tensor:
    """(2, B, D) gradients of a step on some pairs, with items outside the batch as they are."""
    embeddings = sides()
    batch = [side[ids].requires_grad_() for side in embeddings]
    by_side = dict(zip(("left", "right"), embeddings, strict=True))
    out = objective(*batch, ids, encode=lambda side, items: by_side[side][items], **positives)
    return torch.stack(torch.autograd.grad(out.loss, batch))


def test_a_threshold_becomes_the_quantile_of_all_similarities() -> None:
    probes = load_script("probes.py")
    objective = probes.FilteredInfoNCE(alpha=0.1, threshold_rate=0.002, **COMMON)
    draw = torch.Generator().manual_seed(0)
    for _ in range(3000):
        gradients(objective, torch.randperm(NUM_PAIRS, generator=draw)[:16])
    left, right = sides()
    similarities = left @ right.T
    others = torch.eye(NUM_PAIRS) == 0
    beyond = torch.cat(
        [
            (s > t[:, None])[others].view(NUM_PAIRS, -1)
            for s, t in (
                (similarities, objective.threshold[:NUM_PAIRS]),
                (similarities.T, objective.threshold[NUM_PAIRS:]),
            )
        ]
    )
    assert beyond.float().mean().item() == pytest.approx(0.1, abs=0.01)
    assert beyond.float().mean(dim=1).max() < 0.2


@pytest.mark.parametrize(
    ("name", "plain"), [("FilteredInfoNCE", InfoNCE), ("FilteredSogCLR", SogCLR)]
)
def test_a_candidate_beyond_the_threshold_is_as_a_known_positive(name: str, plain: type) -> None:
    probes = load_script("probes.py")
    objective = getattr(probes, name)(alpha=0.05, threshold_rate=0.0, **COMMON)
    objective.threshold.fill_(2.0)
    for row in (0, 1, NUM_PAIRS, NUM_PAIRS + 1):
        objective.threshold[row] = 0.6  # of the copies, which are alike by 0.8
    ids = torch.arange(8)
    known = torch.full((8, 1), -1)
    known[0], known[1] = 1, 0
    common = {key: value for key, value in COMMON.items() if key != "start"}
    left, right = sides()
    assert ((left @ right.T)[:2, 2:8] < 0.6).all()
    assert ((right @ left.T)[:2, 2:8] < 0.6).all()
    expected = gradients(plain(**common), ids, left_positives=known, right_positives=known)
    torch.testing.assert_close(gradients(objective, ids), expected)
    assert not torch.allclose(gradients(plain(**common), ids), expected)


def test_the_nearest_remembered_items_are_left_out() -> None:
    probes = load_script("probes.py")
    cache = probes.FilteredGlobalCache(count=1, extra_encodes=0, pool=NUM_PAIRS, **COMMON)
    common = {key: value for key, value in COMMON.items() if key != "start"}
    plain = GlobalCache(extra_encodes=0, pool=NUM_PAIRS, **common)
    for objective in (cache, plain):
        for ids in torch.arange(NUM_PAIRS).split(8):
            gradients(objective, ids)
    left, right = sides()
    similarities = (left @ right.T).fill_diagonal_(-1)
    ids = torch.arange(8)
    nearest = [side[ids].argmax(dim=1, keepdim=True) for side in (similarities, similarities.T)]
    expected = gradients(plain, ids, left_positives=nearest[0], right_positives=nearest[1])
    torch.testing.assert_close(gradients(cache, ids), expected)


def test_before_its_start_all_are_negatives() -> None:
    probes = load_script("probes.py")
    objective = probes.FilteredInfoNCE(alpha=0.5, **{**COMMON, "start": 0.4})
    objective.threshold.fill_(0.0)
    objective.set_progress(0.39)
    ids = torch.arange(8)
    expected = gradients(InfoNCE(temperature=0.2), ids)
    torch.testing.assert_close(gradients(objective, ids), expected)
    assert bool((objective.threshold == 0).all())
    objective.set_progress(0.4)
    assert not torch.allclose(gradients(objective, ids), expected)


def test_copies_are_false_negatives_that_training_may_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_script("small_batch.py")
    tasks = sys.modules["comparison_tasks"]
    monkeypatch.setattr(tasks, "HELD_OUT", 6)
    monkeypatch.setattr(tasks, "COPIED_PAIRS", 20)
    monkeypatch.setattr(
        tasks, "on_features", lambda *parts, learning_rate: parts_as_task(tasks, *parts)
    )
    draw = np.random.default_rng(0)
    (tmp_path / "qrels").mkdir()
    for name in ("corpus", "queries"):
        texts = [
            " ".join(f"{name}{word}" for word in draw.integers(50, size=30)) for _ in range(40)
        ]
        lines = [
            json.dumps({"_id": f"{name[0]}{row}", "text": text}) for row, text in enumerate(texts)
        ]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    for split, rows in (("train", range(30)), ("test", range(30, 40))):
        lines = [f"q{row}\tc{row}\t1" for row in rows]
        (tmp_path / "qrels" / f"{split}.tsv").write_text(
            "\n".join(["query-id\tcorpus-id\tscore", *lines])
        )
    task = tasks.copies(tmp_path, "")
    pairs = task.pairs
    assert (len(pairs), pairs.num_left, pairs.num_right) == (24, 24, 24)
    for row in range(20, 24):
        copy = pairs.right_items[row].split()
        shared = [len(set(copy) & set(text.split())) for text in pairs.right_items[:20]]
        assert max(shared) == len(set(copy))
        assert pairs.positives("left", np.array([row])).tolist() == [[row]]
    copied = {ids for grades in task.test.qrels.values() for ids in grades if ids.endswith("-copy")}
    assert all(
        grades.keys() >= {own.removesuffix("-copy") for own in grades}
        for grades in task.test.qrels.values()
    )
    assert copied
    assert copied <= set(task.test.corpus.ids)
    assert len(task.test.corpus.ids) == 48
    knowing = tasks.copies(tmp_path, "", known=True).pairs
    assert len(knowing) == 24
    both = knowing.positives("left", np.arange(20, 24))
    originals = both[:, 0]
    assert both[:, 1].tolist() == list(range(20, 24))
    assert knowing.positives("left", originals).tolist() == both.tolist()
    assert knowing.positives("right", originals).tolist() == both.tolist()


def parts_as_task(tasks: Any, pairs: Any, validation: Any, test: Any) -> Any:
    """The texts themselves, in place of their features."""
    return tasks.Task(lambda: None, pairs, validation, test, learning_rate=1.0)
