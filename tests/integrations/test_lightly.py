"""Objectives as an attribute of a LightningModule, on a LightlyDataset."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightly")
lightning: Any = pytest.importorskip("pytorch_lightning")

from lightly.data import LightlyDataset  # noqa: E402
from lightly.loss import NTXentLoss  # noqa: E402
from torch.utils.data import DataLoader, RandomSampler  # noqa: E402

from dualenc import distributed  # noqa: E402
from dualenc.errors import DualencError  # noqa: E402
from dualenc.integrations.lightly import FileIds, ViewsLoss, keep_out_of_ddp  # noqa: E402
from dualenc.objectives import ISIR, GlobalCache, InfoNCE, MomentumQueue, Objective, SogCLR  # noqa: E402
from tests.integrations.clip_toy import pictures, prepare  # noqa: E402
from tests.test_docs import ROOT, code  # noqa: E402

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {
    "SogCLR": lambda **sizes: SogCLR(**sizes, temperature=0.2),
    "ISIR": lambda **sizes: ISIR(**sizes, temperature=0.2, recent=16),
    "GlobalCache": lambda **sizes: GlobalCache(**sizes, temperature=0.2),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def two_views(image: Any) -> list[Tensor]:
    """The upper half of an image and the negative of the lower one, so that nothing is random."""
    whole = prepare(image)
    return [whole[:, :8], -whole[:, 8:]]


class Module(lightning.LightningModule):  # type: ignore[misc]
    """A small SimCLR; `name` is one of the objectives, or lightly's own loss."""

    def __init__(self, ids: FileIds, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 16, 64), nn.ReLU(), nn.Linear(64, 16))
        if name == "NTXentLoss":
            self.criterion: Any = NTXentLoss(temperature=0.2)
        else:
            self.criterion = ViewsLoss(SETTINGS[name](**ids.sizes), ids, embed=self.forward)
        self.ours = name != "NTXentLoss"
        keep_out_of_ddp(self)

    def forward(self, images: Tensor) -> Tensor:
        embeddings: Tensor = self.network(images)
        return embeddings

    def training_step(self, batch: Any, number: int) -> Tensor:
        (view0, view1), _, names = batch
        loss: Tensor = self.criterion(self(view0), self(view1), *([names] if self.ours else []))
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.training_step(batch, number)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)


class Shuffled(RandomSampler):
    """The order is a function of the epoch, as of torch's DistributedSampler."""

    def set_epoch(self, epoch: int) -> None:
        self.generator = torch.Generator().manual_seed(epoch)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> LightlyDataset:
    folder = tmp_path_factory.mktemp("images")
    for number, (_, image) in enumerate(pictures()):
        image.save(folder / f"{number}.png")
    return LightlyDataset(str(folder), transform=two_views)


def trainer(folder: Path, epochs: int, **settings: Any) -> Any:
    warnings.simplefilter("ignore")
    defaults = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    defaults |= {"enable_model_summary": False, "enable_checkpointing": False, "default_root_dir": folder}
    return lightning.Trainer(max_epochs=epochs, **defaults | settings)


def fit(folder: Path, dataset: LightlyDataset, name: str, epochs: int, checkpoint: Path | None = None) -> Module:
    module = Module(FileIds(dataset), name)
    loader = DataLoader(dataset, batch_size=16, sampler=Shuffled(dataset))
    run = trainer(folder, epochs)
    run.fit(module, loader, ckpt_path=checkpoint)
    run.save_checkpoint(folder / f"{epochs}.ckpt")
    return module


def recall(module: nn.Module, dataset: LightlyDataset) -> float:
    """How many lower halves find their upper half."""
    with torch.no_grad():
        views = [torch.stack(side) for side in zip(*(row[0] for row in dataset), strict=True)]
        upper, lower = (nn.functional.normalize(module(side), dim=1) for side in views)
    return float(((upper @ lower.T).argmax(dim=0) == torch.arange(64)).float().mean())


def test_ids_are_those_of_file_names(dataset: LightlyDataset) -> None:
    ids = FileIds(dataset)
    assert ids.sizes == {"num_left": 64, "views": True}
    _, _, names = next(iter(DataLoader(dataset, batch_size=16, shuffle=True)))
    assert [ids.names[number] for number in ids(names).tolist()] == list(names)
    encode = ids.encoder(lambda images: images.flatten(1), lambda: torch.device("cpu"))
    expected = nn.functional.normalize(dataset[ids.rows[names[0]]][0][1].flatten(), dim=0)
    torch.testing.assert_close(encode("right", ids(names[:1]))[0], expected)
    with pytest.raises(DualencError, match=r"other\.png: not a file"):
        ids(["other.png"])
    with pytest.raises(DualencError, match="num_left=64 and views=True"):
        ViewsLoss(SogCLR(num_left=64), ids)
    with pytest.raises(DualencError, match=r"embed=self\.forward"):
        ViewsLoss(ISIR(num_left=64, views=True), ids)
    with pytest.raises(DualencError, match="MomentumQueue needs a momentum encoder"):
        ViewsLoss(MomentumQueue(views=True), ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NTXentLoss", "SogCLR", "ISIR"])
def test_trains_in_the_same_loop(name: str, dataset: LightlyDataset, tmp_path: Path) -> None:
    before = recall(Module(FileIds(dataset), name), dataset)
    module = fit(tmp_path, dataset, name, 40)
    assert recall(module, dataset) > before + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SETTINGS))
def test_resumes_bit_for_bit(name: str, dataset: LightlyDataset, tmp_path: Path) -> None:
    straight = fit(tmp_path, dataset, name, 3)
    fit(tmp_path, dataset, name, 2)
    resumed = fit(tmp_path, dataset, name, 3, tmp_path / "2.ckpt")
    expected = straight.state_dict()
    assert any(key.startswith("criterion.objective.") for key in expected)
    for key, value in resumed.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=0, equal_nan=True, msg=key)


@pytest.mark.slow
def test_code_of_the_page_runs(dataset: LightlyDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "images").symlink_to(dataset.input_dir)
    monkeypatch.chdir(tmp_path)
    (block,) = code(ROOT / "docs" / "from-lightly.md", "python")
    names: dict[str, Any] = {}
    exec(block, names)
    (checkpoint,) = tmp_path.rglob("*.ckpt")
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert state["criterion.objective.log_u"].isfinite().all()


def test_their_loss_is_ours_over_the_batch() -> None:
    torch.manual_seed(0)
    first, second = (nn.functional.normalize(torch.randn(8, 4), dim=1) for _ in range(2))
    ours = InfoNCE(temperature=0.1, views=True)(first, second, torch.arange(8)).loss
    torch.testing.assert_close(ours, NTXentLoss(temperature=0.1)(first, second))


def test_validation_leaves_the_memory_alone(dataset: LightlyDataset, tmp_path: Path) -> None:
    module = Module(FileIds(dataset), "SogCLR")
    trainer(tmp_path, 1).validate(module, DataLoader(dataset, batch_size=16), verbose=False)
    assert module.criterion.objective.log_u.isnan().all()


class Halves(torch.utils.data.Sampler[int]):
    """Each rank's rows; of one process, first those of the first rank in each batch of 16."""

    def __init__(self, rank: int | None) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 64 if self.rank is None else 32

    def __iter__(self) -> Any:
        order = torch.randperm(64, generator=torch.Generator().manual_seed(0)).view(4, 2, 8)
        return iter((order if self.rank is None else order[:, self.rank]).flatten().tolist())


class Ranked(Module):
    """With data that depends on the rank."""

    def __init__(self, dataset: LightlyDataset, name: str, world_size: int) -> None:
        super().__init__(FileIds(dataset), name)
        self.dataset, self.world_size = dataset, world_size

    def on_train_start(self) -> None:
        assert distributed.world_size() == self.world_size

    def train_dataloader(self) -> Any:
        sampler = Halves(self.trainer.global_rank if self.world_size > 1 else None)
        return DataLoader(self.dataset, batch_size=16 // self.world_size, sampler=sampler)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SogCLR", "ISIR", "GlobalCache"])
def test_two_ranks_equal_one(name: str, dataset: LightlyDataset, tmp_path: Path) -> None:
    states = []
    for world_size in (1, 2):
        module = Ranked(dataset, name, world_size)
        strategy = "ddp_fork" if world_size > 1 else "auto"
        run = trainer(tmp_path, 2, devices=world_size, strategy=strategy, use_distributed_sampler=False)
        run.fit(module)
        run.save_checkpoint(tmp_path / f"{name}.ckpt")
        states.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=False)["state_dict"])
    one, two = states
    assert one.keys() == two.keys()
    for key, value in two.items():
        limit = 1e-3 if value.dtype == torch.float16 else 1e-5
        torch.testing.assert_close(value, one[key], rtol=limit, atol=limit, equal_nan=True, msg=key)


def test_memories_stay_out_of_ddp(dataset: LightlyDataset) -> None:
    module = Module(FileIds(dataset), "SogCLR")
    buffers = {name for name, _ in module.named_buffers()}
    assert buffers == set(module._ddp_params_and_buffers_to_ignore)
    assert isinstance(module.criterion.objective, Objective)
