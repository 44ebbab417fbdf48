"""Pairs held out of training: the split, and the evaluation that a recipe without an evaluator gets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from dualenc.data import ImageViews, PairDataset
from dualenc.errors import DualencError
from dualenc.recipe import make_recipe
from dualenc.training import Trainer
from tests.training.fakes import TinyEncoder, tiny_objective, tiny_pairs

LEFT_ID = np.repeat(np.arange(60), 2)
RIGHT_ID = np.arange(120) % 40
COLUMNS = {"left_column": "question", "right_column": "answer"}


def pairs() -> PairDataset:
    texts = [f"text {i}" for i in range(60)]
    negatives = [[i % 40, (i + 1) % 40][: i % 3] for i in range(120)]
    scores = np.arange(sum(i % 3 for i in range(120)), dtype=np.float32)
    return PairDataset(
        texts,
        texts[:40],
        LEFT_ID,
        RIGHT_ID,
        negatives=negatives,
        weights=np.arange(120),
        scores=np.arange(120),
        negative_scores=scores,
    )


def test_a_split_keeps_items_ids_and_what_belongs_to_each_pair() -> None:
    whole = pairs()
    rest, share = whole.split(0.25, seed=3)
    assert (len(rest), len(share)) == (90, 30)
    assert not set(rest.left_id) & set(share.left_id), "all pairs of a left item are in one part"
    assert (rest.num_left, rest.num_right) == (60, 40)
    found = sorted([*rest, *share], key=lambda pair: pair.weight)
    expected = sorted(whole, key=lambda pair: pair.weight)
    assert [pair._replace(index=0) for pair in found] == [pair._replace(index=0) for pair in expected]
    again, _ = whole.split(0.25, seed=3)
    np.testing.assert_array_equal(rest.left_id, again.left_id)
    assert not np.array_equal(rest.left_id, whole.split(0.25, seed=4)[0].left_id)
    np.testing.assert_array_equal(share.positives("left", share.left_id[:1]), [RIGHT_ID[share.left_id[0] == LEFT_ID]])
    for wrong in (0.0, 1.0, 0.999):
        with pytest.raises(DualencError, match="between 0 and 1"):
            whole.split(wrong)


@pytest.mark.slow
def test_a_run_without_an_evaluator_ends_with_a_number(tmp_path: Path) -> None:
    result = Trainer(output=str(tmp_path), held_out=0.25, batch_size=4, epochs=2, progress=False).fit(
        TinyEncoder(), tiny_pairs(), tiny_objective(tiny_pairs())
    )
    assert 0 < result.metrics["ndcg@10"] <= 1
    assert result.before


@pytest.mark.slow
@pytest.mark.parametrize(("count", "held_out"), [(120, True), (99, False)])
def test_a_recipe_holds_a_tenth_out(tmp_path: Path, count: int, held_out: bool) -> None:
    rows = [json.dumps({"question": f"what is {i}", "answer": f"it is {i}"}) for i in range(count)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows) + "\n")
    config = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    tokenizer = tmp_path / "tokenizer"
    from dualenc.encoders import train_tokenizer

    train_tokenizer(rows, 300).save_pretrained(tokenizer)
    settings = {
        "model": {
            "class_path": "TextEncoder",
            "init_args": {"config": {"model_type": "bert", **config}, "tokenizer": str(tokenizer)},
        },
        "data": {"class_path": "TablePairs", "init_args": {"path": str(tmp_path / "pairs.jsonl"), **COLUMNS}},
        "objective": {"class_path": "SogCLR"},
        "trainer": {"output": str(tmp_path / "run"), "batch_size": 30, "epochs": 1, "progress": False},
    }
    result = make_recipe(settings, "recipe").train()
    assert ("ndcg@10" in result.metrics) == held_out
    assert result.steps == 3


def test_what_cannot_be_split_is_named() -> None:
    views = ImageViews([None] * 200)
    with pytest.raises(DualencError, match="views of images"):
        Trainer(output="x", held_out=0.1)._hold_out(views, None, is_recipe=False)
    assert Trainer(output="x")._hold_out(views, None, is_recipe=True) == (views, None)
    with pytest.raises(DualencError, match="held_out is 1"):
        Trainer(output="x", held_out=1)
