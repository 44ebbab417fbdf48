"""Do the objectives work in other libraries' training loops? Each library's loss, and then ours.

    python eval/integrations.py text PAPERS --pairs 3000 --epochs 4 --seeds 3
    python eval/integrations.py open_clip FLICKR --epochs 2
    python eval/integrations.py lightly CIFAR10 --images 2000 --epochs 4

PAPERS is a BEIR folder; FLICKR and CIFAR10 have train.parquet and test.parquet. Within a library
all losses have the same loop, data, order of batches, seeds and τ; only ClipLoss goes on to learn
its τ, as in open_clip.
"""

from __future__ import annotations

import io
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import toys
from frame import RESULTS, Outcome, Settings, Store, command_line, print_runs
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchvision import transforms

from dualenc.data import BeirPairs
from dualenc.encoders import TextEncoder, train_tokenizer
from dualenc.evaluation.probe import accuracy, knn_predict
from dualenc.objectives import ISIR, GlobalCache, InfoNCE, Objective, SogCLR

STORE = RESULTS / "integrations.jsonl"
OURS: dict[str, Callable[..., Objective]] = {
    **{kind.__name__: kind for kind in (InfoNCE, SogCLR, ISIR, GlobalCache)},
    "SogCLR+": partial(SogCLR, positive_in_softmax=True),
}
FOUR = ("InfoNCE", "SogCLR", "ISIR", "GlobalCache")
BATCH_SIZE = 32
RATE = 1e-3
PIXELS = 32


def compare(
    train: Callable[[Settings], Outcome], losses: Sequence[str], seeds: int, out: Path, **more: Any
) -> None:
    """Train with each loss and seed, and print a row of a table per loss."""
    store = Store(out)
    store.get([{**more, "loss": loss, "seed": n} for loss in losses for n in range(seeds)], train)
    print_runs(more["library"], store.where(**more))


def text(
    papers: Path, pairs: int = 3000, epochs: int = 4, seeds: int = 3, out: Path = STORE
) -> None:
    """Let a transformer from scratch find abstracts, of test and training, by test titles."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    from dualenc.integrations.sentence_transformers import GlobalLoss, GlobalLossTrainer, with_ids

    pairs_of = {split: BeirPairs(papers, split) for split in ("train", "test")}
    rows = [[own[row] for row in range(len(own))] for own in pairs_of.values()]
    seen, held_out = rows[0][:pairs], rows[1]
    titles, abstracts = [own.left for own in seen], [own.right for own in seen]
    documents = {str(row): own.right for row, own in enumerate([*held_out, *seen])}
    queries = {f"q{row}": own.left for row, own in enumerate(held_out)}
    relevant = {f"q{row}": {str(row)} for row in range(len(queries))}
    evaluator = InformationRetrievalEvaluator(queries, documents, relevant, batch_size=128)
    tokenizer = train_tokenizer([*titles, *abstracts], vocab_size=8192)
    dataset, texts = with_ids(Dataset.from_dict({"anchor": titles, "positive": abstracts}))
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 512}
    config = {"model_type": "bert", "num_attention_heads": 4, **sizes}

    def train(run: Settings) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(run["seed"])
            TextEncoder(config=config, tokenizer=tokenizer, max_length=64).save(folder)
            torch.manual_seed(run["seed"])
            model = SentenceTransformer(folder, device="cpu")
            steps = {"num_train_epochs": epochs, "learning_rate": RATE, "warmup_steps": 0.1}
            steps |= {"per_device_train_batch_size": BATCH_SIZE, "dataloader_drop_last": True}
            arguments = SentenceTransformerTrainingArguments(
                f"{folder}/run", seed=run["seed"], save_strategy="no", disable_tqdm=True, **steps
            )
            both = {"directions": ("query_to_doc", "doc_to_query")}
            both["partition_mode"] = "per_direction"
            loss: nn.Module = MultipleNegativesRankingLoss(model, 1 / run["temperature"], **both)
            objective: Objective = InfoNCE()  # the trainer expects one; their loss ignores it
            if run["loss"] in OURS:
                numbers = {"num_left": texts.num_left, "num_right": texts.num_right}
                objective = OURS[run["loss"]](**numbers, temperature=run["temperature"])
                loss = GlobalLoss(model, objective, texts)
            trainer = GlobalLossTrainer(model, arguments, train_dataset=dataset, loss=loss)
            trainer.objective = objective
            trainer.train()
        return {"nDCG@10": evaluator(model)["cosine_ndcg@10"]}

    losses = ("MultipleNegativesRankingLoss", "InfoNCE", "SogCLR+", "GlobalCache")
    common = {"library": "sentence-transformers", "pairs": pairs, "epochs": epochs}
    compare(train, losses, seeds, out, **common, temperature=0.05)


def open_clip(flickr: Path, epochs: int = 2, seeds: int = 3, out: Path = STORE) -> None:
    """Train a small CLIP from scratch, on a caption per image; recall among 1,000 test pairs."""
    sys.path.append(str(Path(__file__).parents[1] / "examples"))
    import open_clip as library
    from open_clip_loop import LoaderWithIds
    from open_clip_train.data import get_data
    from open_clip_train.distributed import init_distributed_device
    from open_clip_train.params import parse_args
    from open_clip_train.scheduler import cosine_lr
    from open_clip_train.train import evaluate, train_one_epoch

    tower = {"image_size": PIXELS, "patch_size": 8, "width": 128, "layers": 3, "head_width": 32}
    words = {"context_length": 24, "vocab_size": 49408, "width": 64, "heads": 2, "layers": 2}
    prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize(0.5, 0.25)])
    tokenizer = library.SimpleTokenizer(context_length=24)

    def train(run: Settings) -> Outcome:
        torch.manual_seed(run["seed"])
        model = library.CLIP(64, tower, words, output_dict=True)
        nn.init.constant_(model.logit_scale, -math.log(run["temperature"]))
        data = get_data(args, (prepare, prepare), tokenizer=tokenizer)
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": 0.0}, {"params": []}]
        for parameter in model.parameters():
            groups[parameter.ndim >= 2]["params"].append(parameter)
        optimizer = torch.optim.AdamW(groups, lr=RATE)
        steps = epochs * data["train"].dataloader.num_batches
        scheduler = cosine_lr(optimizer, RATE, steps // 10, steps)
        loss: Any = library.ClipLoss()
        if run["loss"] in OURS:
            loader = data["train"].dataloader = LoaderWithIds(data["train"].dataloader)
            pairs, *ids_of_pairs = loader.loader.dataset.datasets
            first = [np.unique(own, return_index=True)[1] for own in ids_of_pairs]
            sizes = {**loader.sizes, "seed": run["seed"]}
            objective = OURS[run["loss"]](**sizes, temperature=run["temperature"])

            def encode(side: str, ids: Tensor) -> Tensor:
                column = ("left", "right").index(side)
                inputs = torch.stack([pairs[row][column] for row in first[column][ids.numpy()]])
                tower = (model.encode_image, model.encode_text)[column]
                return normalize(tower(inputs), dim=-1)

            def loss(image_features: Tensor, text_features: Tensor, **_: Any) -> dict[str, Tensor]:
                found = objective(image_features, text_features, *loader.ids, encode)
                return {"contrastive_loss": found.loss}

        torch.manual_seed(run["seed"])
        for epoch in range(epochs):
            train_one_epoch(model, data, loss, epoch, optimizer, None, scheduler, None, args)
        found = evaluate(model, data, epochs, args)
        return {way: float(found[way]) for way in ("image_to_text_R@10", "text_to_image_R@10")}

    with tempfile.TemporaryDirectory() as work:
        train_data, test_data = (
            write_captioned(flickr, Path(work), split, count)
            for split, count in (("train", 6000), ("test", 1000))
        )
        options = {"train-data": train_data, "val-data": test_data}
        options |= {"batch-size": BATCH_SIZE, "epochs": epochs, "workers": 0, "precision": "fp32"}
        args = parse_args([f"--{name}={value}" for name, value in options.items()])
        vars(args).update(distill=False, wandb=False, save_logs=False, device="cpu")
        init_distributed_device(args)
        common = {"library": "open_clip", "images": 6000, "epochs": epochs}
        compare(train, ("ClipLoss", *FOUR), seeds, out, **common, temperature=0.07)


def write_captioned(flickr: Path, work: Path, split: str, count: int) -> Path:
    """Write images and a table of their files, each with one of its captions; return the table."""
    table = pq.read_table(flickr / f"{split}.parquet")[:count]
    files, captions = write_images(table, work / split), table["captions"].to_pylist()
    lines = ["filepath\ttitle"]
    for number, (file, own) in enumerate(zip(files, captions, strict=True)):
        lines.append(f"{file}\t{own[number % len(own)]}")
    (work / f"{split}.csv").write_text("\n".join(lines), "utf-8")
    return work / f"{split}.csv"


def write_images(table: Any, folder: Path) -> list[Path]:
    """Write the images of a table, 32 pixels a side, to files named by their rows."""
    folder.mkdir()
    files = [folder / f"{row:06}.png" for row in range(len(table))]
    for file, cell in zip(files, table["image"].to_pylist(), strict=True):
        image = Image.open(io.BytesIO(cell["bytes"])).convert("RGB")
        image.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC).save(file)
    return files


def lightly(
    cifar10: Path, images: int = 2000, epochs: int = 4, seeds: int = 3, out: Path = STORE
) -> None:
    """Train SimCLR in a `LightningModule`; 20 nearest neighbors classify 2,000 test images."""
    import pytorch_lightning
    from lightly.data import LightlyDataset
    from lightly.loss import NTXentLoss
    from lightly.transforms.multi_view_transform import MultiViewTransform

    crop = transforms.RandomResizedCrop(PIXELS, scale=(0.2, 1.0))
    flip, gray = transforms.RandomHorizontalFlip(), transforms.RandomGrayscale(0.2)
    colors = transforms.ColorJitter(0.4, 0.4)
    view = transforms.Compose([crop, flip, gray, transforms.ToTensor(), colors])

    class SimCLR(pytorch_lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, criterion: nn.Module) -> None:
            super().__init__()
            self.backbone = convolutions()
            self.head = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
            self.criterion = criterion

        def forward(self, images: Tensor) -> Tensor:
            return normalize(self.head(self.backbone(images)), dim=1)

        def training_step(self, batch: Any, number: int) -> Tensor:
            left, right = map(self, batch[0])
            if isinstance(self.criterion, NTXentLoss):
                return self.criterion(left, right)
            ids = torch.tensor([int(Path(name).stem) for name in batch[2]])
            return self.criterion(left, right, ids, encode=self.encode).loss

        def encode(self, side: str, ids: Tensor) -> Tensor:
            return self(torch.stack([dataset[row][0][side == "right"] for row in ids.tolist()]))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=RATE)

    def train(run: Settings) -> Outcome:
        common = {"num_left": len(dataset), "views": True, "seed": run["seed"]}
        new = partial(OURS[run["loss"]], **common) if run["loss"] in OURS else NTXentLoss
        torch.manual_seed(run["seed"])
        module = SimCLR(new(temperature=run["temperature"])).train()
        loader = torch.utils.data.DataLoader(dataset, BATCH_SIZE, shuffle=True, drop_last=True)
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options = {"accelerator": "cpu", "devices": 1, "max_epochs": epochs}
        trainer = pytorch_lightning.Trainer(**options, **dict.fromkeys(quiet, False))
        torch.manual_seed(run["seed"])
        trainer.fit(module, loader)
        with torch.no_grad():
            seen, test = (module.backbone(own).numpy() for own in inputs)
        votes = knn_predict(seen, labels[0], test, k=20, temperature=math.inf)  # of equal weight
        return {"kNN accuracy": accuracy(votes, labels[1])}

    with tempfile.TemporaryDirectory() as work:
        inputs, labels = [], []
        for split, count in (("train", images), ("test", 2000)):
            table = pq.read_table(cifar10 / f"{split}.parquet")
            chosen = torch.randperm(len(table), generator=torch.Generator().manual_seed(0))[:count]
            table = table.take(chosen.numpy())
            labels.append(table["label"].to_numpy())
            write_images(table, Path(work, split))
            plain = LightlyDataset(f"{work}/{split}", transform=transforms.ToTensor())
            inputs.append(torch.stack([image for image, _, _ in plain]))
        dataset = LightlyDataset(f"{work}/train", transform=MultiViewTransform([view, view]))
        common = {"library": "lightly", "images": images, "epochs": epochs}
        compare(train, ("NTXentLoss", *FOUR), seeds, out, **common, temperature=0.2)


def convolutions() -> nn.Module:
    """Return three convolutions of stride 2 and their mean, 128 features."""
    layers: list[nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def check(folder: Path) -> None:
    """InfoNCE does what each library's loss does."""
    out = folder / "runs.jsonl"
    pictures = toys.images(folder / "images", train=70, test=30)
    for file in pictures.glob("*.parquet"):
        table = pq.read_table(file)
        captions = [[f"picture {row}"] for row in range(len(table))]
        pq.write_table(table.append_column("captions", [captions]), file)
    text(toys.beir(folder / "papers", documents=120), epochs=3, seeds=1, out=out)
    open_clip(pictures, seeds=1, out=out)
    lightly(pictures, seeds=1, out=out)
    for library in ("sentence-transformers", "open_clip", "lightly"):
        theirs, ours, *_ = (list(run.outcome.values()) for run in Store(out).where(library=library))
        np.testing.assert_allclose(ours, theirs, atol=0.04)


if __name__ == "__main__":
    command_line(text, open_clip, lightly, check=check)
