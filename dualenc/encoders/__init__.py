"""Towers and dual encoders on open_clip, transformers and timm; their folders, read and written."""

from dualenc.encoders.batchnorm import frozen_batchnorm
from dualenc.encoders.dual import DualEncoder
from dualenc.encoders.text import TextEncoder, TextTower
from dualenc.encoders.tokenizer import load_tokenizer, train_tokenizer
from dualenc.encoders.tower import Prepare, Tower

__all__ = [
    "DualEncoder",
    "Prepare",
    "TextEncoder",
    "TextTower",
    "Tower",
    "frozen_batchnorm",
    "load_tokenizer",
    "train_tokenizer",
]
