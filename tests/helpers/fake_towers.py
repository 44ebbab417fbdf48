"""Towers and corpora so simple that a test can say what must come out."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from dualenc.data import Corpus
from dualenc.encoders import Prepare, Tower
from dualenc.errors import BadSample

WORDS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen"]


class LetterPrepare(Prepare):
    """Letters as numbers, padded with zeros on either side."""

    modality = "text"

    def __init__(self, prompt: str = "", left_padding: bool = False) -> None:
        self.prompt, self.left_padding = prompt, left_padding

    def __call__(self, items: Any, seeds: Any = None) -> dict[str, torch.Tensor]:
        texts = [self.prompt + text for text in items]
        longest = max(map(len, texts))
        pad = str.rjust if self.left_padding else str.ljust
        letters = torch.tensor([[ord(c) for c in pad(text, longest, "\0")] for text in texts])
        return {
            "input_ids": letters,
            "attention_mask": (letters > 0).long(),
            "row": torch.arange(len(texts)),
        }


class LetterTower(Tower):
    """The mean of random vectors of a text's letters, normalised: whatever the padding, always the
    same."""

    modality = "text"

    def __init__(self, dim: int = 6, delay: float = 0, **prepare: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.letters = nn.Embedding(256, dim)
        self.dropout = nn.Dropout(0.5)
        self.prepare, self.dim, self.feature_dim, self.delay = (
            LetterPrepare(**prepare),
            dim,
            dim + 1,
            delay,
        )
        self.widths: list[tuple[int, int]] = []

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        time.sleep(self.delay)
        self.widths.append(tuple(inputs["input_ids"].shape))
        mask = inputs["attention_mask"][:, :, None]
        return nn.functional.normalize(
            (self.dropout(self.letters(inputs["input_ids"])) * mask).sum(1), dim=-1
        )

    def features(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([2 * self(inputs), inputs["attention_mask"].sum(1, keepdim=True)], dim=1)

    def slowly(self, texts: list[str]) -> np.ndarray:
        """Text after text, without batches."""
        rows = [
            self.letters.weight[[ord(c) for c in self.prepare.prompt + text]].sum(0)
            for text in texts
        ]
        return torch.stack([row / row.norm() for row in rows]).detach().numpy()


class PixelPrepare(Prepare):
    modality = "image"

    def __call__(self, items: Any, seeds: Any = None) -> dict[str, torch.Tensor]:
        return {
            "pixels": torch.stack(
                [torch.from_numpy(np.array(image, np.float32)).reshape(-1) for image in items]
            )
        }


class PixelTower(Tower):
    modality = "image"

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(12, 5)
        self.prepare, self.dim, self.feature_dim = PixelPrepare(), 5, 5

    def forward(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.normalize(self.linear(inputs["pixels"]), dim=-1)


class Images:
    """Four pixels per image; some cannot be decoded."""

    def __init__(self, count: int, broken: tuple[int, ...] = ()) -> None:
        self.count, self.broken = count, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, row: int) -> Image.Image:
        if row in self.broken:
            raise BadSample(f"image {row}: does not decode; replace it")
        return Image.fromarray(np.random.default_rng(row).integers(0, 255, (2, 2, 3), np.uint8))


def texts(count: int) -> list[str]:
    random = np.random.default_rng(0)
    return [" ".join(random.choice(WORDS, size=random.integers(1, 20))) for _ in range(count)]


def corpus(count: int = 300) -> Corpus:
    return Corpus([f"d{i}" for i in range(count)], texts(count))


def images(count: int = 90, broken: tuple[int, ...] = ()) -> Corpus:
    return Corpus([f"i{i}" for i in range(count)], Images(count, broken), "image")
