"""Training on several sources: batches, resuming, ranks and state as with one; the loss of each source in the log."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dualenc.batching import OSGDBatches, RandomBatches, SpectralBatches
from dualenc.batching.mixture import MixtureBatches
from dualenc.data import ImageViews, Mixture, PairDataset
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.errors import DualencError
from dualenc.objectives import DCL, ISIR, Distilled, GlobalCache, InfoNCE, Matryoshka, Objective, SogCLR
from dualenc.training.loader import BatchLoader
from dualenc.training.log import Meter, RunLog, read_metrics
from tests.pretended_device import DEVICE, pretended_device
from tests.training.fakes import TinyEncoder, same, tiny_objective, tiny_pairs, weights
from tests.training.launched import launch
from tests.training.runs import run_and_die, train, train_and_die

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weights": {"few": 2.5, "many": 0.75}},
    "one source": {"batches": "one_source", "weights": {"few": 2.0}},
}


def mixed(**options: Any) -> Mixture:
    """24 and 14 pairs, of which the second have mined negatives and weights."""
    mined = [[(i + 3) % 14] * (i % 3) for i in range(14)]
    few = tiny_pairs(14, seed=1, negatives=mined, weights=np.linspace(0.5, 1.5, 14))
    return Mixture({"many": tiny_pairs(24), "few": few}, **options)


def joined(both: Mixture) -> PairDataset:
    """The same pairs as one source, read item by item."""
    items = [[both.item(side, i) for i in range(n)] for side, n in (("left", both.num_left), ("right", both.num_right))]
    columns = {"negatives": both.negatives, "weights": both.weights}
    return PairDataset(*items, both.left_id, both.right_id, **columns)


def run(output: Path, pairs: Mixture | PairDataset, objective: Objective | None = None, **changes: Any) -> Any:
    objective = objective or tiny_objective(pairs)
    return train(output, pairs=pairs, objective=objective, **{"model": TinyEncoder(), **changes})


@pytest.mark.slow
def test_a_plain_mixture_trains_the_model_of_one_source_with_all_pairs(tmp_path: Path) -> None:
    run(tmp_path / "mixture", mixed())
    run(tmp_path / "joined", joined(mixed()))
    assert same(weights(tmp_path / "mixture"), weights(tmp_path / "joined"))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_loss_of_each_source_is_the_mean_over_its_pairs(tmp_path: Path, name: str) -> None:
    """Against a loop over the anchors of each batch, with the weights that it has before its step."""
    pairs, model = mixed(**OPTIONS[name]), TinyEncoder()
    settings = {"optimizer": "sgd", "momentum": 0.0, "warmup": 0, "learning_rate": 1e-12, "max_gradient_norm": None}
    run(tmp_path, pairs, model=model, epochs=1, log_every=3, **settings)
    selector: Any = RandomBatches(len(pairs), 6)
    if name != "plain":
        of_source = list(pairs.source_weights.values())
        selector = MixtureBatches(pairs.sizes, of_source, 6, one_source=pairs.batches == "one_source")
    loader = BatchLoader(pairs, model.left.prepare, model.right.prepare)
    found: dict[int, dict[str, list[float]]] = {}
    for step, batch in enumerate(loader.batches(selector.select(0))):
        negatives = None if batch.negatives is None else model("right", batch.negatives)
        with torch.no_grad():
            left, right = model("left", batch.left), model("right", batch.right)
            right_ids, compared = batch.right_id.tolist(), right
            if negatives is not None:
                right_ids, compared = right_ids + batch.negative_id.tolist(), torch.cat([right, negatives])
            for row, index in enumerate(batch.indices.tolist()):
                of_pair = 0.0
                for anchor, others, ids, own in (
                    (left[row], compared, right_ids, batch.right_id[row]),
                    (right[row], left, batch.left_id.tolist(), batch.left_id[row]),
                ):
                    logits = others @ anchor / 0.2
                    kept = [c for c, item in enumerate(ids) if c == row or item != own]
                    of_pair += float(torch.logsumexp(logits[kept], 0) - logits[row]) / 2
                source = ("many", "few")[index >= 24]
                found.setdefault(3 * (step // 3) + 3, {}).setdefault(source, []).append(of_pair * pairs[index].weight)
    lines = {line["step"]: line for line in read_metrics(tmp_path / "metrics.jsonl")}
    for step, by_source in zip(lines, found.values(), strict=True):
        assert {name for name in lines[step] if "/" in name} == {f"loss/{source}" for source in by_source}
        for source, losses in by_source.items():
            assert lines[step][f"loss/{source}"] == pytest.approx(np.mean(losses), rel=1e-6)
    assert all({*by} == {"many", "few"} for by in found.values()) or name == "one source"


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_killed_and_resumed_equals_unbroken(tmp_path: Path, name: str) -> None:
    def parts() -> dict[str, Any]:
        pairs = mixed(**OPTIONS[name])
        return {"pairs": pairs, "objective": SogCLR(num_left=pairs.num_left, num_right=pairs.num_right).double()}

    train(tmp_path / "whole", **parts())
    assert run_and_die(train_and_die, tmp_path / "broken", 8, parts()) == -signal.SIGKILL
    assert not (tmp_path / "broken" / "model").exists()
    train(tmp_path / "broken", resume=True, **parts())
    assert same(weights(tmp_path / "broken"), weights(tmp_path / "whole"))
    logs = [read_metrics(tmp_path / name / "metrics.jsonl") for name in ("broken", "whole")]
    for ours, theirs in zip(*logs, strict=True):
        assert ours.keys() == theirs.keys()
        for key in (key for key in ours if key.startswith("loss")):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": {"few": 3.0}}, "data.few.weight was '2' and is now '3'"),
        ({"weights": {"few": 2.0}, "batches": "one_source"}, "data.batches was 'mixed' and is now 'one_source'"),
        ({"weights": {"few": 2.0}, "left_prompts": {"few": "1 "}}, "data.few.prompts was None and is now"),
    ],
)
def test_a_changed_mixture_is_not_resumed(tmp_path: Path, options: Any, message: str) -> None:
    run(tmp_path, mixed(weights={"few": 2.0}), max_steps=3)
    with pytest.raises(DualencError, match=message) as raised:
        run(tmp_path, mixed(**options), max_steps=3, resume=True)
    assert "\n" not in str(raised.value)


def on_ranks(output: Path) -> None:
    for name, options in OPTIONS.items():
        settings = {"batch_size": 5, "save_every": None, "gradient_accumulation": 2}
        run(output / name, mixed(**options), chunk_size=2, **settings)


@pytest.mark.nightly
def test_two_processes_give_model_and_log_of_one(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    ranks = launch(tmp_path / "two", on_ranks, tmp_path / "two", ranks=2)
    on_ranks(tmp_path / "one")
    ended = [process.end(300) for process in ranks]
    assert [code for code, _ in ended] == [0, 0], ended
    for name in OPTIONS:
        ours, theirs = weights(tmp_path / "one" / name), weights(tmp_path / "two" / name)
        assert all(torch.allclose(ours[key], theirs[key], rtol=1e-9, atol=1e-12) for key in ours)
        logs = [read_metrics(tmp_path / ranks / name / "metrics.jsonl") for ranks in ("one", "two")]
        for one, two in zip(*logs, strict=True):
            assert one.keys() == two.keys()
            of_sources = [key for key in one if key.startswith("loss")]
            assert len(of_sources) > 1
            assert all(one[key] == pytest.approx(two[key], rel=1e-9) for key in of_sources)


def test_what_is_remembered_of_an_item_stays_with_it() -> None:
    """The averages of SogCLR after batches of one source are those of an objective for each source alone."""
    both, draw = mixed(), torch.Generator().manual_seed(0)
    together = SogCLR(num_left=both.num_left, num_right=both.num_right).double()
    alone = {name: SogCLR(num_left=part.num_left).double() for name, part in both.sources.items()}
    firsts = {"many": 0, "few": 24}
    selector = MixtureBatches(both.sizes, [1.0, 2.0], 6, one_source=True)
    for indices in selector.select(0):
        name = list(both.sources)[int(both.source_of(indices)[0])]
        left, right = torch.nn.functional.normalize(torch.randn(2, 6, 4, generator=draw).double(), dim=2)
        ids = torch.from_numpy(indices)
        together(left, right, torch.from_numpy(both.left_id[indices]), torch.from_numpy(both.right_id[indices]))
        alone[name](left, right, ids - firsts[name])
    for name, first in firsts.items():
        rows = slice(first, first + both.sources[name].num_left)
        tables = together.log_u.split([both.num_left, both.num_right])
        for ours, theirs in zip(tables, alone[name].log_u.chunk(2)):
            assert torch.isfinite(theirs).any()
            assert torch.equal(ours[rows].nan_to_num(99.0), theirs.nan_to_num(99.0))


@pytest.mark.slow
def test_a_chain_that_does_not_know_its_loss_logs_the_estimate_of_each_source(tmp_path: Path) -> None:
    pairs = mixed(weights={"few": 2.0})
    objective = ISIR(num_left=pairs.num_left, num_right=pairs.num_right, proposals=8, recent=5).double()
    run(tmp_path, pairs, objective)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert not any(name.startswith("loss") for line in lines for name in line)
    for line in lines:
        estimates = [line[name] for name in line if name.startswith("batch_estimate/")]
        assert min(estimates) - 1e-9 <= line["batch_estimate"] <= max(estimates) + 1e-9
    assert {"batch_estimate/many", "batch_estimate/few"} < {name for line in lines for name in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    "objective",
    [
        lambda **sizes: Matryoshka(InfoNCE(**sizes), dims=[2, 5]),
        lambda **sizes: SogCLR(positive_in_softmax=True, **sizes),
    ],
)
def test_the_losses_of_sources_make_up_the_loss(tmp_path: Path, objective: Any) -> None:
    sources = {"many": tiny_pairs(24), "few": tiny_pairs(12, seed=1)}
    pairs = Mixture(sources)
    run(tmp_path, pairs, objective(num_left=36, num_right=36).double(), epochs=2, batch_size=6, log_every=6)
    # In the first epoch `GlobalCache` does not know its loss.
    *_, line = read_metrics(tmp_path / "metrics.jsonl")
    assert (24 * line["loss/many"] + 12 * line["loss/few"]) / 36 == pytest.approx(line["loss"], rel=1e-6)


def test_bad_samples_belong_to_no_source(tmp_path: Path) -> None:
    pairs = Mixture({"good": tiny_pairs(12), "bad": tiny_pairs(12, seed=1, bad=(0, 5))})
    result = run(tmp_path, pairs, epochs=1, log_every=4)
    assert result.skipped == 2
    (line,) = read_metrics(tmp_path / "metrics.jsonl")
    assert np.isfinite([line["loss/good"], line["loss/bad"]]).all()


@pytest.mark.slow
def test_a_teachers_scores_of_one_source_teach(tmp_path: Path) -> None:
    few = tiny_pairs(
        8, seed=1, negatives=[[(i + 1) % 8] for i in range(8)], scores=[2.0] * 8, negative_scores=[1.0] * 8
    )
    pairs = Mixture({"many": tiny_pairs(16), "few": few})
    run(tmp_path / "taught", pairs, Distilled(tiny_objective(pairs), "margin_mse"))
    run(tmp_path / "alone", pairs)
    assert not same(weights(tmp_path / "taught"), weights(tmp_path / "alone"))


def test_objectives_and_batches_that_do_not_know_weights_are_refused(tmp_path: Path) -> None:
    pairs = mixed(weights={"few": 2.0})
    sizes = {"num_left": pairs.num_left, "num_right": pairs.num_right}
    refusals = {
        "the mixture chooses the batches, but ISIR as set .* give it proposals=64, or weigh all sources 1": {
            "objective": ISIR(**sizes)
        },
        "GlobalCache as set assumes random ones; .*, or weigh all sources 1 in mixed batches": {
            "objective": GlobalCache(**sizes)
        },
        "which RandomBatches does not know; leave batching out, or weigh all sources 1": {
            "batching": RandomBatches(len(pairs), 6)
        },
        "which OSGDBatches does not know": {"batching": OSGDBatches(len(pairs), 6)},
    }
    for message, parts in refusals.items():
        with pytest.raises(DualencError, match=message) as raised:
            run(tmp_path / "run", pairs, **parts)
        assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_selected_batches_go_with_a_plain_mixture(tmp_path: Path) -> None:
    pairs = mixed()
    run(tmp_path, pairs, DCL().double(), batching=SpectralBatches(len(pairs), 6))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert any("selection/loss" in line for line in lines)
    assert any("loss/few" in line for line in lines)


def test_one_batch_of_a_source_leaves_the_other_out_of_a_line(tmp_path: Path) -> None:
    run(tmp_path, mixed(**OPTIONS["one source"]), log_every=1, max_steps=4)
    for line in read_metrics(tmp_path / "metrics.jsonl"):
        (name,) = (name for name in line if name.startswith("loss/"))
        assert line[name] == pytest.approx(line["loss"], rel=1e-9)


def test_views_have_two_anchors_each(tmp_path: Path) -> None:
    """The mean over an image's two views, which lie half a batch apart."""
    images = Mixture({"a": ImageViews([0] * 3), "b": ImageViews([0] * 5)})
    assert images.source_of(np.arange(8)).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    meter = Meter(torch.device("cpu"), ["loss/a", "loss/b"])
    meter.add(1, torch.tensor(1.0), {"loss": 1.0})
    meter.add_pairs(torch.tensor([0, 1, 1]), torch.tensor([1.0, 2.0, 3.0, 5.0, 6.0, 9.0]))
    assert meter.average() == {"loss": 1.0, "loss/a": 3.0, "loss/b": 5.0}
    meter.add(2, torch.tensor(1.0), {"loss": 2.0})
    assert meter.average() == {"loss": 2.0}


def test_no_step_waits_for_the_device() -> None:
    with pretended_device() as device:
        meter = Meter(DEVICE, ["loss/a", "loss/b"])
        losses = torch.rand(6).to(DEVICE)
        before = device.waits
        meter.add_pairs(torch.tensor([0, 1, 1]), losses)
        assert device.waits == before


def test_sources_are_shown_next_to_the_progress_bar(tmp_path: Path) -> None:
    class Quiet:
        log_with = trackers = ()

        def log(self, *_: Any, **__: Any) -> None: ...

    log = RunLog(tmp_path / "metrics.jsonl", Quiet(), 10)  # type: ignore[arg-type]
    log.open("name", {})
    log.write(1, {"loss": 2.0, "loss/papers": 1.5, "loss/medical": 2.5, "selection/loss": 3.0})
    log.close()
    assert log.bar.postfix == "loss=2, papers=1.5, medical=2.5"


@pytest.mark.slow
def test_the_saved_folder_knows_the_prompts_of_its_sources(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers")
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer = train_tokenizer(["a dog runs", "query: ask: x"] * 3, vocab_size=300)
    config |= {"intermediate_size": 16, "max_position_embeddings": 40}
    for shared in (True, False):
        torch.manual_seed(0)
        model = TextEncoder(config=config, tokenizer=tokenizer, query_prompt="query: ", shared=shared)
        sources = {name: PairDataset([f"{name} {i}" for i in range(4)], ["a dog"] * 4) for name in ("asked", "told")}
        pairs = Mixture(sources, left_prompts={"asked": "ask: "})
        folder = tmp_path / str(shared)
        result = train(folder, model=model, pairs=pairs, objective=InfoNCE(), batch_size=4, epochs=1)
        assert (
            "asked (4 pairs, weight 1, left prompt 'ask: '); told (4 pairs" in (folder / "model/README.md").read_text()
        )
        theirs = sentence_transformers.SentenceTransformer(
            str(result.model_folder if shared else result.model_folder / "query"), device="cpu"
        )
        with torch.no_grad():
            ours = model.eval()("left", model.left.prepare(["ask: asked 1"]))
        found = theirs.encode(["asked 1"], prompt_name="asked_query", normalize_embeddings=True)
        assert np.allclose(ours.numpy(), found, atol=1e-5)
        again = TextEncoder(str(result.model_folder), query_prompt_name="asked_query")
        assert again.left.prepare.prompt == "query: ask: "
