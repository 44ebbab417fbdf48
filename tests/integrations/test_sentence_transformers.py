"""Objectives in the trainer of sentence-transformers: evaluation, checkpoints, two processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, concatenate_datasets

from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.errors import DualencError
from dualenc.integrations import ids
from dualenc.objectives import (
    EMC2,
    ISIR,
    GlobalCache,
    InfoNCE,
    Matryoshka,
    MomentumQueue,
    Objective,
    SogCLR,
)
from tests.helpers.launched import launch
from tests.helpers.pages import ROOT, code

sentence_transformers = pytest.importorskip("sentence_transformers", minversion="6")
from dualenc.integrations.sentence_transformers import (  # noqa: E402
    GlobalLoss,
    GlobalLossTrainer,
    PairTexts,
    _distinct_negatives,
    with_ids,
)

pytestmark = pytest.mark.slow
WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay", "kite", "lynx"]
TAKE_MINED = ("InfoNCE", "SogCLR+", "Matryoshka")


def pairs(count: int = 48, negatives: int = 0) -> Dataset:
    """Texts of five words and the same words in another order; some stand in two pairs."""
    random = np.random.default_rng(0)
    anchors = [" ".join(random.choice(WORDS, 5)) for _ in range(count)]
    anchors[-3:] = anchors[:3]
    positives = [" ".join(reversed(text.split())) for text in anchors]
    columns = {"anchor": anchors, "positive": positives}
    columns |= {f"negative_{n}": positives[n + 1 :] + positives[: n + 1] for n in range(negatives)}
    return Dataset.from_dict(columns)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = {
        **sizes,
        "intermediate_size": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    TextEncoder(
        config=config, tokenizer=train_tokenizer([" ".join(WORDS)] * 9, vocab_size=300)
    ).save(folder)
    return folder


def objective_of(name: str, texts: PairTexts) -> Objective:
    sizes: dict[str, Any] = {
        "num_left": texts.num_left,
        "num_right": texts.num_right,
        "temperature": 0.1,
    }
    if name == "SogCLR+":
        return SogCLR(**sizes, positive_in_softmax=True, learnable_temperature=True)
    if name == "Matryoshka":
        return Matryoshka(GlobalCache(**sizes), dims=[16])
    return {"InfoNCE": InfoNCE, "ISIR": ISIR, "EMC2": EMC2, "GlobalCache": GlobalCache}[name](
        **sizes
    )


def train(
    folder: Path, output: Path, objective: str = "SogCLR+", resume: Any = None, **named: Any
) -> GlobalLossTrainer:
    dataset, texts = with_ids(pairs(negatives=named.pop("negatives", 0)))
    torch.manual_seed(0)
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    settings = {
        "per_device_train_batch_size": 8,
        "num_train_epochs": 3,
        "learning_rate": 1e-3,
        "use_cpu": True,
    }
    settings |= {
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 5,
        "save_strategy": "no",
        **named,
    }
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(str(output), **settings)
    loss = GlobalLoss(model, objective_of(objective, texts), texts)
    trainer = GlobalLossTrainer(
        model, arguments, train_dataset=dataset, eval_dataset=dataset, loss=loss
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: GlobalLossTrainer) -> dict[str, torch.Tensor]:
    model = {
        name: value.clone()
        for name, value in trainer.model.state_dict().items()
        if value.is_floating_point()
    }
    return model | {
        f"objective.{n}": v.clone() for n, v in trainer.loss.objective.state_dict().items()
    }


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(
        float((one[name].double() - other[name].double()).abs().max())
        for name in one
        if one[name].numel()
    )


def test_equal_texts_have_equal_ids() -> None:
    dataset, texts = with_ids(
        Dataset.from_dict({"q": ["a", "b", "a"], "p": ["x", "y", "y"], "n": ["y", "z", "x"]})
    )
    assert dataset["label"] == [[0, 0, 1], [1, 1, 2], [0, 1, 0]]
    assert (texts.num_left, texts.num_right) == (2, 3)
    assert texts("right", torch.tensor([2, 0])) == ["z", "x"]
    assert [counts.tolist() for counts in texts.counts] == [[2, 1], [1, 2, 0]]
    shuffled = pairs(negatives=1).shuffle(seed=1)
    dataset, texts = with_ids(shuffled)
    assert dataset.remove_columns("label")[:] == shuffled[:]
    assert texts("left", torch.tensor([row[0] for row in dataset["label"]])) == shuffled["anchor"]


def test_weight_decay_leaves_the_temperature_alone(model_folder: Path, tmp_path: Path) -> None:
    trainer = train(
        model_folder,
        tmp_path,
        max_steps=1,
        weight_decay=0.1,
        learning_rate_mapping={"temperature": 0.5},
    )
    tau = trainer.loss.objective.log_temperature
    trainer.create_optimizer()
    for groups in (trainer.optimizer.param_groups, trainer.create_optimizer().param_groups):
        found = [
            (g["weight_decay"], g["initial_lr"]) for g in groups for p in g["params"] if p is tau
        ]
        assert found == [(0.0, 0.5)]


@pytest.mark.parametrize(
    "objective", ["SogCLR+", "GlobalCache", pytest.param("EMC2", marks=pytest.mark.nightly)]
)
def test_training_lowers_the_loss_of_evaluation(
    model_folder: Path, tmp_path: Path, objective: str
) -> None:
    before = train(model_folder, tmp_path, objective, num_train_epochs=0).evaluate()["eval_loss"]
    trainer = train(
        model_folder,
        tmp_path,
        objective,
        num_train_epochs=6,
        negatives=int(objective in TAKE_MINED),
    )
    state = weights(trainer)
    assert trainer.evaluate()["eval_loss"] < before - 0.2
    assert difference(weights(trainer), state) == 0, "evaluation writes no state"


def test_positives_of_other_rows_and_copies_are_no_negatives(model_folder: Path) -> None:
    rows = {
        "anchor": ["fever", "fever", "heart"],
        "positive": ["one drug", "two drugs", "two drugs"],
    }
    dataset, texts = with_ids(Dataset.from_dict(rows))
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu").train()
    loss = GlobalLoss(model, InfoNCE(temperature=0.05), texts)
    batch = dataset.select([0, 2])  # in which "two drugs" is the positive of "heart" alone
    features = [model.preprocess(batch[name]) for name in ("anchor", "positive")]
    found = loss(features, torch.tensor(batch["label"]))
    left, right = (
        torch.nn.functional.normalize(model(each)["sentence_embedding"], dim=1) for each in features
    )
    scores = left.double() @ right.double().T / 0.05
    # "fever" has no negative, and "heart" is none of "two drugs".
    expected = (scores[1].logsumexp(dim=0) - scores[1, 1]) + (
        scores[:, 0].logsumexp(dim=0) - scores[0, 0]
    )
    assert found.item() == pytest.approx(expected.item() / 4, rel=1e-4)
    _, symmetric = with_ids(Dataset.from_dict({"q": ["a", "b", "c"], "p": ["b", "c", "a"]}))
    assert symmetric.not_negatives("left", torch.tensor([0])).tolist() == [[0, 2]]
    assert symmetric.not_negatives("right", torch.tensor([0])).tolist() == [[0, 1]]
    assert [counts.tolist() for counts in symmetric.counts] == [[1, 1, 1], [1, 1, 1]]


def test_ids_of_another_call_are_refused(model_folder: Path, tmp_path: Path) -> None:
    one, texts = with_ids(pairs())
    other, _ = with_ids(Dataset.from_dict({"anchor": ["x", "y"], "positive": ["z", "w"]}))
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[]
    )
    with pytest.raises(
        DualencError, match="other ids than the texts of the loss; concatenate data sets"
    ):
        loss = GlobalLoss(model, InfoNCE(), texts)
        GlobalLossTrainer(model, arguments, train_dataset={"one": one, "other": other}, loss=loss)
    GlobalLossTrainer(
        model, arguments, train_dataset={"one": one, "more": one.select([3, 5])}, loss=loss
    )
    GlobalLossTrainer(model, arguments, train_dataset=one.shuffle(seed=1), loss=loss)
    # Both calls number from 0, and the first and the last row are of the first call.
    second, _ = with_ids(pairs().select(range(20, 40)))
    mixed = concatenate_datasets([one.select(range(9)), second, one.select(range(9, 48))])
    unlabeled = one.remove_columns("label")
    others = [mixed, mixed.shuffle(seed=3), unlabeled, unlabeled.add_column("label", range(48))]
    others.append(unlabeled.add_column("label", [[0.0, 0.0]] * 48))
    others.append(one.map(lambda row: {"label": [-1, *row["label"][1:]]}))
    others.append(one.map(lambda row: {"anchor": None}))
    others.append(one.map(lambda row: {"label": [*row["label"], 0]}))
    for dataset in others:
        with pytest.raises(DualencError, match="the training data have other ids"):
            GlobalLossTrainer(model, arguments, train_dataset=dataset, loss=loss)


def test_a_single_foreign_row_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a data set that is read in blocks, shuffled, or selected from."""
    monkeypatch.setattr(ids, "ROWS_PER_BLOCK", 7)
    one, texts = with_ids(pairs(negatives=1))
    assert texts.are_named_by(one)
    assert texts.are_named_by(one.shuffle(seed=0))
    labels = one["label"][:]
    for row in range(48):
        for column in range(3):
            changed = [list(label) for label in labels]
            changed[row][column] = (changed[row][column] + 1) % 45
            foreign = one.remove_columns("label").add_column("label", changed)
            assert not texts.are_named_by(foreign), (row, column)
    assert not texts.are_named_by(foreign.shuffle(seed=1))
    assert texts.are_named_by(foreign.select(range(47)))


@pytest.mark.parametrize("wrap", ["MatryoshkaLoss", "AdaptiveLayerLoss"])
def test_losses_of_several_lengths_or_layers_around_a_memory_are_refused(
    wrap: str, model_folder: Path, tmp_path: Path
) -> None:
    from sentence_transformers.sentence_transformer import losses

    dataset, texts = with_ids(pairs())
    settings = {"use_cpu": True, "report_to": [], "max_steps": 1, "save_strategy": "no"}
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path), **settings
    )
    further = {"matryoshka_dims": [32, 8]} if wrap == "MatryoshkaLoss" else {}
    for name in ("SogCLR+", "ISIR", "InfoNCE"):
        model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
        inner = GlobalLoss(model, objective_of(name, texts), texts)
        loss = getattr(losses, wrap)(model, inner, **further)
        data = {"train_dataset": dataset, "loss": loss}
        trainer = sentence_transformers.SentenceTransformerTrainer(model, arguments, **data)
        if name == "InfoNCE":
            trainer.train()
        else:
            with pytest.raises(
                DualencError, match=r"keeps one memory, and Matryoshka.*Matryoshka\("
            ):
                trainer.train()


def test_prompts_that_only_the_trainer_knows_are_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    dataset, texts = with_ids(pairs())
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
    objective = GlobalCache(num_left=texts.num_left, num_right=texts.num_right)
    prompts = {"anchor": "query: "}
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], prompts=prompts
    )
    with pytest.raises(DualencError, match=r"texts of a batch only; .* to GlobalLoss\(prompts=…\)"):
        GlobalLossTrainer(
            model, arguments, train_dataset=dataset, loss=GlobalLoss(model, objective, texts)
        )
    for loss in (
        GlobalLoss(model, objective, texts, prompts=("query: ", None)),
        GlobalLoss(model, InfoNCE(), texts),
    ):
        GlobalLossTrainer(model, arguments, train_dataset=dataset, loss=loss)


def test_the_loss_and_its_gradient_are_those_of_the_objective(model_folder: Path) -> None:
    dataset, texts = with_ids(pairs(negatives=2))
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
    columns = [dataset[name][:8] for name in ("anchor", "positive", "negative_0", "negative_1")]
    ids = torch.tensor(dataset["label"][:8])
    model.train()
    GlobalLoss(model, InfoNCE(), texts)(
        [model.preprocess(column) for column in columns], ids
    ).backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    left, right, *negatives = (
        torch.nn.functional.normalize(model(model.preprocess(column))["sentence_embedding"], dim=1)
        for column in columns
    )
    mined = {"negatives": torch.cat(negatives), "negative_id": torch.cat([ids[:, 2], ids[:, 3]])}
    InfoNCE()(left, right, ids[:, 0], ids[:, 1], **mined).loss.backward()
    assert found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("objective", ["SogCLR+", "GlobalCache"])
def test_resumes_bit_for_bit(model_folder: Path, tmp_path: Path, objective: str) -> None:
    whole = weights(train(model_folder, tmp_path / "whole", objective, max_steps=12))
    saved = {"save_strategy": "steps", "save_steps": 5, "max_steps": 12}
    train(model_folder, tmp_path / "run", objective, **saved)
    again = train(
        model_folder,
        tmp_path / "run",
        objective,
        resume=str(tmp_path / "run" / "checkpoint-5"),
        **saved,
    )
    assert difference(whole, weights(again)) == 0


def test_a_checkpoint_without_the_losss_state_is_refused(
    model_folder: Path, tmp_path: Path
) -> None:
    saved = {"save_strategy": "steps", "save_steps": 5, "max_steps": 5}
    train(model_folder, tmp_path, **saved)
    with pytest.raises(DualencError, match=r"of another objective"):
        train(model_folder, tmp_path, "GlobalCache", resume=True, **saved)
    (tmp_path / "checkpoint-5" / "objective.pt").unlink()
    with pytest.raises(DualencError, match=r"objective\.pt: missing"):
        train(model_folder, tmp_path, resume=True, **saved)


def run_rank(output: Path, folder: str, batch_size: int, objective: str) -> None:
    named = {"per_device_train_batch_size": batch_size, "max_steps": 6, "optim": "sgd"}
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        named["ddp_backend"] = "gloo"
    trainer = train(Path(folder), output, objective, **named)
    state = weights(trainer)
    if trainer.is_world_process_zero():
        torch.save(state, output / "weights.pt")


def test_two_processes_equal_one(model_folder: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        output.mkdir()
        for process in launch(
            output, run_rank, output, str(model_folder), 8 // ranks, "ISIR", ranks=ranks
        ):
            code, text = process.end(300)
            assert code == 0, text
    one, two = (torch.load(tmp_path / str(ranks) / "weights.pt") for ranks in (1, 2))
    assert difference(one, two) < 1e-5


def test_a_repeated_negative_counts_once() -> None:
    negatives = [torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [3.0]])]
    mined = _distinct_negatives(negatives, torch.tensor([[5, 6], [5, 7]]))
    assert mined["negatives"].flatten().tolist() == [1, 2, 3]
    assert mined["negative_id"].tolist() == [5, 6, 7]


def test_a_loss_that_does_not_fit_the_texts_is_refused(model_folder: Path) -> None:
    _, texts = with_ids(pairs())
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu").train()
    for objective, own_texts, message in (
        (
            ISIR(num_left=texts.num_left, num_right=texts.num_right),
            None,
            "pass the texts that with_ids returned",
        ),
        (SogCLR(num_left=48), texts, "give num_left=45, num_right=45"),
        (MomentumQueue(), texts, "MomentumQueue needs a momentum encoder"),
    ):
        with pytest.raises(DualencError, match=message):
            GlobalLoss(model, objective, own_texts)
    with pytest.raises(DualencError, match="train on the data set that with_ids returned"):
        GlobalLoss(model, InfoNCE(), texts)([model.preprocess(["a"])] * 2, torch.tensor([1]))


def test_a_loss_for_each_data_set_is_refused(model_folder: Path, tmp_path: Path) -> None:
    dataset, texts = with_ids(pairs())
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
    losses = {"one": GlobalLoss(model, InfoNCE(), texts)}
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[]
    )
    trainer = GlobalLossTrainer(model, arguments, train_dataset={"one": dataset}, loss=losses)
    with pytest.raises(DualencError, match="one for all data"):
        trainer.train()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"text": ["a"], "year": [1]}, "column year holds int64"),
        ({"q": ["a", "b"], "p": ["x", None]}, "column p has 1 rows without a text"),
        ({"q": ["a"], "p": ["x"], "label": [0]}, "without a label"),
        ({"q": ["a"]}, "give anchor, positive"),
    ],
)
def test_columns_that_are_no_texts_are_refused(columns: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message):
        with_ids(Dataset.from_dict(columns))
    with pytest.raises(DualencError, match="give one split"):
        with_ids(DatasetDict(train=Dataset.from_dict(columns)))


def test_texts_outside_the_batch_take_the_route_of_their_column(tmp_path: Path) -> None:
    config = {
        "model_type": "bert",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    tokenizer = train_tokenizer([" ".join(WORDS)] * 9, vocab_size=300)
    TextEncoder(config=config | {"intermediate_size": 64}, tokenizer=tokenizer, shared=False).save(
        tmp_path / "router"
    )
    routes = {"router_mapping": {"anchor": "query", "positive": "document"}, "max_steps": 1}
    trainer = train(tmp_path / "router", tmp_path / "out", "GlobalCache", **routes)
    ids = torch.arange(5)
    trainer.model.eval()
    for side, task in (("left", "query"), ("right", "document")):
        texts = trainer.loss.texts(side, ids)
        expected = trainer.model.encode(
            texts, task=task, normalize_embeddings=True, convert_to_tensor=True
        )
        with torch.no_grad():
            torch.testing.assert_close(trainer.loss.encode(side, ids), expected, rtol=0, atol=1e-6)


def test_data_without_ids_are_evaluated(model_folder: Path, tmp_path: Path) -> None:
    trainer = train(model_folder, tmp_path, "InfoNCE", max_steps=1)
    texts = pairs(8).select(range(5))  # all different
    numbered, _ = with_ids(texts)
    found = [trainer.evaluate(dataset)["eval_loss"] for dataset in (texts, numbered)]
    assert found[0] == pytest.approx(found[1])


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_scheduler_of_ones_own_needs_an_optimizer_with_the_temperature(
    model_folder: Path, tmp_path: Path, is_trained: bool
) -> None:
    dataset, texts = with_ids(pairs())
    model = sentence_transformers.SentenceTransformer(str(model_folder), device="cpu")
    loss = GlobalLoss(model, objective_of("SogCLR+", texts), texts)
    optimizer = torch.optim.AdamW((loss if is_trained else model).parameters(), 1e-3)
    arguments = sentence_transformers.SentenceTransformerTrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to=[],
        max_steps=2,
        save_strategy="no",
        disable_tqdm=True,
    )
    own = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    trainer = GlobalLossTrainer(model, arguments, train_dataset=dataset, loss=loss, optimizers=own)
    if is_trained:
        trainer.train()
        assert loss.objective.temperature.item() != pytest.approx(0.1, abs=1e-7)
    else:
        with pytest.raises(DualencError, match=r"add objective\.parameters"):
            trainer.train()


def test_the_best_of_models_alone_is_loaded(
    model_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved = {
        "save_strategy": "steps",
        "save_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "max_steps": 4,
    }
    train(model_folder, tmp_path, save_only_model=True, load_best_model_at_end=True, **saved)
    assert "Could not load" not in caplog.text


@pytest.mark.parametrize("block", [1, 2], ids=["theirs", "ours"])
def test_the_scripts_of_the_page_train(
    block: int, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pairs().to_csv("pairs.csv", index=False)
    script = code(ROOT / "docs" / "from-sentence-transformers.md", "python")[block]
    exec(script.replace("sentence-transformers/all-MiniLM-L6-v2", str(model_folder)), {})
    assert (tmp_path / "runs" / "mine" / "model" / "modules.json").is_file()
