"""Zero-shot classification by hand, against scikit-learn, and what templates and labels may get
wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, top_k_accuracy_score

from dualenc.errors import DualencError
from dualenc.evaluation.metrics import best_positive_ranks
from dualenc.evaluation.zero_shot import (
    TEMPLATES,
    class_embeddings,
    class_prompts,
    read_templates,
    readable_class,
    zero_shot_accuracy,
)


def test_by_hand() -> None:
    """Three classes on the axes; the third image is nearest to class 0, its own class 2 comes
    last."""
    images = np.array(
        [[0.9, 0.1, 0.0], [0.2, 0.9, 0.1], [0.8, 0.5, 0.1], [0.1, 0.5, 0.8]], np.float32
    )
    labels = np.array([0, 1, 2, 2])
    ranks = best_positive_ranks(images, np.eye(3, dtype=np.float32), labels[:, None].tolist())
    assert ranks.tolist() == [1, 1, 3, 1]
    scores = zero_shot_accuracy(ranks, labels, 3, (1, 2, 5))
    assert scores == {
        "top@1": 0.75,
        "top@2": 0.75,
        "mean_per_class": pytest.approx((1 + 1 + 0.5) / 3),
    }


def test_equals_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    images, classes = generator.standard_normal((200, 8)), generator.standard_normal((10, 8))
    labels = generator.integers(0, 10, 200)
    ranks = best_positive_ranks(images, classes, labels[:, None].tolist())
    scores = zero_shot_accuracy(ranks, labels, 10)
    similarity = images @ classes.T
    for k in (1, 5):
        assert scores[f"top@{k}"] == pytest.approx(top_k_accuracy_score(labels, similarity, k=k))
    assert scores["mean_per_class"] == pytest.approx(
        balanced_accuracy_score(labels, similarity.argmax(1))
    )


def test_an_ensemble_is_the_unit_mean_of_unit_prompts() -> None:
    prompts = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0], [3.0, 0.0]], np.float32)
    assert class_embeddings(prompts, 2) == pytest.approx(np.array([[0.5**0.5, 0.5**0.5], [1, 0]]))


def test_prompts_are_grouped_by_class() -> None:
    assert class_prompts(["cat", "{dog}"], ["a {}", "the {}"]) == [
        "a cat",
        "the cat",
        "a {dog}",
        "the {dog}",
    ]
    assert all(template.count("{}") == 1 for template in TEMPLATES)
    assert len(set(TEMPLATES)) == len(TEMPLATES)


@pytest.mark.parametrize(
    ("name", "readable"),
    [
        ("n01443537 goldfish", "goldfish"),
        ("n02085620_Chihuahua", "Chihuahua"),
        ("fire_truck", "fire truck"),
        ("n01443537", "n01443537"),
        ("nut", "nut"),
    ],
)
def test_class_names_are_made_readable(name: str, readable: str) -> None:
    assert readable_class(name) == readable


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "does not contain a template"),
        (b"ok {}\nnone\n", ":2: a template needs"),
        (b"{} {}", ":1:"),
        (
            b"ok {}\n\xff {}\n",
            r"prompts\.txt:2: not UTF-8 text \(byte 0xff\); save the file as UTF-8",
        ),
    ],
)
def test_bad_templates(text: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("a photo of {}\n\n  the {} \n")
    assert read_templates(tmp_path / "good.txt") == ["a photo of {}", "the {}"]
    (tmp_path / "prompts.txt").write_bytes(text)
    with pytest.raises(DualencError, match=message):
        read_templates(tmp_path / "prompts.txt")
