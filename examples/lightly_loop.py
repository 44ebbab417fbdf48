"""SogCLR in a LightningModule on lightly's data, where file names become ids: python
examples/lightly_loop.py."""

from pathlib import Path

import pytorch_lightning as pl
import torch
import torchvision
from lightly.data import LightlyDataset
from lightly.transforms import SimCLRTransform
from torch.nn.functional import normalize
from toy_data import write_patterns

from dualenc.objectives import SogCLR


class SimCLR(pl.LightningModule):
    def __init__(self, names):
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=64)
        self.number = {name: number for number, name in enumerate(sorted(names))}
        self.criterion = SogCLR(
            num_left=len(names), views=True, temperature=0.2
        )  # instead of NTXentLoss
        # The memory is the same on all ranks already, or divided among them:
        # DistributedDataParallel must not send it.
        memory = [f"criterion.{name}" for name, _ in self.criterion.named_buffers()]
        self._ddp_params_and_buffers_to_ignore = memory

    def forward(self, images):
        return normalize(self.model(images), dim=1)

    def training_step(self, batch, batch_idx):
        (view0, view1), _, names = batch
        ids = torch.tensor([self.number[name] for name in names], device=self.device)
        return self.criterion(
            self(view0), self(view1), ids
        ).loss  # instead of self.criterion(z0, z1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06, momentum=0.9)


def main(folder=Path("runs/example_lightly"), epochs=2):
    write_patterns(folder / "images", per_class=16)  # yours: a folder of images
    dataset = LightlyDataset(str(folder / "images"), transform=SimCLRTransform(input_size=32))
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, drop_last=True)
    module = SimCLR(dataset.get_filenames())
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="auto", default_root_dir=folder, logger=False
    )
    trainer.fit(module, loader)
    return module


if __name__ == "__main__":
    main()
