"""A dual encoder and pairs so small that a training run takes a fraction of a second, in float64 if
wanted."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from dualenc.data import TablePairs
from dualenc.data.pairs import PairDataset
from dualenc.encoders import StaticEncoder, train_tokenizer
from dualenc.encoders.dual import SIDES, DualEncoder, Prepare, Tower
from dualenc.encoders.vector import WEIGHTS_FILE, VectorEncoder
from dualenc.errors import BadSample
from dualenc.objectives.in_batch import InfoNCE

WIDTH = 6


class NumbersPrepare(Prepare):
    """Texts of numbers to float rows; with seeds, each item gets noise that is a function of its
    seed."""

    modality = "text"

    def __call__(
        self, items: Sequence[str], seeds: Sequence[int] | None = None
    ) -> dict[str, Tensor]:
        rows = torch.tensor(
            [[float(x) for x in item.split()] for item in items], dtype=torch.float64
        )
        if seeds is not None:
            draws = [torch.Generator().manual_seed(seed) for seed in seeds]
            rows += 0.1 * torch.stack(
                [torch.randn(WIDTH, generator=draw, dtype=torch.float64) for draw in draws]
            )
        return {"rows": rows}


class TinyTower(Tower):
    """Linear, optional BatchNorm, optional dropout, linear, unit norm; in whatever precision its
    weights have."""

    modality = "text"

    def __init__(self, dim: int = 5, dropout: float = 0.0, batchnorm: bool = False) -> None:
        super().__init__()
        self.dim = self.feature_dim = dim
        self.prepare = NumbersPrepare()
        norm = nn.BatchNorm1d(8) if batchnorm else nn.Identity()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 8), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, dim)
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        rows = inputs["rows"].to(self.layers[0].weight.dtype)
        vectors = self.layers(rows)
        return nn.functional.normalize(
            vectors if vectors.dtype == torch.float64 else vectors.float(), dim=-1
        )


class TinyEncoder(DualEncoder):
    """Two `TinyTower`s, or one for both sides, that save their weights as a plain file."""

    def __init__(
        self,
        *,
        seed: int = 0,
        dropout: float = 0.0,
        batchnorm: bool = False,
        shared: bool = False,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        left = TinyTower(dropout=dropout, batchnorm=batchnorm)
        right = left if shared else TinyTower(dropout=dropout, batchnorm=batchnorm)
        torch.set_rng_state(state)
        super().__init__(left, right, kind="query-document")
        self.to(dtype)

    def write(self, folder: Path) -> None:
        torch.save(self.state_dict(), folder / "weights.pt")
        (folder / "dualenc.json").write_text("{}")


class NumberItems(list[str]):
    """Items by position; those listed as bad cannot be read."""

    bad: tuple[int, ...] = ()

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        if index in self.bad:
            raise BadSample(f"row {index}: not readable")
        return super().__getitem__(index)


def tiny_pairs(
    num_pairs: int = 24, seed: int = 0, bad: tuple[int, ...] = (), **arguments: Any
) -> PairDataset:
    """Pairs of noisy copies of the same numbers."""
    draw = np.random.default_rng(seed)
    rows = draw.normal(size=(num_pairs, WIDTH))
    sides = [rows + 0.1 * draw.normal(size=rows.shape) for _ in range(2)]
    items = [NumberItems(" ".join(f"{x:.6f}" for x in row) for row in side) for side in sides]
    items[0].bad = bad
    return PairDataset(items[0], items[1], **arguments)


def vector_pairs(folder: Path) -> PairDataset:
    """The numbers of `tiny_pairs` as vectors in a file, most with mined negatives."""
    path = folder / "vectors.parquet"
    if not path.exists():
        rows = [
            {side: [float(x) for x in getattr(pair, side).split()] for side in SIDES}
            for pair in tiny_pairs()
        ]
        pq.write_table(pa.Table.from_pylist(rows), path)
    table = TablePairs(path, "left", "right")
    negatives = [[(i + 1) % 24, (i + 2) % 24][: i % 3] for i in range(24)]
    modality = {"left_modality": "vector", "right_modality": "vector"}
    return PairDataset(table.left_items, table.right_items, negatives=negatives, **modality)


def vector_encoder() -> VectorEncoder:
    """Adapters for `vector_pairs`, the same ones each time, in which nothing begins at zero."""
    draw = torch.Generator().manual_seed(0)
    model = VectorEncoder(WIDTH, dim=5, hidden=8, right_tower="linear")
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=draw) / 3)
    return model


def text_pairs() -> PairDataset:
    """24 pairs of texts with half of their words in common; most words are in few of them."""
    draw = np.random.default_rng(0)
    words = np.array([f"{first}{second}" for first in "bcdfgklm" for second in "aeiou"])
    rows = draw.choice(words, (24, 8), p=np.arange(40, 0, -1) / 820)
    left, right = ([" ".join(row) for row in side] for side in (rows[:, :6], rows[:, 2:]))
    return PairDataset(left, right, right_id=np.arange(24))


def static_encoder() -> StaticEncoder:
    """A table for `text_pairs`, the same one each time."""
    pairs = text_pairs()
    tokenizer = train_tokenizer([*pairs.left_items, *pairs.right_items], vocab_size=330)
    torch.manual_seed(0)
    return StaticEncoder(tokenizer=tokenizer, dim=6)


def tiny_objective(pairs: PairDataset, **arguments: Any) -> InfoNCE:
    """InfoNCE with a learnable temperature, in float64."""
    settings = {"temperature": 0.2, "learnable_temperature": True, **arguments}
    return InfoNCE(num_left=pairs.num_left, num_right=pairs.num_right, **settings).double()


def gradients(*modules: nn.Module) -> list[Tensor]:
    """A copy of every gradient."""
    return [p.grad.clone() for m in modules for p in m.parameters() if p.grad is not None]


def weights(folder: Path) -> dict[str, Tensor]:
    """The weights that a run has written."""
    if (folder / "model" / WEIGHTS_FILE).exists():
        return load_file(folder / "model" / WEIGHTS_FILE)
    return torch.load(folder / "model" / "weights.pt", weights_only=True)


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    """Whether two sets of weights are equal bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def assert_same_model(first: Path, second: Path, atol: float = 1e-12) -> None:
    """The weights that two runs have written agree up to rounding."""
    ours, theirs = weights(first), weights(second)
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], rtol=1e-9, atol=atol), name


def kill_this_process() -> None:
    """What no handler can catch."""
    os.kill(os.getpid(), signal.SIGKILL)
