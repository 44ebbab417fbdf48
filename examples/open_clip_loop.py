"""SogCLR in open_clip's own training loop, by ids that travel beside the batches: python
examples/open_clip_loop.py."""

from pathlib import Path

import numpy as np
import open_clip
import torch
from open_clip_train.data import get_data
from open_clip_train.distributed import init_distributed_device
from open_clip_train.params import parse_args
from open_clip_train.train import evaluate, train_one_epoch
from torch.utils.data import DataLoader, StackDataset
from toy_data import write_clip_files

from dualenc.objectives import SogCLR


class LoaderWithIds:
    """open_clip's loader of a table, which remembers the ids of the batch; equal images or captions
    have equal ids."""

    def __init__(self, loader):
        data = loader.dataset
        ids = [np.unique(side, return_inverse=True)[1] for side in (data.images, data.captions)]
        self.sizes = {"num_left": int(ids[0].max()) + 1, "num_right": int(ids[1].max()) + 1}
        self.num_batches, self.num_samples = loader.num_batches, loader.num_samples
        options = {"sampler": loader.sampler, "num_workers": loader.num_workers, "drop_last": True}
        self.loader = DataLoader(StackDataset(data, *ids), loader.batch_size, **options)

    def __iter__(self):
        for batch, *ids in self.loader:
            self.ids = ids
            yield batch


def main(folder=Path("runs/example_open_clip"), arguments=None):
    args = parse_args(
        arguments or write_clip_files(folder)
    )  # yours: those of open_clip_train.main, sys.argv[1:]
    vars(args).update(distill=False, wandb=False, save_logs=False)  # as open_clip_train.main does
    torch.manual_seed(args.seed)
    init_distributed_device(args)
    model, *prepare = open_clip.create_model_and_transforms(
        args.model, output_dict=True, device=args.device
    )
    data = get_data(args, prepare, tokenizer=open_clip.get_tokenizer(args.model))
    loader = data["train"].dataloader = LoaderWithIds(data["train"].dataloader)
    objective = SogCLR(**loader.sizes, temperature=0.1).to(
        args.device
    )  # its state_dict() belongs into checkpoints

    def loss(image_features, text_features, logit_scale, output_dict):
        """In the place of `open_clip.ClipLoss`."""
        ids = [side.to(args.device) for side in loader.ids]
        value = objective(image_features.float(), text_features.float(), *ids).loss
        return {
            "contrastive_loss": value + 0 * logit_scale
        }  # DistributedDataParallel wants every parameter used

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        train_one_epoch(model, data, loss, epoch, optimizer, None, None, None, args)
    return evaluate(model, data, args.epochs, args)


if __name__ == "__main__":
    main()
