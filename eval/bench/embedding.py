"""Embedding: is it faster than `SentenceTransformer.encode`? Vectors must be the same.

python eval/bench/embedding.py
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import numpy as np
from in_turn import in_turn, ratios, shown

sys.path.insert(0, str(Path(__file__).parents[1]))

import toys
from frame import Outcome, Settings, command_line
from tasks import default_model

from dualenc.data import Corpus
from dualenc.encoders import load_model
from dualenc.search.embed.encode import embed
from dualenc.workflows.run_quickstart import read_docstrings


def throughput(texts: int = 400, model: str | None = None) -> None:
    """Compare times for docstrings of this machine, short and long; vectors must agree to 1e-4."""
    from sentence_transformers import SentenceTransformer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    path = model or default_model()
    tower = load_model(path, device="cpu").tower("right")
    encode = SentenceTransformer(path, device="cpu").encode
    found = read_docstrings(texts)
    kinds = {"summaries": [each.summary for each in found]}
    kinds["documents"] = [f"{each.name}: {each.rest}" for each in found]

    def run(settings: Settings) -> Outcome:
        items = kinds[settings["texts"]]
        corpus = Corpus([str(number) for number in range(len(items))], items)
        runs = {
            "dualenc": partial(embed, tower, corpus, batch_size=32, progress=False),
            "encode": partial(encode, items, batch_size=32, show_progress_bar=False),
        }
        times, vectors = in_turn(runs, repeats=3)
        np.testing.assert_allclose(vectors["dualenc"].vectors, vectors["encode"], atol=1e-4)
        return ratios(times)

    shown(f"{len(found)} texts", [{"texts": kind} for kind in kinds], run)


def check(folder: Path) -> None:
    """Embed docstrings with a toy model."""
    throughput(texts=8, model=str(toys.text_model(folder / "model")))


if __name__ == "__main__":
    command_line(throughput, check=check)
