"""Objectives in open_clip's own training loop and program."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

pytest.importorskip("open_clip_train")

import open_clip
from open_clip import ClipLoss
from open_clip_train.train import evaluate, train_one_epoch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from dualenc.errors import DualencError
from dualenc.integrations.open_clip import GlobalClipLoss, load_state, main, save_state, state_path, with_ids
from dualenc.objectives import EMC2, ISIR, GlobalCache, InfoNCE, MomentumQueue, Objective, SogCLR
from tests.integrations.clip_toy import (
    CONFIG,
    arguments,
    optimizer_of,
    prepare,
    read,
    tiny_clip,
    tokenize,
    write_csv,
    write_tars,
)
from tests.test_docs import ROOT, code

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "InfoNCE": lambda **sizes: InfoNCE(temperature=0.1),
    "SogCLR": lambda **sizes: SogCLR(**sizes, temperature=0.1, gamma_schedule="cosine"),
    "ISIR": lambda **sizes: ISIR(**sizes, temperature=0.1, recent=8),
    "EMC2": lambda **sizes: EMC2(**sizes, temperature=0.1, recent=8),
    "GlobalCache": lambda **sizes: GlobalCache(**sizes, temperature=0.1),
}
STATEFUL = ["SogCLR", "ISIR", "GlobalCache"]


def nightly(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.nightly)


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """open_clip's program sets the level of every logger there is: dill's would then print all that it pickles."""
    loggers = [logging.getLogger(name) for name in [None, *logging.root.manager.loggerDict]]
    levels = [logger.level for logger in loggers]
    handlers = list(logging.root.handlers)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    logging.root.handlers[:] = handlers


class Run:
    """open_clip's loop with an objective, one epoch at a time."""

    def __init__(self, args: SimpleNamespace, name: str, lr: float = 3e-3, optimizer: Any = torch.optim.AdamW) -> None:
        self.args = args
        self.model: Any = tiny_clip()
        self.data = read(args)
        self.data["train"] = with_ids(self.data["train"])
        objective: Objective = SETTINGS[name](**self.data["train"].sizes)
        self.loss = GlobalClipLoss(objective, self.data["train"], self.model, epochs=args.epochs)
        self.optimizer = optimizer_of(self.model, optimizer, lr)

    def epoch(self, number: int) -> None:
        torch.manual_seed(number)
        train_one_epoch(self.model, self.data, self.loss, number, self.optimizer, None, None, None, self.args)

    def state(self) -> dict[str, torch.Tensor]:
        whole = {**self.model.state_dict(), **self.loss.state_dict()}
        return {key: value.clone() for key, value in whole.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        limit = max(tolerance, 1e-3) if tolerance and value.dtype == torch.float16 else tolerance
        torch.testing.assert_close(
            found[key],
            value,
            rtol=limit,
            atol=limit,
            equal_nan=True,
            msg=lambda text, key=key: f"{key}: {text}",
        )


def recall(model: Any, args: SimpleNamespace) -> float:
    """Text-to-image R@1 among all pairs, by open_clip's own evaluation."""
    data = {"val": read(SimpleNamespace(**vars(args) | {"val_data": args.train_data, "train_data": None}))["val"]}
    return float(evaluate(model, data, args.epochs, args)["text_to_image_R@1"])


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_csv(tmp_path_factory.mktemp("csv"))


def test_equal_images_and_captions_have_equal_ids(tmp_path: Path) -> None:
    data = with_ids(read(arguments(write_csv(tmp_path, repeat=True)))["train"])
    assert data.sizes == {"num_left": 64, "num_right": 65}
    assert data.pairs.left_id.tolist() == [*range(64), 0, 1]
    assert data.pairs.right_id.tolist() == [*range(64), 64, 64]
    for number, (images, texts) in enumerate(data.dataloader):
        (rows,) = data.take_rows()
        assert len(rows) == len(images) == 16
        if number == 0:
            pairs = [data.pairs[row] for row in rows.tolist()]
            torch.testing.assert_close(texts, tokenize([pair.right for pair in pairs]))
            torch.testing.assert_close(images, torch.stack([data.prepare["left"](pair.left) for pair in pairs]))


@pytest.fixture
def old_tar_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of webdataset up to 0.2.86, which open_clip 3.3 asks for: later ones mark the end of a tar."""
    from open_clip_train import data

    if "eof_value" in inspect.signature(data.tar_file_expander).parameters:
        monkeypatch.setattr(data, "tar_file_expander", partial(data.tar_file_expander, eof_value=None))


@pytest.mark.slow
@pytest.mark.usefixtures("old_tar_reader")
def test_tars_have_stable_ids(tmp_path: Path) -> None:
    args = arguments(write_tars(tmp_path))
    data = with_ids(read(args)["train"])
    assert data.sizes == {"num_left": 64, "num_right": 64}
    seen = []
    for images, texts in data.dataloader:
        (rows,) = data.take_rows()
        seen += rows.tolist()
        for image, text, row in zip(images, texts, rows.tolist(), strict=True):
            torch.testing.assert_close(image, prepare(data.pairs[row].left))
            torch.testing.assert_close(text, tokenize([data.pairs[row].right])[0])
    assert sorted(seen) == list(range(64))
    assert with_ids(read(args)["train"]).pairs.identity() == data.pairs.identity()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["theirs", "SogCLR", "GlobalCache", *map(nightly, ("InfoNCE", "ISIR", "EMC2"))])
def test_trains_in_the_same_loop(name: str, table: Path) -> None:
    args = arguments(table, epochs=40)
    if name == "theirs":
        model, data, loss = tiny_clip(), read(args), ClipLoss()
        optimizer = optimizer_of(model)
        for epoch in range(args.epochs):
            train_one_epoch(model, data, loss, epoch, optimizer, None, None, None, args)
    else:
        run = Run(args, name)
        for epoch in range(args.epochs):
            run.epoch(epoch)
        model = run.model
        assert float(run.loss.seen) == 40 * 64
        torch.testing.assert_close(model.logit_scale.detach().exp(), torch.tensor(10.0))
    assert recall(tiny_clip(), args) < 0.1
    assert recall(model, args) > 0.3


@pytest.mark.nightly
@pytest.mark.usefixtures("old_tar_reader")
@pytest.mark.parametrize("name", ["SogCLR", "ISIR"])
def test_trains_on_tars(name: str, tmp_path: Path) -> None:
    run = Run(arguments(write_tars(tmp_path), epochs=40), name)
    for epoch in range(40):
        run.epoch(epoch)
    assert recall(run.model, arguments(write_csv(tmp_path), epochs=40)) > 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["InfoNCE", *STATEFUL])
def test_accumulated_batches_equal_a_large_one(name: str, table: Path) -> None:
    whole = Run(arguments(table, batch_size=32), name, 0.1, torch.optim.SGD)
    parts = Run(arguments(table, batch_size=8, accum_freq=4), name, 0.1, torch.optim.SGD)
    for epoch in range(2):
        whole.epoch(epoch)
        parts.epoch(epoch)
    assert_same(parts.state(), whole.state(), 1e-5)
    assert float(whole.loss.seen) == 128


@pytest.mark.slow
@pytest.mark.parametrize("name", STATEFUL)
def test_resumes_bit_for_bit(name: str, table: Path, tmp_path: Path) -> None:
    args = arguments(table)
    straight = Run(args, name)
    for epoch in range(3):
        straight.epoch(epoch)
        if epoch == 1:
            save_state(straight.loss, tmp_path / "epoch_2.pt")
            torch.save((straight.model.state_dict(), straight.optimizer.state_dict()), tmp_path / "epoch_2.pt")
    resumed = Run(args, name)
    weights, moments = torch.load(tmp_path / "epoch_2.pt")
    resumed.model.load_state_dict(weights)
    resumed.optimizer.load_state_dict(moments)
    load_state(resumed.loss, tmp_path / "epoch_2.pt")
    resumed.epoch(2)
    assert_same(resumed.state(), straight.state())


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "workers"), [("amp_bf16", 0), ("pure_bf16", 0), ("fp32", 1)])
def test_half_precision_and_workers(precision: str, workers: int, table: Path) -> None:
    run = Run(arguments(table, precision=precision, workers=workers), "GlobalCache")
    if precision == "pure_bf16":
        run.model.to(torch.bfloat16)
    run.epoch(0)
    assert run.loss.objective.log_temperature.dtype == torch.float32
    assert all(value.isfinite().all() for value in run.model.state_dict().values())


@pytest.mark.slow
def test_evaluation_leaves_the_tables_alone(table: Path) -> None:
    args = arguments(table)
    run = Run(args, "SogCLR")
    run.epoch(0)
    before = run.state()
    recall(run.model, args)
    assert_same(run.state(), before)


def work(rank: int, world_size: int, folder: Path, table: Path, names: list[str]) -> None:
    """Two epochs on one of several ranks, with DistributedDataParallel and SGD."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size)
    states = {}
    for name in names:
        share = 16 // world_size
        args = arguments(table, batch_size=share, world_size=world_size, rank=rank, accum_freq=name.count("+") + 1)
        run = Run(args, name.rstrip("+"), 0.1, torch.optim.SGD)
        dataset = run.data["train"].info.dataloader.dataset
        rows = [list(DistributedSampler(dataset, 2, rank=r, seed=1)) for r in range(2)]
        for epoch in range(2):
            order = rows[rank]
            if world_size == 1:  # of each step, first what the first rank has
                size = 8 * args.accum_freq
                order = [row for i in range(0, 32, size) for part in rows for row in part[i : i + size]]
            loader: Any = DataLoader(dataset, batch_size=share, sampler=order)
            loader.num_batches, loader.num_samples = len(loader), len(dataset)
            run.data["train"].info.dataloader = loader
            data = with_ids(SimpleNamespace(dataloader=loader, set_epoch=lambda _: None))
            run.loss.data, run.data["train"] = data, data
            if epoch == 0 and world_size > 1:
                run.model = DistributedDataParallel(run.model)
            run.epoch(epoch)
        run.model = getattr(run.model, "module", run.model)
        states[name] = run.state()
    torch.save(states, folder / f"{world_size}-{rank}.pt")
    if world_size > 1:
        dist.barrier()
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(table: Path, tmp_path: Path) -> None:
    names = ["InfoNCE", *STATEFUL, "ISIR+"]  # +: two batches accumulated
    work(0, 1, tmp_path, table, names)
    mp.start_processes(work, (2, tmp_path, table, names), nprocs=2, start_method="fork")
    one, *two = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for name in names:
        for rank in two:
            assert_same(rank[name], one[name], 1e-5)
        assert_same(two[1][name], two[0][name])


@pytest.fixture
def command(table: Path, tmp_path: Path) -> list[str]:
    """Arguments of open_clip's program for a tiny model."""
    (tmp_path / "tiny-test.json").write_text(json.dumps(CONFIG))
    open_clip.add_model_config(tmp_path)
    arguments = ["--model", "tiny-test", "--train-data", str(table), "--val-data", str(table), "--batch-size", "16"]
    arguments += ["--csv-separator", "\t", "--workers", "0", "--logs", str(tmp_path), "--name", "run", "--warmup", "1"]
    return [*arguments, "--device", "cpu", "--precision", "fp32", "--force-image-size", "16", "--lr", "1e-3"]


@pytest.mark.slow
def test_program_resumes(command: list[str], tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    main([*command, "--epochs", "2"], SETTINGS["SogCLR"])
    assert sorted(path.name for path in checkpoints.glob("epoch*")) == [
        f"epoch_{number}.pt{end}" for number in (1, 2) for end in ("", ".objective")
    ]
    main([*command, "--epochs", "3", "--resume", "latest"], SETTINGS["SogCLR"])
    state = torch.load(state_path(checkpoints / "epoch_3.pt"))
    assert int(state["seen"]) == 3 * 64
    weights = torch.load(checkpoints / "epoch_3.pt", weights_only=False)["state_dict"]
    assert float(weights["logit_scale"].exp()) == pytest.approx(10)
    with pytest.raises(DualencError, match="of another objective"):
        main([*command, "--epochs", "4", "--resume", "latest"], SETTINGS["ISIR"])
    state_path(checkpoints / "epoch_3.pt").unlink()
    with pytest.raises(DualencError, match=r"epoch_3.pt.objective: no such file"):
        main([*command, "--epochs", "4", "--resume", "latest"], SETTINGS["SogCLR"])


@pytest.mark.slow
def test_code_of_the_page_runs(
    command: list[str], table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, loop = code(ROOT / "docs" / "from-open-clip.md", "python")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_global.py", *command, "--epochs", "1"])
    exec(program, {})
    assert (tmp_path / "run" / "checkpoints" / "epoch_1.pt.objective").is_file()
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    names = {"args": arguments(table, model="tiny-test", val_data=str(table)), "optimizer": optimizer, "torch": torch}
    exec(loop, {**names, "scaler": None, "scheduler": None})
    assert (tmp_path / "epoch_4.pt.objective").is_file()


def test_their_loss_is_ours_over_the_batch() -> None:
    torch.manual_seed(0)
    images, texts = (torch.nn.functional.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
    ours = InfoNCE(temperature=0.1)(images, texts, torch.arange(8)).loss
    torch.testing.assert_close(ours, ClipLoss()(images, texts, torch.tensor(10.0)))


def test_wrong_uses_are_told_in_one_line(table: Path) -> None:
    run = Run(arguments(table), "SogCLR")
    features = torch.eye(16)
    with pytest.raises(DualencError, match="ids of 0"):
        run.loss(features, features)
    with pytest.raises(DualencError, match="no term for labels, logits"):
        run.loss(features, features, labels=features, logits=features)
    with pytest.raises(DualencError, match="data 64, 64"):
        GlobalClipLoss(SogCLR(num_left=3), run.data["train"], run.model)
    with pytest.raises(DualencError, match="MomentumQueue needs a momentum encoder"):
        GlobalClipLoss(MomentumQueue(), run.data["train"], run.model)
    with pytest.raises(DualencError, match="CSV file or webdataset"):
        with_ids(SimpleNamespace(dataloader=[1]))
