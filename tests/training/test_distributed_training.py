"""Two processes train the model that one process trains, with the same global batches: one run of
every case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dualenc.batching import RandomBatches
from dualenc.data import Mixture
from dualenc.objectives import EMC2, InfoNCE, MomentumQueue, SogCLR
from dualenc.search import mining
from dualenc.training.log import read_metrics
from tests.helpers.every import CLASSES, make
from tests.helpers.fakes import (
    TinyEncoder,
    assert_same_model,
    static_encoder,
    text_pairs,
    tiny_objective,
    tiny_pairs,
    vector_encoder,
    vector_pairs,
)
from tests.helpers.launched import launch
from tests.helpers.runs import FixedEvaluator, train

pytestmark = pytest.mark.slow

MINED = [[(i + 3) % 24] * (i % 3) for i in range(24)]
# Half of the right items have two pairs, so that some parts list no positives.
RIGHT_ID = [*range(12), *(12 + number // 2 for number in range(12))]
# One rank's part of the first batch of four is empty.
BAD = tuple(RandomBatches(24, 4, seed=0).select(0)[0][2:].tolist())


def queue() -> MomentumQueue:
    return MomentumQueue(queue_size=16, momentum=0.8, temperature=0.2).double()


def with_positives(objective: Any, **columns: Any) -> dict[str, Any]:
    pairs = tiny_pairs(bad=BAD, right_id=RIGHT_ID, **columns)
    return {
        "pairs": pairs,
        "objective": objective,
        "batch_size": 4,
        "epochs": 2,
        "timeout_minutes": 0.5,
    }


def mixture(**options: Any) -> dict[str, Any]:
    few = tiny_pairs(14, seed=1, negatives=[[(i + 3) % 14] * (i % 3) for i in range(14)])
    pairs = Mixture({"many": tiny_pairs(24), "few": few}, **options)
    return {
        "pairs": pairs,
        "objective": tiny_objective(pairs),
        "batch_size": 5,
        "gradient_accumulation": 2,
    }


def mined(block: int) -> dict[str, Any]:
    """Blocks of five left items, so that each of two ranks has some; or one block for both."""
    mining.QUERIES_PER_BLOCK = block
    return {
        "mine_every": 1,
        "mine_negatives": 2,
        "batch_size": 5,
        "pairs": tiny_pairs(right_id=RIGHT_ID, bad=(8,)),
    }


CASES: dict[str, Any] = {
    "plain": lambda: {"save_every": 2},
    "uneven": lambda: {"batch_size": 5},
    "accumulated": lambda: {"gradient_accumulation": 2, "chunk_size": 2},
    "bad samples": lambda: {"pairs": tiny_pairs(bad=(1, 4, 7))},
    "negatives": lambda: {"pairs": tiny_pairs(negatives=MINED)},
    "evaluated": lambda: {"evaluate_every": 5, "evaluator": FixedEvaluator(0.1, 0.2, 0.4, 0.3)},
    "drawn proposals": lambda: {"objective": EMC2(num_left=24, proposals=7).double()},
    "momentum encoder, batchnorm": lambda: {
        "objective": queue(),
        "batch_size": 5,
        "batchnorm": True,
    },
    "momentum encoder, accumulated": lambda: {
        "objective": queue(),
        "gradient_accumulation": 2,
        "chunk_size": 2,
    },
    "batchnorm": lambda: {"batchnorm": True, "batch_size": 5},
    "batchnorm of one tower": lambda: {"batchnorm": True, "shared": True},
    "mixture": lambda: mixture(),
    "weighted mixture": lambda: mixture(weights={"few": 2.5, "many": 0.75}),
    "one source": lambda: mixture(batches="one_source", weights={"few": 2.0}),
    "mined in blocks": lambda: mined(5),
    "mined in one block": lambda: mined(512),
}
for kind in CLASSES:
    CASES[f"{kind.__name__}, positives"] = lambda kind=kind: with_positives(make(kind))
JUDGED = {"negatives": [[(i + 3) % 24] * (i % 2) for i in range(24)], "weights": range(24)}
for kind in (InfoNCE, SogCLR):
    CASES[f"{kind.__name__}, judged"] = lambda kind=kind: with_positives(
        kind(num_left=24, temperature=0.2).double(), **JUDGED
    )


def all_cases(output: Path, vectors: Path) -> None:
    """12 steps of each case without dropout, whose masks are drawn per process."""
    for name, make_changes in CASES.items():
        changes = {"save_every": None, **make_changes()}
        model = TinyEncoder(
            batchnorm=changes.pop("batchnorm", False), shared=changes.pop("shared", False)
        )
        train(output / name, model=model, **changes)
    pairs = vector_pairs(vectors)
    texts = text_pairs()
    train(
        output / "table",
        model=static_encoder(),
        pairs=texts,
        objective=tiny_objective(texts).float(),
        batch_size=5,
    )
    train(
        output / "vectors",
        model=vector_encoder(),
        pairs=pairs,
        objective=tiny_objective(pairs).float(),
    )


def on_ranks(output: Path, vectors: Path) -> None:
    all_cases(output, vectors)
    # A run that began on one process is resumed on two.
    train(output / "grown", model=TinyEncoder(), resume=True)


class Stop(Exception):
    """The machine is needed elsewhere."""


def begin_grown(output: Path) -> None:
    objective = tiny_objective(tiny_pairs())
    steps = iter(range(7))

    def stop(*_: Any) -> None:
        if next(steps) == 6:
            raise Stop

    objective.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        train(output, model=TinyEncoder(), objective=objective)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Every case with one process and with two."""
    folder = tmp_path_factory.mktemp("runs")
    one, two = folder / "one", folder / "two"
    two.mkdir()
    begin_grown(two / "grown")
    vector_pairs(folder)  # written before two processes want it
    ranks = launch(two, on_ranks, two, folder, ranks=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mining, "QUERIES_PER_BLOCK", mining.QUERIES_PER_BLOCK)
        all_cases(one, folder)
    ended = [process.end(300) for process in ranks]
    assert [code for code, _ in ended] == [0, 0], ended
    return one, two


@pytest.mark.parametrize("name", list(CASES))
def test_two_processes_give_the_model_of_one(runs, name):
    one, two = runs
    # The bias before a BatchNorm has no gradient but rounding, which AdamW divides by its own size.
    assert_same_model(one / name, two / name, atol=1e-8 if "batchnorm" in name else 1e-12)


def logs(runs: tuple[Path, Path], name: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    one, two = (read_metrics(folder / name / "metrics.jsonl") for folder in runs)
    assert [line.keys() for line in one] == [line.keys() for line in two]
    return list(zip(one, two, strict=True))


def test_the_log_is_that_of_one_process(runs):
    for name in ("vectors", "table"):
        assert_same_model(*(folder / name for folder in runs), atol=2e-6)
    for one, two in logs(runs, "bad samples"):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-9)
    for one, two in logs(runs, "drawn proposals"):
        # A few more than on one process: an item that two processes need is encoded by both.
        assert 0 < one["items_encoded"] <= two["items_encoded"] <= 1.5 * one["items_encoded"]
        for name in ("state/chains_moved", "state/chains_begun"):
            assert one[name] == pytest.approx(two[name], abs=1e-6)
    for name in ("mined in blocks", "mined in one block"):
        lines = [pair for pair in logs(runs, name) if "mined/seconds" in pair[0]]
        assert len(lines) == 2
        for one, two in lines:
            assert {**one, "mined/seconds": 0} == {**two, "mined/seconds": 0}


def test_more_processes_may_resume_from_a_checkpoint(runs):
    one, two = runs
    assert_same_model(one / "plain", two / "grown")
    assert [line["step"] for line in read_metrics(two / "grown" / "metrics.jsonl")] == [3, 6, 9, 12]
