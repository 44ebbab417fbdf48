"""What is adapting the queries of an image index worth, for captions and for images as queries?

    python eval/adapting_images.py run DATA WORK
    python eval/adapting_images.py report

DATA holds {train,dev,test}.parquet of images with five captions each (Flickr8k). A small open_clip
model is trained from scratch on the first half of the training images and kept in WORK. It has seen
none of the indexed images. `dualenc adapt` then trains on clicks:

- "captions": the index holds the other images. A click is a caption and its image. Images of the
  test set have no click ("new"); of the others ("seen") four captions are clicks and the fifth is a
  test query.
- "images": the index holds the second half of the training images. Queries are images of dev
  (clicks) and test (test queries); a click is one of the three images whose captions are nearest, by
  the cosine of their tf-idf.
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import frame
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from frame import Outcome, Settings, Store
from tasks import CLIP

from dualenc import adapt
from dualenc.data import Corpus, PairDataset, TablePairs
from dualenc.data.store.vector_shards import Embeddings
from dualenc.encoders import DualEncoder, ImageTextEncoder, load_model
from dualenc.evaluation.metrics import score_queries
from dualenc.evaluation.retrieval import divide_by_training, retrieve
from dualenc.objectives import InfoNCE
from dualenc.search.embed.encode import embed

STORE = frame.RESULTS / "adapting_images.jsonl"
BASE = {"epochs": 6, "batch_size": 128, "learning_rate": 1e-3}
TEMPERATURE = 0.07


def base_model(data: Path, work: Path) -> Path:
    """Train the model of the index on the first half of the training images, once."""
    folder = work / "base"
    if not folder.exists():
        columns = {"left_column": "image", "right_column": "captions"}
        pairs = TablePairs(data / "train.parquet", **columns)
        first = pairs.take(np.flatnonzero(pairs.left_id < pairs.num_left // 2))
        torch.manual_seed(0)
        model = ImageTextEncoder(config=CLIP, crop_scale=(0.5, 1.0))
        objective = InfoNCE(
            num_left=pairs.num_left, num_right=pairs.num_right, temperature=TEMPERATURE
        )
        frame.train(model, first, objective, **BASE).model.save(folder)
    return folder
