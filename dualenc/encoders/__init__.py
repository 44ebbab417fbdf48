"""Dual encoders on open_clip, transformers, timm and vectors, and their model folders."""

# transformers, open_clip, timm and peft take seconds to import, so functions import them on use.
from dualenc.encoders.batchnorm import BatchStatistics
from dualenc.encoders.dual import DualEncoder, Prepare, Tower
from dualenc.encoders.image import ImageEncoder
from dualenc.encoders.image_text import ImageTextEncoder
from dualenc.encoders.index_encoder import IndexEncoder, interpolate, with_map
from dualenc.encoders.load import load_model
from dualenc.encoders.static import StaticEncoder
from dualenc.encoders.text import TextEncoder
from dualenc.encoders.tokenizer import load_tokenizer, train_tokenizer
from dualenc.encoders.vector import VectorEncoder

__all__ = [
    "BatchStatistics",
    "DualEncoder",
    "ImageEncoder",
    "ImageTextEncoder",
    "IndexEncoder",
    "Prepare",
    "StaticEncoder",
    "TextEncoder",
    "Tower",
    "VectorEncoder",
    "interpolate",
    "load_model",
    "load_tokenizer",
    "train_tokenizer",
    "with_map",
]
