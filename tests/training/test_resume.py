"""A run that is killed and resumed ends with the same weights, bit for bit."""

import shutil
import signal
from pathlib import Path

import pytest

from dualenc.data import BeirPairs
from dualenc.errors import DualencError
from dualenc.training import RetrievalEvaluator, checkpoint
from dualenc.training.log import read_metrics
from tests.data.make import write_beir
from tests.training.fakes import (
    TinyEncoder,
    kill_this_process,
    same,
    tiny_objective,
    tiny_pairs,
    vector_encoder,
    vector_pairs,
    weights,
)
from tests.training.runs import FixedEvaluator, run_and_die, train, train_and_die


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    train(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("killed_at", [1, 4, 6])
def test_killed_and_resumed_equals_unbroken(tmp_path, unbroken, num_workers, killed_at):
    assert run_and_die(train_and_die, tmp_path, killed_at, {"num_workers": num_workers}) == -signal.SIGKILL
    assert not (tmp_path / "model").exists()
    train(tmp_path, resume=True, num_workers=num_workers)
    assert same(weights(tmp_path), weights(unbroken))


@pytest.mark.slow
def test_killed_and_resumed_equals_unbroken_with_vectors_from_a_file(tmp_path):
    def parts():
        pairs = vector_pairs(tmp_path)
        return {"model": vector_encoder(), "pairs": pairs, "objective": tiny_objective(pairs).float()}

    train(tmp_path / "whole", **parts())
    assert run_and_die(train_and_die, tmp_path / "broken", 7, parts()) == -signal.SIGKILL
    assert not (tmp_path / "broken" / "model").exists()
    assert train(tmp_path / "broken", resume=True, **parts()).steps == 12
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    assert not same(weights(tmp_path / "whole"), vector_encoder().state_dict()), "training has changed something"


@pytest.mark.slow
def test_killed_again_and_again(tmp_path, unbroken):
    for _ in range(4):  # each life reaches three more batches than its checkpoint
        assert run_and_die(train_and_die, tmp_path, 4, {"resume": True}) == -signal.SIGKILL
    train(tmp_path, resume=True)
    assert same(weights(tmp_path), weights(unbroken))


def die_while_writing(output: Path, at_save: int) -> None:
    """Be killed after half of a checkpoint's first file is written."""
    save, calls = checkpoint.save_tensors, 0

    def half_save(path, state):
        nonlocal calls
        calls += path.name == "state.pt"
        save(path, state)
        if calls == at_save and path.name == "state.pt":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            kill_this_process()

    checkpoint.save_tensors = half_save
    train(output)


@pytest.mark.slow
def test_a_kill_in_the_middle_of_writing_leaves_the_checkpoint_before(tmp_path, unbroken):
    assert run_and_die(die_while_writing, tmp_path, 3) == -signal.SIGKILL
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names[1:] == ["step-00000002", "step-00000004"]
    assert names[0].startswith(".step-00000006.part")
    train(tmp_path, resume=True)
    assert same(weights(tmp_path), weights(unbroken))
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over(tmp_path, unbroken):
    assert run_and_die(train_and_die, tmp_path, 8, {}) == -signal.SIGKILL
    latest = tmp_path / "checkpoints" / "step-00000006" / "state.pt"
    latest.write_bytes(latest.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="not complete and is passed over"):
        train(tmp_path, resume=True)
    assert same(weights(tmp_path), weights(unbroken))


@pytest.mark.slow
@pytest.mark.parametrize("damaged", [b"[]\n", b'{"loss": 1}\n'])
def test_a_log_that_no_training_wrote_is_explained_in_one_line(tmp_path, damaged):
    assert run_and_die(train_and_die, tmp_path, 8, {}) == -signal.SIGKILL
    (tmp_path / "metrics.jsonl").write_bytes(damaged)
    with pytest.raises(DualencError, match=r"metrics.jsonl: line 1 was not written by a training; restore the file"):
        train(tmp_path, resume=True)
    (tmp_path / "metrics.jsonl").unlink()
    train(tmp_path, resume=True)


@pytest.mark.slow
def test_what_evaluations_saw_is_that_of_an_unbroken_run(tmp_path):
    """Seven steps from the start are done, and two evaluations more than the checkpoint of step 4 knows of."""
    changes = {"evaluate_every": 2, "save_every": 4}

    def evaluator():
        return RetrievalEvaluator(pairs=tiny_pairs(12))

    assert run_and_die(train_and_die, tmp_path / "broken", 8, {**changes, "evaluator": evaluator()}) == -signal.SIGKILL
    assert [line["step"] for line in read_metrics(tmp_path / "broken" / "evaluations.jsonl")] == [0, 2, 4, 6]
    train(tmp_path / "broken", resume=True, evaluator=evaluator(), **changes)
    train(tmp_path / "whole", evaluator=evaluator(), **changes)
    broken, whole = ((tmp_path / name / "evaluations.jsonl").read_text() for name in ("broken", "whole"))
    assert broken == whole
    train(tmp_path / "whole", overwrite=True)
    assert not (tmp_path / "whole" / "evaluations.jsonl").exists()


@pytest.mark.slow
def test_the_log_of_a_resumed_run_is_that_of_an_unbroken_one(tmp_path, unbroken):
    run_and_die(train_and_die, tmp_path, 8, {})
    train(tmp_path, resume=True)
    logs = [read_metrics(folder / "metrics.jsonl") for folder in (tmp_path, unbroken)]
    assert [line["step"] for line in logs[0]] == [3, 6, 9, 12]
    for ours, theirs in zip(*logs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
        assert ours["learning_rate"] == theirs["learning_rate"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation": 3},
        {"optimizer": "lars", "chunk_size": 2},
        {"optimizer": "sgd", "mixed_precision": "bf16"},
    ],
)
def test_resume_is_exact_with_other_settings(tmp_path, changes):
    train(tmp_path / "whole", **changes)
    run_and_die(train_and_die, tmp_path / "broken", 8, changes)
    train(tmp_path / "broken", resume=True, **changes)
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))


@pytest.mark.slow
def test_resuming_a_finished_run_changes_nothing(tmp_path, unbroken):
    train(tmp_path)
    result = train(tmp_path, resume=True)
    assert result.steps == 12
    assert same(weights(tmp_path), weights(unbroken))


@pytest.mark.parametrize("keep_best", [True, False])
def test_a_finished_run_whose_model_folder_is_gone_saves_the_last_weights(tmp_path, capsys, keep_best):
    settings = {"evaluate_every": 4, "save_every": 4, "keep_best": keep_best}
    train(tmp_path, evaluator=FixedEvaluator(0, 0.9, 0.1, 0.2), **settings)
    shutil.rmtree(tmp_path / "model")
    model = TinyEncoder(dropout=0.2)
    result = train(tmp_path, evaluator=FixedEvaluator(), resume=True, model=model, **settings)
    assert ("model is gone, and the weights of the best step, 4" in capsys.readouterr().err) is keep_best
    assert same(weights(tmp_path), dict(model.state_dict()))
    assert result.metrics == {"score": 0.2}


def test_resuming_nothing_starts_from_the_beginning(tmp_path, unbroken):
    train(tmp_path, resume=True)
    assert same(weights(tmp_path), weights(unbroken))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.03}, "trainer.learning_rate was 0.02 and is now 0.03"),
        ({"batch_size": 8}, "trainer.batch_size was 6 and is now 8"),
        ({"seed": 1}, "trainer.seed was 0 and is now 1"),
    ],
)
def test_a_checkpoint_of_another_recipe_is_refused_in_one_line(tmp_path, unbroken, changes, message):
    with pytest.raises(DualencError, match=message) as raised:
        train(unbroken, resume=True, **changes)
    assert "another recipe" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_another_model_is_another_recipe(unbroken):
    with pytest.raises(DualencError, match=r"model was .* and is now"):
        train(unbroken, resume=True, model=TinyEncoder(shared=True))


def test_another_setting_of_the_objective_is_another_recipe(unbroken):
    with pytest.raises(DualencError, match=r"objective\.seed was 0 and is now 1"):
        train(unbroken, resume=True, objective=tiny_objective(tiny_pairs(), seed=1))


def beir_pairs(folder: Path, changed: str = "nothing") -> BeirPairs:
    """24 queries, each with one document, as numbers that the tiny encoder reads."""
    texts = [" ".join(str((7 * i + j) % 11 / 10) for j in range(6)) for i in range(24)]
    documents = [" ".join(reversed(text.split())) for text in texts]
    if changed == "a text":
        documents[5] = documents[5].replace("0.3", "0.9")
    corpus = [{"_id": f"d{i}", "text": text} for i, text in enumerate(documents)]
    queries = [{"_id": f"q{i}", "text": text} for i, text in enumerate(texts)]
    judged = range(24) if changed != "judgements" else reversed(range(24))
    write_beir(folder, corpus, queries, {"train": [[f"q{i}", f"d{j}", 1] for i, j in enumerate(judged)]})
    return BeirPairs(folder)


@pytest.mark.slow
@pytest.mark.parametrize(("changed", "named"), [("a text", "data.right_items"), ("judgements", "data.pairs")])
def test_changed_data_of_equal_size_is_refused_and_named(tmp_path, changed, named):
    train(tmp_path / "run", pairs=beir_pairs(tmp_path / "data"))
    train(tmp_path / "run", pairs=BeirPairs(tmp_path / "data"), resume=True)  # read again, nothing touched
    other = beir_pairs(tmp_path / "other", changed)
    with pytest.raises(DualencError, match=rf"or other data: {named} was '\w+' and is now '\w+'") as raised:
        train(tmp_path / "run", pairs=other, resume=True)
    assert "\n" not in str(raised.value)
