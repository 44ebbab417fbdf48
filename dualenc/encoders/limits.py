"""Limits on sizes in configurations of foreign models, checked before a library builds them."""

from __future__ import annotations

import math
import re
from typing import Any

from dualenc.errors import DualencError
from dualenc.types import StrPath

LIMITS = {
    r"layers?$|depths?$|blocks?$|extra_ids|repeats$|stages$": 1_000,
    r"image_size|img_size|input_size|patch_size|kernel_size|crop_size": 8_192,
    r"heads?$|experts?$|buckets$|groups$": 100_000,
    r"vocab": 2**25,
    r"positions?$|position_embeddings$|context_length$|^n_ctx$": 2**24,
    r"dims?$|width$|channels?$|chans$|features$|size$|^[nd]_\w+$": 2**20,
}
"""The largest sizes by regular expressions of their names: above those of all known models."""


SQUARES = r"embed_dims?$|hidden_dims?$|^dims?$|width$"
"""Sizes of layers whose weights are about the square of them, or more."""
ROOM = 64
"""How many times as large as a model's weights such a square may be."""


def check_sizes(settings: Any, where: StrPath, num_weights: int | None = None) -> None:
    """Refuse a configuration with a size, at any depth, that would take minutes or all memory to
    build.

    Args:
        settings: the JSON of the configuration.
        where: its file, for the error.
        num_weights: of the file beside it, of which a size can be a part only; None: unknown.
    """
    pending = [("", settings)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            pending += [(str(key), child) for key, child in value.items()]
        elif isinstance(value, list):
            pending += [(name, child) for child in value]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            limit = next((most for names, most in LIMITS.items() if re.search(names, name)), None)
            if limit is not None and num_weights is not None and re.search(SQUARES, name):
                limit = min(limit, math.isqrt(ROOM * num_weights))
            if limit is not None and value > limit:
                size = f"{name} is {value:.4g}, above {limit:,}"
                raise DualencError(f"{where}: {size}; correct the file")
