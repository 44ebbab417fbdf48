"""Ranks that hold a part of the model each train the model that one process trains."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dualenc import distributed
from dualenc.data.corpus import Corpus
from dualenc.data.labels import Labels
from dualenc.data.pairs import PairDataset
from dualenc.data.table_pairs import ImageViews
from dualenc.encoders import ImageEncoder, ImageTextEncoder, TextEncoder, load_model, train_tokenizer
from dualenc.errors import DualencError
from dualenc.objectives import EMC2, ISIR, ExactGlobal, GlobalCache, InfoNCE, NegativeCache, SogCLR, negative_cache
from dualenc.search import embeddings as stored
from dualenc.search.embed import embed
from dualenc.training.checkpoint import Checkpoints
from dualenc.training.evaluators import Evaluator, KNNEvaluator, RetrievalEvaluator
from dualenc.training.log import read_metrics
from dualenc.training.optim import build_optimizer
from dualenc.training.sharding import SHARDED_OPTIMIZERS, check_shardable, repeated_layers, shard_model, split_state
from dualenc.training.trainer import Trainer, start_accelerator
from tests.training.fakes import NumberItems, TinyEncoder, kill_this_process, tiny_objective, tiny_pairs
from tests.training.launched import Launched, launch

pytest.importorskip("peft", reason="peft is not installed: pip install 'dualenc[lora]'")
if not distributed.can_shard():
    pytest.skip("this version of torch does not divide models as is needed here", allow_module_level=True)

TEXT = "a dog runs over the green grass two cats sit on very long sofa in evening reading book nobody ever"
WORDS = TEXT.split()
LEFT = [" ".join(WORDS[(3 * i + j) % len(WORDS)] for j in range(1 + i % 5)) for i in range(24)]
RIGHT = [" ".join(WORDS[(3 * i + 2 * j) % len(WORDS)] for j in range(2 + i % 9)) for i in range(24)]
NOISE = [Image.fromarray(np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)) for i in range(24)]

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 40,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
CLIP = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16},
    "text_cfg": {"context_length": 20, "width": 32, "heads": 2, "layers": 2},
}
ADAPTED = {"config": LLAMA, "pooling": "last", "lora_rank": 2}
ADAM = {"optimizer": "adamw", "learning_rate": 0.01}

CASES: dict[str, dict[str, Any]] = {
    "InfoNCE": {},
    "evaluated": {"evaluate_every": 3},
    "averaged": {"evaluate_every": 3, "weight_average": 0.7},
    "views": {"model": "vit", "objective": ISIR, "views": True, "evaluate_every": 3},
}
ON_THREE: dict[str, dict[str, Any]] = {
    "InfoNCE": {},
    "ranks without items": {"batch_size": 2, "epochs": 1},
    "ISIR, cached": {"objective": ISIR, "chunk_size": 2},
}
"""In the nightly run, as all below."""
ON_TWO: dict[str, dict[str, Any]] = {
    "ranks without items": {"batch_size": 2, "epochs": 1},
    "ISIR, cached": {"objective": ISIR, "chunk_size": 2},
    "two towers": {"encoder": {"shared": False}, **ADAM},
    "two towers, averaged": {"encoder": {"shared": False}, "weight_average": 0.9, **ADAM},
    "samples that cannot be read": {"bad": (1, 4, 7, 8, 9)},
    "accumulated": {"gradient_accumulation": 2, "chunk_size": 2, "max_gradient_norm": None},
    "mined negatives": {"negatives": [[(i + 3) % 24] * (i % 3 == 0) for i in range(24)], "batch_size": 4},
    "mined in training": {"mine_every": 1, "mine_negatives": 2, "batch_size": 4},
    "recomputed": {"objective": ISIR, "encoder": {**ADAPTED, "gradient_checkpointing": True}, **ADAM},
    "a frozen tower": {"objective": ISIR, "encoder": {"shared": False}, "frozen": True, "chunk_size": 2},
    "GlobalCache": {"objective": GlobalCache, "extra_encodes": 1.0},
    "CLIP": {"model": "clip"},
    "half precision": {"encoder": {**ADAPTED, "dtype": "bfloat16"}, **ADAM},
    "half precision, whole": {"encoder": {**ADAPTED, "dtype": "bfloat16"}, **ADAM, "shard_model": False},
    "autocast in half precision": {"mixed_precision": "bf16"},
    "autocast in half precision, whole": {"mixed_precision": "bf16", "shard_model": False},
    "SogCLR": {"objective": SogCLR},
    "SogCLR, cached": {"objective": SogCLR, "chunk_size": 2},
    "ISIR": {"objective": ISIR},
    "ISIR, adapters": {"objective": ISIR, "encoder": ADAPTED, **ADAM},
    "EMC2": {"objective": EMC2, "batch_size": 5},
    # A jump of a chain may hang on the last bit, with or without sharding: not so with this seed.
    "EMC2, drawn proposals": {"objective": EMC2, "proposals": 7, "chunk_size": 2, "seed": 1},
    "NegativeCache": {"objective": NegativeCache, "refresh": 0.3, "batch_size": 5},
    "ExactGlobal": {"objective": ExactGlobal, "corpus_chunk_size": 10},
}
OF_RANKS = ("samples_per_second", "items_encoded")
"""Lines of the log that the number of processes changes: an item that two of them need is encoded by both."""
OF_OBJECTIVES = (
    "score",
    "proposals",
    "extra_encodes",
    "refresh",
    "corpus_chunk_size",
    "views",
)
SETTINGS = {
    "batch_size": 6,
    "epochs": 2,
    "learning_rate": 0.3,
    "optimizer": "sgd",
    "save_every": None,
    "progress": False,
}
TO_RESUME = {
    **{"objective": ISIR, "encoder": ADAPTED, "evaluate_every": 3, "save_every": 2, "weight_average": 0.7, **ADAM}
}


def text_pairs(bad: Sequence[int] = (), **arguments: Any) -> PairDataset:
    """Texts of unlike length."""
    left, right = NumberItems(LEFT), NumberItems(RIGHT)
    left.bad = tuple(bad)
    return PairDataset(left, right, **arguments)


def text_encoder(**arguments: Any) -> TextEncoder:
    tokenizer = train_tokenizer([*LEFT, *RIGHT], vocab_size=300)
    torch.manual_seed(0)
    return TextEncoder(**{"config": BERT, "tokenizer": tokenizer, **arguments})


def one_case(
    output: Path,
    objective: Any = InfoNCE,
    encoder: Any = None,
    model: str = "text",
    resume: bool = False,
    die_at_batch: int | None = None,
    die_on_one: bool = False,
    frozen: bool = False,
    **changes: Any,
) -> None:
    """8 steps from one start; evaluations and refreshed caches come in several parts."""
    stored.MIN_SHARD_ROWS, negative_cache.REFRESH_CHUNK = 10, 2
    data = {name: changes.pop(name) for name in ("bad", "negatives") if name in changes}
    towers: Any = None
    if model == "text":
        towers, pairs = text_encoder(**(encoder or {})), text_pairs(**data)
    else:
        torch.manual_seed(0)
        if model == "clip":
            towers, pairs = ImageTextEncoder(config=CLIP), PairDataset(NOISE, RIGHT, left_modality="image")
        else:
            towers = ImageEncoder("test_vit", image_size=32, projector_dim=8, projector_layers=1)
            pairs = ImageViews(NOISE, Labels(np.arange(24) % 3, ["a", "b", "c"]))
    own = {name: changes.pop(name) for name in OF_OBJECTIVES if name in changes}
    loss = objective(
        num_left=pairs.num_left, num_right=pairs.num_right, temperature=0.1, learnable_temperature=True, **own
    )
    if die_at_batch is not None:
        batches = iter(range(1, 100))
        loss.register_forward_pre_hook(lambda *_: kill_this_process() if next(batches) == die_at_batch else None)
    if frozen:
        towers.right.requires_grad_(False)
    if die_on_one:
        passes = iter(range(100))

        def die(*_: Any) -> None:
            if distributed.rank() == 1 and next(passes) == 6:
                kill_this_process()

        towers.left.register_forward_pre_hook(die)
    evaluator: Evaluator | None = None
    if "evaluate_every" in changes:
        texts = model == "text"
        evaluator = RetrievalEvaluator(pairs=text_pairs(), batch_size=3) if texts else KNNEvaluator(pairs, pairs, k=3)
    Trainer(output=output, **{**SETTINGS, **changes}).fit(towers, pairs, loss, evaluator=evaluator, resume=resume)


def all_cases(output: Path, cases: dict[str, dict[str, Any]]) -> None:
    for name, changes in cases.items():
        one_case(output / name, **{"shard_model": True, **changes})


def embeddings(output: Path) -> Tensor:
    """Of all items, by the model that a run has saved."""
    return embedded(load_model(output / "model"))


def embedded(model: Any) -> Tensor:
    left, right = {"query-document": (LEFT, RIGHT), "image-text": (NOISE, RIGHT), "image": (NOISE, NOISE)}[model.kind]
    with torch.no_grad():
        return torch.cat([model(side, model.tower(side).prepare(x)) for side, x in (("left", left), ("right", right))])


def all_end(ranks: list[Launched], code: int = 0) -> None:
    ended = [process.end(300) for process in ranks]
    assert [found for found, _ in ended] == [code] * len(ranks), ended


def run_cases(folder: Path, cases: dict[str, dict[str, Any]], ranks: int) -> None:
    """Every case with one process and with several."""
    (folder / str(ranks)).mkdir(parents=True)
    all_end(launch(folder / str(ranks), all_cases, folder / str(ranks), cases, ranks=ranks))
    for name, changes in cases.items():
        if "half" not in name:
            one_case(folder / "1" / name, **changes)


def check_equal(folder: Path, name: str, ranks: int) -> None:
    one, several = (embeddings(folder / str(number) / name) for number in (1, ranks))
    # Caches remember embeddings in half precision.
    assert (one - several).abs().max() < (1e-4 if name == "GlobalCache" else 1e-5), name


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run_cases(folder, CASES, 2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_model_is_that_of_one_process(runs, name):
    check_equal(runs, name, 2)


@pytest.mark.nightly
def test_the_model_is_that_of_one_process_on_three(tmp_path):
    run_cases(tmp_path, ON_THREE, 3)
    for name in ON_THREE:
        check_equal(tmp_path, name, 3)


@pytest.mark.nightly
def test_the_model_is_that_of_one_process_in_every_setting(tmp_path):
    run_cases(tmp_path, ON_TWO, 2)
    for name in ON_TWO:
        if "half" not in name:
            check_equal(tmp_path, name, 2)

    def difference(name: str, other: str) -> float:
        return float((embeddings(tmp_path / "2" / name) - embeddings(tmp_path / "2" / other)).abs().max())

    assert difference("two towers, averaged", "two towers") > 1e-3
    # Rounding follows the shape of a batch: unsharded, texts of like length are encoded together.
    assert difference("half precision", "half precision, whole") < 5e-3
    assert difference("autocast in half precision", "autocast in half precision, whole") < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["evaluated", "views", "averaged"])
def test_log_and_evaluations_are_those_of_one_process(runs, name):
    logs = [read_metrics(runs / ranks / name / "metrics.jsonl") for ranks in ("1", "2")]
    assert any("evaluation" in key for line in logs[0] for key in line)
    for ours, theirs in zip(*logs, strict=True):
        ours, theirs = ({k: v for k, v in line.items() if k not in OF_RANKS} for line in (ours, theirs))
        assert ours == pytest.approx(theirs, rel=1e-5)


@pytest.mark.slow
def test_training_moves_the_model(runs):
    assert (embeddings(runs / "2" / "InfoNCE") - embedded(text_encoder())).abs().max() > 0.1


@pytest.mark.slow
def test_averages_are_saved_and_other_than_the_last_weights(runs):
    assert (embeddings(runs / "2" / "averaged") - embeddings(runs / "2" / "evaluated")).abs().max() > 1e-3


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """An unbroken run, and one killed at its seventh batch, on one process and on two."""
    folder = tmp_path_factory.mktemp("broken")
    one_case(folder / "whole", **TO_RESUME)
    all_end(launch(folder, one_case, folder / "whole on 2", ranks=2, shard_model=True, **TO_RESUME))
    for ranks in (1, 2):
        named = {"die_at_batch": 7, "shard_model": True, **TO_RESUME}
        all_end(launch(folder, one_case, folder / f"on {ranks}", ranks=ranks, **named), code=-signal.SIGKILL)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2), (2, 3)])  # saved and resumed on so many
def test_killed_and_resumed_on_any_number_of_processes(broken, tmp_path, before, after):
    shutil.copytree(broken / f"on {before}", tmp_path / "run")
    all_end(launch(tmp_path, one_case, tmp_path / "run", ranks=after, resume=True, shard_model=True, **TO_RESUME))
    assert (embeddings(tmp_path / "run") - embeddings(broken / "whole")).abs().max() < 1e-6
    if before == after:
        assert torch.equal(embeddings(tmp_path / "run"), embeddings(broken / "whole on 2"))
    logs = [read_metrics(run / "metrics.jsonl") for run in (broken / "whole", tmp_path / "run")]
    assert [line["step"] for line in logs[0]] == [line["step"] for line in logs[1]]
    assert logs[0][-1] == pytest.approx(logs[1][-1], rel=1e-5)


@pytest.mark.slow
def test_a_lost_process_is_explained_in_one_line(tmp_path):
    """It is gone while the other brings a layer's weights together."""
    first, second = launch(
        tmp_path, one_case, tmp_path / "run", ranks=2, shard_model=True, die_on_one=True, save_every=1
    )
    assert second.end()[0] == -signal.SIGKILL
    code, written = first.end()
    assert code == 2
    assert "dualenc: error: step 7: the connection to another process of this run is lost" in written
    assert "Traceback" not in written


def lose_the_model_folder(output: Path, weight_average: float | None) -> None:
    """The best weights come from a checkpoint then; the run itself continues with the last ones."""
    settings = {**TO_RESUME, "shard_model": True, "save_every": 1, "keep_checkpoints": 20, "evaluate_every": 1}
    settings["weight_average"] = weight_average
    one_case(output, **settings)
    kept = embeddings(output)
    distributed.barrier()
    if distributed.is_main():
        shutil.move(output / "model", output.with_name("moved"))
    distributed.barrier()
    one_case(output, resume=True, **settings)
    assert torch.equal(embeddings(output), kept)


@pytest.mark.nightly
@pytest.mark.parametrize("weight_average", [None, 0.7])
def test_a_lost_model_folder_is_written_again(tmp_path, weight_average):
    all_end(launch(tmp_path, lose_the_model_folder, tmp_path / "run", weight_average, ranks=2))
    assert (tmp_path / "moved" / "README.md").exists()


@pytest.mark.nightly
def test_an_unsharded_run_is_not_resumed_sharded(broken, tmp_path):
    shutil.copytree(broken / "whole", tmp_path / "run")
    with pytest.raises(DualencError, match=r"trainer\.shard_model was None and is now True"):
        one_case(tmp_path / "run", resume=True, shard_model=True, **TO_RESUME)


@pytest.mark.nightly
def test_a_damaged_shard_is_named(broken, tmp_path):
    shutil.copytree(broken / "on 2", tmp_path / "run")
    shards = sorted((tmp_path / "run" / "checkpoints" / "step-00000006" / "shards").iterdir())
    assert len(shards) == 2
    shards[1].write_bytes(shards[1].read_bytes()[:-4] + b"abcd")
    with pytest.raises(DualencError, match=f"{shards[1].name}: damaged"):
        one_case(tmp_path / "run", resume=True, shard_model=True, **TO_RESUME)


def one_step_in_parts(found: Path) -> None:
    """What this rank holds after a step with adapters and one without; and that clipping sees all gradients."""
    lines = []
    for encoder in ({}, ADAPTED):
        model = text_encoder(**encoder)
        whole = text_encoder(**encoder)
        shard_model(model, torch.device("cpu"))
        for some in (model, whole):
            inputs = some.left.prepare(RIGHT)
            some("left", inputs)[:, 0].sum().backward()
        norm = torch.nn.utils.clip_grad_norm_([p for p in whole.parameters() if p.requires_grad], 0.1)
        assert torch.allclose(distributed.clip_gradients(model.parameters(), 0.1), norm)
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None:
                assert torch.allclose(ours.grad.full_tensor(), theirs.grad, atol=1e-6)
        trained = [p for p in model.parameters() if p.requires_grad]
        # Where there is nothing left to average, ranks still agree on whether to stop.
        assert distributed.GradientAverage(trained).finish(distributed.rank()) == distributed.world_size() - 1
        with pytest.raises(DualencError, match="a sharded model embeds in memory only"):
            embed(model.left, Corpus(["a"], ["text"], "text"), found.with_name("embeddings"))
        with pytest.raises(DualencError, match="the model is still divided"):
            Trainer(output=found.with_name("run"), batch_size=6).fit(model, text_pairs(), InfoNCE())
        optimizer = build_optimizer([model], "adamw", sharded=trained)
        optimizer.step()
        _, large = split_state(model, optimizer)
        held = [*(p.grad for p in trained), *large.values()]
        total = sum(tensor.numel() for tensor in held)
        lines.append(f"{sum(distributed.local_part(tensor).numel() for tensor in held)} {total}")
    found.with_name(f"rank {distributed.rank()}").write_text("\n".join(lines))


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_each_rank_holds_its_share_and_gradients_are_those_of_one(tmp_path, ranks):
    all_end(launch(tmp_path, in_a_group, one_step_in_parts, tmp_path / "found", ranks=ranks))
    held = [[line.split() for line in (tmp_path / f"rank {rank}").read_text().splitlines()] for rank in range(ranks)]
    for case in (0, 1):
        shares, totals = zip(*((int(share), int(total)) for share, total in (of_rank[case] for of_rank in held)))
        assert sum(shares) == totals[0] == totals[-1]
        assert max(shares) < 1.1 * totals[0] / ranks  # rows of small matrices do not divide evenly


def steps_in_parts(_: Path) -> None:
    """Three steps with each optimizer, compared with those of an unsharded model."""
    for name in SHARDED_OPTIMIZERS:
        model, whole = text_encoder(), text_encoder()
        shard_model(model, torch.device("cpu"))
        rate = 30.0 if name == "lars" else 0.01
        for some in (model, whole):
            optimizer = build_optimizer([some], name, rate, weight_decay=0.1, sharded=list(model.parameters()))
            for _ in range(3):
                optimizer.zero_grad()
                some("left", some.left.prepare(RIGHT))[:, 0].sum().backward()
                optimizer.step()
        moved = whole("left", whole.left.prepare(RIGHT))
        assert (moved - text_encoder()("left", whole.left.prepare(RIGHT))).abs().max() > 0.01, name
        assert torch.allclose(model("left", model.left.prepare(RIGHT)), moved, atol=2e-5), name


@pytest.mark.nightly
def test_optimizers_take_the_steps_of_one_process(tmp_path):
    all_end(launch(tmp_path, in_a_group, steps_in_parts, tmp_path, ranks=2))


def in_a_group(function: Any, *arguments: Any) -> None:
    """Call with the ranks' process group, which a trainer would have made."""
    start_accelerator("no", [], Path())
    function(*arguments)


def test_parts_that_cannot_be_written_or_do_not_fit_are_explained_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    distributed.save_shards(tmp_path / "shards", {"weight": torch.ones(3)})
    for act, folder, tensors, message in (
        (distributed.save_shards, "file", {"weight": torch.ones(3)}, "cannot be written"),
        (distributed.load_shards, "shards", {"other": torch.zeros(3)}, "does not hold this model's weights"),
        (distributed.load_shards, "shards", {"weight": torch.zeros(4)}, "does not hold this model's weights"),
    ):
        with pytest.raises(DualencError, match=message) as caught:
            act(tmp_path / folder, tensors)
        assert "\n" not in str(caught.value)
    read = torch.zeros(3)
    distributed.load_shards(tmp_path / "shards", {"weight": read})
    assert torch.equal(read, torch.ones(3))


def save_elsewhere(folder: Path) -> None:
    """Each rank has a working directory of its own, as on machines without a common file system."""
    own = folder / str(distributed.rank())
    own.mkdir(parents=True)
    os.chdir(own)
    with pytest.raises(DualencError, match="not every process sees this folder"):
        Checkpoints(Path("checkpoints")).save(1, {"shards": {"weight": torch.zeros(3)}})
    assert not list(Path().rglob("*"))


@pytest.mark.slow
def test_a_folder_that_only_some_processes_see_is_refused(tmp_path):
    all_end(launch(tmp_path, in_a_group, save_elsewhere, tmp_path / "machines", ranks=2))


def test_units_are_the_outermost_repeated_layers():
    bert, vit = text_encoder().left, ImageEncoder("test_vit", image_size=32, projector_layers=1).left
    assert list(repeated_layers(bert)) == list(bert.backbone.encoder.layer)
    assert list(repeated_layers(vit)) == list(vit.backbone.blocks)
    # Of a layer's own lists nothing is taken apart, and lists of unlike members are none.
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    stages = nn.ModuleList([nn.Sequential(inner, nn.ReLU()), nn.Sequential(inner, nn.ReLU())])
    assert list(repeated_layers(nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), stages))) == list(stages)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "muon"}, "optimizer muon; choose one of adamw, sgd"),
        ({"optimizer": "adamw", "compile": True}, "compile; leave compile out"),
        ({"batchnorm": True}, "BatchNorm; leave shard_model out"),
    ],
)
def test_what_does_not_go_with_sharding_is_explained_in_one_line(tmp_path, settings, message):
    model = TinyEncoder(batchnorm=settings.get("batchnorm", False))
    trainer = {name: value for name, value in settings.items() if name != "batchnorm"}
    with pytest.raises(DualencError, match=f"shard_model does not go with {message}") as caught:
        Trainer(output=tmp_path / "run", shard_model=True, **trainer).fit(
            model, tiny_pairs(64), tiny_objective(tiny_pairs(64))
        )
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_towers_with_some_weights_in_common_are_refused():
    model = TinyEncoder()
    model.right.layers[0] = model.left.layers[0]
    with pytest.raises(DualencError, match="some weights in common; let them share all of them or none"):
        check_shardable(model)


def test_scaled_gradients_are_refused():
    with pytest.raises(DualencError, match="mixed_precision=fp16; use bf16"):
        check_shardable(TinyEncoder(), mixed_precision="fp16")


@pytest.mark.slow
def test_one_process_takes_the_option_too(tmp_path, monkeypatch):
    """There is nothing to divide; more processes can resume from its checkpoint."""
    # `one_case` sets them too, and here its process goes on with other tests.
    monkeypatch.setattr(stored, "MIN_SHARD_ROWS", 10)
    monkeypatch.setattr(negative_cache, "REFRESH_CHUNK", 2)
    for shard in (False, True):
        one_case(tmp_path / str(shard), shard_model=shard, epochs=1, save_every=4, encoder=ADAPTED, **ADAM)
    assert torch.equal(embeddings(tmp_path / "True"), embeddings(tmp_path / "False"))
    assert len(list((tmp_path / "True" / "checkpoints" / "step-00000004" / "shards").iterdir())) == 1
