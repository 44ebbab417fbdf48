"""Size limits for the configurations of foreign models, checked before a library builds them."""

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
"""Maximum sizes by regular expressions of their names; above those of all known models."""


SQUARES = r"embed_dims?$|hidden_dims?$|^dims?$|width$"
"""Layer sizes of which a model has at least about the square in weights."""
ROOM = 64
"""Maximum ratio of such a square to the number of weights."""


def check_sizes(settings: Any, where: StrPath, num_weights: int | None = None) -> None:
    """Raise if a size in a configuration would take minutes or all memory to build.

    Args:
        settings: configuration as parsed from JSON; checked at any depth.
        where: its file, for the error.
        num_weights: number of weights in the file beside it, which limits sizes further; None if
            unknown.
    """
    # A list of pending nodes and not recursion, which deeply nested JSON could exhaust.
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
                raise DualencError(
                    f"{name} is {value:.4g}, above {limit:,}",
                    fix="correct the file",
                    where=where,
                )
