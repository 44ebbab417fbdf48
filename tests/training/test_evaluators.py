"""Evaluators: the numbers of the evaluation functions, on what a model embeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from dualenc.data import ImageViews, PairDataset
from dualenc.data.corpus import held_out
from dualenc.encoders.dual import DualEncoder, Prepare, Tower
from dualenc.errors import BadSample, DualencError
from dualenc.evaluation.metrics import METRICS, score_queries
from dualenc.evaluation.retrieval import retrieve
from dualenc.training.evaluators import (
    RECALLS,
    ImageTextEvaluator,
    KNNEvaluator,
    RetrievalEvaluator,
)
from dualenc.training.index_evaluator import IndexEvaluator
from tests.helpers.fakes import TinyEncoder, tiny_pairs
from tests.helpers.make import write_beir
from tests.helpers.runs import train


class MeanColour(Prepare):
    modality = "image"

    def __call__(self, items, seeds=None):
        return {
            "rows": torch.tensor(
                np.stack([np.asarray(item).mean(axis=(0, 1)) / 255 for item in items])
            ).float()
        }


class ColourNames(Prepare):
    modality = "text"

    def __call__(self, items, seeds=None):
        return {"rows": torch.tensor([[float(part) for part in item.split()] for item in items])}


class ColourTower(Tower):
    """The colour of an image, or of its name, as its vector, and twice the colour as its
    features."""

    def __init__(self, prepare):
        super().__init__()
        self.dim, self.feature_dim, self.prepare, self.modality = 3, 3, prepare, prepare.modality
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return torch.nn.functional.normalize(inputs["rows"] * self.scale, dim=-1)

    def features(self, inputs):
        return 2 * inputs["rows"]


def captioning():
    return DualEncoder(ColourTower(MeanColour()), ColourTower(ColourNames()), kind="image-text")


def unimodal():
    tower = ColourTower(MeanColour())
    return DualEncoder(tower, tower, kind="image")


def colours(count, seed=0):
    return np.random.default_rng(seed).integers(20, 255, size=(count, 3)).astype(np.uint8)


def images(values):
    return [Image.fromarray(np.broadcast_to(value, (4, 4, 3)).copy()) for value in values]


@pytest.fixture
def model():
    return TinyEncoder(dtype=torch.float32)


def test_held_out_pairs_are_a_retrieval_test(model):
    """Two queries share each of the first documents; rows of a score matrix give the ranks by
    hand."""
    pairs = tiny_pairs(12, right_id=np.arange(12) // 2)
    evaluator = RetrievalEvaluator(pairs=pairs)
    metrics = evaluator(model)
    with torch.no_grad():
        left = model("left", model.left.prepare(list(pairs.left_items)))
        right = model("right", model.right.prepare([pairs.item("right", i) for i in range(12)]))
    order = (-(left @ right.T)).argsort(dim=1)
    ranks = (order == torch.from_numpy(pairs.right_id)[:, None]).nonzero()[:, 1] + 1
    found = (ranks <= 10).float()
    assert metrics["mrr@10"] == pytest.approx((found / ranks).mean().item())
    assert metrics["ndcg@10"] == pytest.approx((found / torch.log2(1.0 + ranks)).mean().item())
    assert metrics["recall@100"] == 1


def test_held_out_pairs_are_searched_among_all_right_items_of_their_data():
    """Trained right items are distractors; of two queries the second is held out, and so is its
    other positive."""
    pairs = PairDataset(["q0", "q1"], ["d0", "d1", "d2", "unused"], [0, 1, 1], [0, 1, 2])
    rest, part = pairs.split(0.5, seed=0)
    collection = held_out(part)
    other = int(rest.left_id[0])
    relevant = {"right-0"} if other else {"right-1", "right-2"}
    assert list(collection.corpus.items) == ["d0", "d1", "d2", "unused"]
    assert {name: set(own) for name, own in collection.qrels.items()} == {
        f"left-{1 - other}": relevant
    }
    assert "among 4 documents" in RetrievalEvaluator(pairs=part).data[0]


@pytest.mark.parametrize("most", [1, 2, 5, 40])
def test_a_sample_of_a_large_corpus_has_what_is_relevant(most):
    pairs = tiny_pairs(40).take(np.array([3, 5]))
    corpus = held_out(pairs, most).corpus
    assert {"right-3", "right-5"} <= set(corpus.ids)
    assert len(corpus) == max(2, most)
    assert corpus.ids == held_out(pairs, most).corpus.ids
    numbers = [int(name.removeprefix("right-")) for name in corpus.ids]
    expected = [pairs.item("right", number) for number in numbers]
    np.testing.assert_array_equal(np.stack(list(corpus.items)), np.stack(expected))


def test_positives_of_other_pairs_are_relevant_too():
    """A part of pairs that knows more positives than it has, as after mining, counts none of them
    as wrong."""
    pairs = PairDataset(["q"], ["d0", "d1", "d2"], [0, 0], [0, 1])
    part = pairs.take(np.array([0]), positives_of=pairs)
    assert held_out(part).qrels == {"left-0": {"right-0": 1, "right-1": 1}}


def test_the_copy_of_a_query_among_the_documents_is_no_result():
    """Of questions that are equal to others each text is a query and a document, and nearest to
    itself."""
    pairs = PairDataset(["a", "b", "c"], ["b", "c", "a"], [0, 1, 2], [0, 1, 2])
    collection = held_out(pairs)
    assert collection.qrels == {
        "left-0": {"left-1": 1},
        "left-1": {"left-2": 1},
        "left-2": {"left-0": 1},
    }
    vectors = np.eye(3, 4) + 0.1
    run = retrieve(
        collection.queries.ids,
        vectors,
        collection.corpus.ids,
        vectors[[1, 2, 0]],
        qrels=collection.qrels,
    )
    assert not any(query in documents for query, documents in run.items())
    alone = PairDataset(["a"], ["a", "b"], [0], [0])
    assert held_out(alone).qrels == {"left-0": {"left-0": 1}}, "what is relevant stays"


def test_pairs_of_weight_0_are_not_relevant():
    """Of pairs that people judged those without a match are no right answers; their documents are
    distractors."""
    pairs = PairDataset(["q0", "q1"], ["d0", "d1", "d2"], [0, 0, 1], [0, 1, 2], weights=[1, 0, 0])
    collection = held_out(pairs.take(np.array([0, 1, 2]), positives_of=pairs))
    assert collection.qrels == {"left-0": {"right-0": 1}}
    assert list(collection.corpus.items) == ["d0", "d1", "d2"]
    assert len(ImageTextEvaluator(pairs).texts) == 1
    with pytest.raises(DualencError, match="every weight is 0"):
        RetrievalEvaluator(pairs=pairs.take(np.array([1, 2])))


def beir(folder, documents, queries, qrels):
    """Texts of numbers; the judgements are of the split "dev"."""
    draw = np.random.default_rng(0)
    records = []
    for ids in (documents, queries):
        texts = [" ".join(f"{x:.3f}" for x in row) for row in draw.normal(size=(len(ids), 6))]
        records.append([{"_id": name, "text": text} for name, text in zip(ids, texts)])
    return write_beir(folder, *records, {"dev": qrels})


def test_a_judged_document_with_the_id_of_its_query_is_found(model, tmp_path, caplog):
    """Of three queries the first two are judged with the document of their id, the second with junk
    alone."""
    ids = ["0", "1", "2"]
    folder = beir(tmp_path / "toy", ids, ids, [("0", "0", 1), ("1", "1", -2), ("2", "1", 1)])
    evaluator = RetrievalEvaluator(folder, split="dev")
    assert "3 of 3 queries have the id of a document: 2 of these" in caplog.text
    assert evaluator.data == ("toy", "dev")
    metrics = evaluator(model)
    assert metrics["recall@100"] == pytest.approx(2 / 3)
    corpus, queries = evaluator.collection.corpus, evaluator.collection.queries
    with torch.no_grad():
        left = model("left", model.left.prepare([str(item) for item in queries.items]))
        right = model("right", model.right.prepare([str(item) for item in corpus.items]))
    first, _, last = (-(left @ right.T)).argsort(dim=1).tolist()
    last.remove(2)
    reciprocal_ranks = [1 / (1 + first.index(0)), 0, 1 / (1 + last.index(1))]
    assert metrics["mrr@10"] == pytest.approx(np.mean(reciprocal_ranks))


def test_what_cannot_be_measured_is_refused():
    views = ImageViews(images(colours(3)))
    for make, message in (
        (lambda: RetrievalEvaluator(), "give either path"),
        (lambda: RetrievalEvaluator("x", pairs=tiny_pairs()), "give either path"),
        (lambda: KNNEvaluator(views, views), "the train images are unlabeled"),
    ):
        with pytest.raises(DualencError, match=message):
            make()


def test_captions_of_an_image_are_all_right():
    values = colours(5)
    captions = [" ".join(map(str, value)) for value in values for _ in range(2)]
    left_id = np.repeat(np.arange(5), 2)
    model = captioning()
    evaluator = ImageTextEvaluator(
        PairDataset(images(values), captions, left_id, left_modality="image")
    )
    metrics = evaluator(model)
    assert metrics["image_to_text_recall@1"] == 1
    assert metrics["text_to_image_recall@1"] == 1
    wrong = PairDataset(images(values), captions[::-1], left_id, left_modality="image")
    assert ImageTextEvaluator(wrong)(model)["text_to_image_recall@1"] < 1
    # A caption of two images, nearest to neither, is two queries, as in `dualenc evaluate
    # image-text`.
    texts = [captions[2], captions[6], captions[3]]
    shared = PairDataset(images(values), texts, [0, 2, 3, 1], [0, 0, 1, 2], left_modality="image")
    assert ImageTextEvaluator(shared)(model)["text_to_image_recall@1"] == 1 / 2


def test_neighbours_vote_for_classes_by_name():
    """Held-out images that lack a class have other numbers for the rest."""
    values = np.repeat(255 * np.eye(3, dtype=np.uint8), 4, axis=0)
    train = ImageViews(images(values), values.argmax(axis=1), ["blue", "green", "red"])
    test = ImageViews(images(values[4:]), values[4:].argmax(axis=1) - 1, ["green", "red"])
    assert KNNEvaluator(train, test, k=3)(unimodal())["knn_accuracy"] == 1


def test_neighbours_vote_on_features_as_in_scikit_learn():
    sides = []
    for seed, count in ((0, 60), (1, 30)):
        values = colours(count, seed)
        sides.append((values, ImageViews(images(values), values.argmax(axis=1), ["r", "g", "b"])))
    model = unimodal()
    found = KNNEvaluator(sides[0][1], sides[1][1], k=5)(model)["knn_accuracy"]
    train, test = (v / np.linalg.norm(v, axis=1, keepdims=True) for v, _ in sides)
    vote = KNeighborsClassifier(
        5, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07)
    )
    reference = vote.fit(train, sides[0][1].labels)
    assert found == pytest.approx(reference.score(test, sides[1][1].labels), abs=1e-9)


class Unreadable(list):
    """Items of which the first cannot be read."""

    def __getitem__(self, index):
        if index == 0:
            raise BadSample("row 0: not readable")
        return super().__getitem__(index)


def test_an_image_or_a_caption_that_cannot_be_read_is_left_out_and_counted_once(caplog):
    """Of three images the first is broken, and so is one caption of the second: all others are
    found."""
    values = colours(3)
    captions = [" ".join(map(str, value)) for value in values for _ in range(2)]
    pairs = PairDataset(
        Unreadable(images(values)), captions, np.repeat(np.arange(3), 2), left_modality="image"
    )
    pairs.right_items = Unreadable([captions[2], *captions])
    pairs.right_id = np.array([1, 2, 0, 4, 5, 6])
    evaluator = ImageTextEvaluator(pairs)
    for _ in range(2):
        assert evaluator(captioning())["mean_recall"] == 1
    line = (
        "held-out images: skipped 1 bad samples: "
        "1 image that cannot be read (first: row 0: not readable)"
    )
    assert caplog.text.count(line) == 1
    with pytest.raises(DualencError, match="none of 1 items could be used"):
        ImageTextEvaluator(pairs.take(np.array([0])))(captioning())


def test_images_that_cannot_be_read_neither_vote_nor_count():
    values = colours(20)
    broken = ImageViews(Unreadable(images(values)), values.argmax(axis=1), ["r", "g", "b"])
    rest = ImageViews(images(values[1:]), values[1:].argmax(axis=1), ["r", "g", "b"])
    assert KNNEvaluator(broken, broken, k=3)(unimodal()) == KNNEvaluator(rest, rest, k=3)(
        unimodal()
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ndcg", "recall", "mrr", "map", "precision", "hit"])
def test_each_metric_can_decide(model, kind):
    for k in (1, 3, 5, 10, 100):
        assert f"{kind}@{k}" in RetrievalEvaluator(pairs=tiny_pairs(), primary=f"{kind}@{k}")(model)


@pytest.mark.slow
def test_bars_tell_what_is_measured_where_the_trainer_shows_its_own(tmp_path, capsys):
    evaluator = RetrievalEvaluator(pairs=tiny_pairs(12))
    train(tmp_path / "shown", evaluator=evaluator, evaluate_every=6, progress=True)
    shown = capsys.readouterr().err
    for moment in ("before training", "step 6", "step 12"):
        assert f"{moment}: documents:   0%" in shown
    train(tmp_path / "silent", evaluator=evaluator, progress=False)
    assert "documents" not in capsys.readouterr().err


REFUSED = [
    (
        lambda: RetrievalEvaluator("nowhere", primary="foo"),
        "primary is 'foo'; choose one of ndcg@1",
    ),
    (lambda: RetrievalEvaluator("nowhere", primary="ndcg"), r"'ndcg' \(did you mean ndcg@"),
    (lambda: RetrievalEvaluator("nowhere", batch_size=0), "batch_size is 0; give at least 1"),
    (lambda: ImageTextEvaluator(None, primary="recall@1"), "Evaluator: primary is 'recall@1'"),
    (lambda: ImageTextEvaluator(None, batch_size=-1), "batch_size is -1"),
    (lambda: KNNEvaluator(None, None, k=0), "KNNEvaluator: k is 0; give at least 1"),
    (lambda: KNNEvaluator(None, None, k=2.5), "KNNEvaluator: k is 2.5"),
    (lambda: KNNEvaluator(None, None, temperature=0), "KNNEvaluator: temperature is 0; it must be"),
    (lambda: KNNEvaluator(None, None, batch_size="8"), "KNNEvaluator: batch_size is '8'"),
    (lambda: IndexEvaluator(None, {}, None, primary="map"), "IndexEvaluator: primary is 'map'"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_settings_are_refused_before_anything_is_read(make, message):
    """An evaluation embeds all documents, which may take hours."""
    with pytest.raises(DualencError, match=message):
        make()


def test_more_neighbours_than_images_are_refused_at_once():
    values = colours(4)
    few = ImageViews(images(values), values.argmax(axis=1), ["r", "g", "b"])
    with pytest.raises(
        DualencError, match="k is 20, but only 4 training images vote; choose k from 1"
    ):
        KNNEvaluator(few, few)


def test_the_names_of_metrics_are_those_that_evaluations_return(model):
    pairs = tiny_pairs(8)
    qrels = RetrievalEvaluator(pairs=pairs).collection.qrels
    found = score_queries(qrels, {query: {} for query in qrels})
    assert set(METRICS) == set(next(iter(found.values())))
    assert RECALLS[-1] == "mean_recall"
