"""Evaluators: the numbers of the evaluation functions, on what a model embeds."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.neighbors import KNeighborsClassifier

from dualenc.data import ImageViews, PairDataset
from dualenc.data.labels import Labels
from dualenc.encoders.dual import DualEncoder, Prepare, Tower
from dualenc.errors import DualencError
from dualenc.training.evaluators import ImageTextEvaluator, KNNEvaluator, RetrievalEvaluator
from tests.training.fakes import TinyEncoder, tiny_pairs
from tests.training.runs import train


class MeanColour(Prepare):
    modality = "image"

    def __call__(self, items, seeds=None):
        return {"rows": torch.tensor(np.stack([np.asarray(item).mean(axis=(0, 1)) / 255 for item in items])).float()}


class ColourTower(Tower):
    """The colour of an image as its vector, and twice the colour as its features."""

    modality = "image"

    def __init__(self):
        super().__init__()
        self.dim, self.feature_dim, self.prepare = 3, 3, MeanColour()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, inputs):
        return torch.nn.functional.normalize(inputs["rows"] * self.scale, dim=-1)

    def features(self, inputs):
        return 2 * inputs["rows"]


class ColourNames(Prepare):
    modality = "text"

    def __call__(self, items, seeds=None):
        return {"rows": torch.tensor([[float(part) for part in item.split()] for item in items])}


class NameTower(ColourTower):
    modality = "text"

    def __init__(self):
        super().__init__()
        self.prepare = ColourNames()


def colours(count, seed=0):
    return np.random.default_rng(seed).integers(20, 255, size=(count, 3)).astype(np.uint8)


def images(values):
    return [Image.fromarray(np.broadcast_to(value, (4, 4, 3)).copy()) for value in values]


@pytest.fixture
def model():
    return TinyEncoder(dtype=torch.float32)


def test_held_out_pairs_are_a_retrieval_test(model):
    """Two queries share each document; rows of a score matrix give the ranks by hand."""
    pairs = tiny_pairs(12, right_id=np.arange(12) // 2)
    evaluator = RetrievalEvaluator(pairs=pairs)
    metrics = evaluator(model)
    with torch.no_grad():
        left = model("left", model.left.prepare(list(pairs.left_items)))
        right = model("right", model.right.prepare([pairs.item("right", i) for i in range(6)]))
    order = (-(left @ right.T)).argsort(dim=1)
    ranks = (order == torch.from_numpy(pairs.right_id)[:, None]).nonzero()[:, 1] + 1
    assert metrics["mrr@10"] == pytest.approx((1 / ranks).mean().item())
    assert metrics["ndcg@10"] == pytest.approx((1 / torch.log2(1.0 + ranks)).mean().item())
    assert metrics["recall@100"] == 1
    seen = evaluator.query_scores
    assert seen.metric == "ndcg@10"
    scores = [seen.scores[f"left-{i}"] for i in range(12)]
    assert scores == pytest.approx((1 / torch.log2(1.0 + ranks)).where(ranks <= 10, 0).tolist())
    assert seen.texts == {f"left-{i}": pairs.left_items[i] for i in range(12)}


def test_a_beir_folder_and_its_first_queries(model, tmp_path):
    (tmp_path / "qrels").mkdir()
    rows = [" ".join(f"{x:.3f}" for x in row) for row in np.random.default_rng(0).normal(size=(6, 6))]
    for name in ("corpus", "queries"):
        lines = [json.dumps({"_id": f"{name}{i}", "text": row}) for i, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    lines = ["query-id\tcorpus-id\tscore", *(f"queries{i}\tcorpus{i}\t1" for i in range(6))]
    (tmp_path / "qrels" / "dev.tsv").write_text("\n".join(lines))
    evaluator = RetrievalEvaluator(tmp_path, split="dev", max_queries=2, primary="hit@1")
    assert list(evaluator.collections[tmp_path.name].qrels) == ["queries0", "queries1"]
    assert evaluator.data == (f"{tmp_path.name} (first 2 queries)", "dev")
    assert {"ndcg@10", "hit@1"} < evaluator(model).keys()


@pytest.mark.parametrize("keep", [False, True])
def test_a_judged_document_with_the_id_of_its_query_is_found(model, tmp_path, caplog, keep):
    """Of three queries the first two are judged with the document of their id, the second with junk alone."""
    (tmp_path / "qrels").mkdir()
    rows = [" ".join(f"{x:.3f}" for x in row) for row in np.random.default_rng(0).normal(size=(3, 6))]
    for name in ("corpus", "queries"):
        (tmp_path / f"{name}.jsonl").write_text(
            "\n".join(json.dumps({"_id": str(i), "text": row}) for i, row in enumerate(rows))
        )
    (tmp_path / "qrels" / "dev.tsv").write_text("0\t0\t1\n1\t1\t-2\n2\t1\t1\n")
    evaluator = RetrievalEvaluator(tmp_path, split="dev", keep_self_matches=keep)
    assert (
        "3 of 3 queries have the id of a document: 2 of these documents are judged and kept, the other 1 are"
        in caplog.text
    )
    assert evaluator(model)["recall@100"] == pytest.approx(2 / 3)
    with torch.no_grad():
        left, right = (model(side, model.tower(side).prepare(rows)) for side in ("left", "right"))
    order = (-(left @ right.T)).argsort(dim=1)[2].tolist()
    if not keep:
        order.remove(2)
    assert evaluator.query_scores.scores["2"] == pytest.approx(1 / np.log2(2 + order.index(1)))


def test_a_filter_makes_the_corpus_smaller(model, tmp_path):
    (tmp_path / "qrels").mkdir()
    rows = [" ".join(f"{x:.3f}" for x in row) for row in np.random.default_rng(0).normal(size=(6, 6))]
    queries = [json.dumps({"_id": f"q{i}", "text": row}) for i, row in enumerate(rows)]
    (tmp_path / "queries.jsonl").write_text("\n".join(queries))
    documents = [json.dumps({"_id": f"d{i}", "text": row, "year": 2000 + i}) for i, row in enumerate(rows)]
    (tmp_path / "qrels" / "dev.tsv").write_text("".join(f"q{i}\td{(i + 1) % 6}\t1\n" for i in range(6)))
    measured = []
    for lines, how in ((documents, {"where": ["year>=2001", "year<2005"]}), (documents[1:5], {})):
        (tmp_path / "corpus.jsonl").write_text("\n".join(lines))
        evaluator = RetrievalEvaluator(tmp_path, split="dev", **how)
        measured.append(evaluator(model) if how else evaluator)
        if how:
            assert evaluator.data == (f"{tmp_path.name} where year>=2001 and year<2005", "dev")
            (collection,) = evaluator.collections.values()
            assert collection.queries.ids == ["q0", "q1", "q2", "q3"]
            assert collection.corpus.ids == ["d1", "d2", "d3", "d4"]
    # Of the small corpus the judgements of what is missing would count as never found.
    by_hand = measured[1]
    ((name, collection),) = by_hand.collections.items()
    by_hand.collections[name] = collection._replace(
        queries=collection.queries.take([0, 1, 2, 3]),
        qrels={f"q{i}": {f"d{i + 1}": 1} for i in range(4)},
    )
    assert measured[0] == by_hand(model)
    with pytest.raises(DualencError, match="fields of a BEIR folder"):
        RetrievalEvaluator(pairs=tiny_pairs(), where=["year>2000"])


def write_beir(folder, documents=30, queries=6, seed=0):
    """Each query asks for the document of its number."""
    (folder / "qrels").mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for name, count in (("corpus", documents), ("queries", queries)):
        rows = [" ".join(f"{x:.3f}" for x in row) for row in generator.normal(size=(count, 6))]
        lines = [json.dumps({"_id": f"{name}{i}", "text": row}) for i, row in enumerate(rows)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    (folder / "qrels" / "test.tsv").write_text("".join(f"queries{i}\tcorpus{i}\t1\n" for i in range(queries)))
    return folder


@pytest.mark.slow
def test_of_several_folders_metrics_are_the_mean_and_the_primary_is_told_of_each(model, tmp_path):
    folders = [write_beir(tmp_path / name, queries=n, seed=n) for n, name in ((5, "biology"), (9, "law"))]
    alone = [RetrievalEvaluator(folder, primary="mrr@10") for folder in folders]
    each = [evaluator(model) for evaluator in alone]
    evaluator = RetrievalEvaluator([str(folder) for folder in folders], primary="mrr@10")
    found = evaluator(model)
    assert found == {
        **{name: pytest.approx((each[0][name] + each[1][name]) / 2) for name in each[0]},
        "biology/mrr@10": each[0]["mrr@10"],
        "law/mrr@10": each[1]["mrr@10"],
    }
    assert evaluator.data == ("mean of 2: biology, law", "test")
    seen = evaluator.query_scores
    assert len(seen.scores) == len(seen.texts) == 14
    assert seen.scores["law/queries3"] == alone[1].query_scores.scores["queries3"]


def test_two_folders_of_one_name_and_none_are_refused(tmp_path):
    folders = [write_beir(tmp_path / name / "toy") for name in "ab"]
    with pytest.raises(DualencError, match="two folders are named toy"):
        RetrievalEvaluator(folders)
    with pytest.raises(DualencError, match="path is an empty list"):
        RetrievalEvaluator([])


def test_a_sampled_corpus_holds_all_judged_documents_and_is_the_same_in_every_run(model, tmp_path):
    folder = write_beir(tmp_path / "toy")
    evaluator = RetrievalEvaluator(folder, max_queries=4, max_documents=10)
    assert evaluator.data == ("toy (first 4 queries, a sample of 10 of 30 documents)", "test")
    collection = evaluator.collections["toy"]
    assert {f"corpus{i}" for i in range(4)} <= set(collection.corpus.ids)
    assert len(collection.corpus) == 10
    again = RetrievalEvaluator(folder, max_queries=4, max_documents=10)
    assert again.collections["toy"].corpus.ids == collection.corpus.ids
    # Scores among fewer documents cannot be lower.
    sampled, whole = evaluator(model), RetrievalEvaluator(folder, max_queries=4)(model)
    assert sampled["mrr@10"] >= whole["mrr@10"]
    # Judged documents stay even where they are more than asked for; a limit above the corpus changes nothing.
    assert len(RetrievalEvaluator(folder, max_documents=2).collections["toy"].corpus) == 6
    assert RetrievalEvaluator(folder, max_documents=99).data == ("toy", "test")
    with pytest.raises(DualencError, match="max_documents is 0"):
        RetrievalEvaluator(folder, max_documents=0)


def test_one_source_of_queries_is_needed():
    for arguments in ({}, {"path": "x", "pairs": tiny_pairs()}):
        with pytest.raises(DualencError, match="give either path, a BEIR folder, or held-out pairs"):
            RetrievalEvaluator(**arguments)


def test_captions_of_an_image_are_all_right():
    values = colours(5)
    captions = [" ".join(map(str, value)) for value in values for _ in range(2)]
    pairs = PairDataset(images(values), captions, np.repeat(np.arange(5), 2), np.arange(10), left_modality="image")
    model = DualEncoder(ColourTower(), NameTower(), kind="image-text")
    evaluator = ImageTextEvaluator(pairs)
    metrics = evaluator(model)
    assert metrics["image_to_text_recall@1"] == 1
    assert metrics["text_to_image_recall@1"] == 1
    assert set(evaluator.query_scores.scores.values()) == {1}
    assert evaluator.query_scores.texts == {f"right-{i}": caption for i, caption in enumerate(captions)}
    wrong = PairDataset(
        images(values), captions[::-1], np.repeat(np.arange(5), 2), np.arange(10), left_modality="image"
    )
    assert ImageTextEvaluator(wrong)(model)["text_to_image_recall@1"] < 1


def test_neighbours_vote_on_features_as_in_scikit_learn():
    sides = []
    for seed, count in ((0, 60), (1, 30)):
        values = colours(count, seed)
        sides.append((values, ImageViews(images(values), Labels(values.argmax(axis=1), ["r", "g", "b"]))))
    model = DualEncoder(ColourTower(), ColourTower(), kind="image")
    evaluator = KNNEvaluator(sides[0][1], sides[1][1], k=5, temperature=None)
    found = evaluator(model)["knn_accuracy"]
    (train, _), (test, _) = ((v / np.linalg.norm(v, axis=1, keepdims=True), v.argmax(axis=1)) for v, _ in sides)
    reference = KNeighborsClassifier(5).fit(train, sides[0][1].labels)
    assert found == pytest.approx(reference.score(test, sides[1][1].labels), abs=1e-9)


def test_neighbours_without_a_label_neither_vote_nor_count(caplog):
    values = colours(40)
    classes = values.argmax(axis=1)
    unlabelled = np.concatenate([classes, np.full(10, -1)])
    whole = [ImageViews(images(values), Labels(classes, ["r", "g", "b"]))] * 2
    more = [ImageViews(images(np.concatenate([values, colours(10, 1)])), Labels(unlabelled, ["r", "g", "b"]))] * 2
    model = DualEncoder(ColourTower(), ColourTower(), kind="image")
    assert KNNEvaluator(*more, k=5)(model) == KNNEvaluator(*whole, k=5)(model)
    assert "skipped 10 bad samples: 10 image without a label" in caplog.text


def test_images_without_labels_are_refused():
    views = ImageViews(images(colours(3)))
    with pytest.raises(DualencError, match="KNNEvaluator: train has no labels"):
        KNNEvaluator(views, views)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["retrieval", "image-text", "knn"])
def test_declared_metric_names_are_those_that_an_evaluation_has(kind):
    """A name that is declared can be `primary`, and nothing else can: otherwise good recipes would be refused."""
    if kind == "retrieval":
        model = TinyEncoder(dtype=torch.float32)
        declared = RetrievalEvaluator(pairs=tiny_pairs()).metric_names
        for name in declared:
            assert name in RetrievalEvaluator(pairs=tiny_pairs(), primary=name)(model)
        assert len(declared) == len(set(declared)) >= 20
        return
    rows = colours(12)
    images = [Image.fromarray(np.tile(row, (4, 4, 1))) for row in rows]
    if kind == "image-text":
        names = [" ".join(str(int(value)) for value in row) for row in rows]
        evaluator = ImageTextEvaluator(PairDataset(images, names, left_modality="image"))
        model = DualEncoder(ColourTower(), NameTower(), kind="image-text")
    else:
        views = ImageViews(images, labels=Labels(np.arange(12) % 3, ["r", "g", "b"]))
        evaluator, tower = KNNEvaluator(views, views, k=2), ColourTower()
        model = DualEncoder(tower, tower, kind="image")
    assert set(evaluator.metric_names) == set(evaluator(model))
    assert evaluator.primary in evaluator.metric_names
    assert all(model.tower(side).modality == modality for side, modality in evaluator.modalities.items())


@pytest.mark.slow
def test_bars_tell_what_is_measured_where_the_trainer_shows_its_own(tmp_path, capsys):
    pairs = tiny_pairs(12)
    evaluator = RetrievalEvaluator(pairs=pairs)
    train(tmp_path / "shown", evaluator=evaluator, evaluate_every=6, progress=True)
    shown = capsys.readouterr().err
    for moment in ("before training", "after step 6", "after step 12"):
        assert f"{moment}: embed queries of held-out pairs:   0%" in shown
        assert f"{moment}: embed documents of held-out pairs:   0%" in shown
    # They disappear: the last thing on their line is white space.
    assert "embed" not in shown.split("\n")[-2].split("\r")[-1]
    evaluator(TinyEncoder(dtype=torch.float32))
    train(tmp_path / "silent", evaluator=evaluator, progress=False)
    assert "embed" not in capsys.readouterr().err
